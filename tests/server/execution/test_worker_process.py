"""Test the front's handle of a worker: what it accepts from a misbehaving worker, and how it releases one."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import replace

import msgspec
import psutil
import pytest

from tests.server.running import wait_for
from upriver.coldstart.model.arrivals import Arrivals
from upriver.errors import ConfigError, DoesNotFit, Overloaded, TooLarge, UpriverError
from upriver.protocol import DEFAULT_CAPS
from upriver.server.execution import worker_process
from upriver.server.execution.worker_pool import WorkerPool, WorkerWatch
from upriver.server.execution.worker_process import BROKE_OFF, Job, WorkerHandle
from upriver.server.ipc.channel import MAX_MESSAGE_BYTES, Channel, ChannelClosed
from upriver.server.ipc.messages import (
    NO_SLOT,
    SMALL_BYTES,
    Done,
    Failed,
    FromFront,
    FromWorker,
    Here,
    Loaded,
    LoadProgram,
    MapSlot,
    NeedRoom,
    NeedSlot,
    NeedWeights,
    Room,
    Run,
    Setup,
    UseSlot,
)
from upriver.server.ipc.shared_memory import SealedFile, SlotPool
from upriver.server.programs.program_files import ProgramFiles
from upriver.server.programs.streaming_weights import ColdFile
from upriver.server.sandbox import cgroup
from upriver.server.sandbox.bubblewrap import Enclosure
from upriver.server.sandbox.cgroup import ControlGroup, ControlGroups

SETUP = Setup(threads=1, device="cpu", caps=DEFAULT_CAPS, memory_bytes=1 << 30)
FULL = {"code": "overloaded", "message": "no room"}


class There:
    """Process that neither a signal nor time can end."""

    pid = 7
    stdout = None
    returncode = None

    def __init__(self):
        self.killed = 0
        self.ended = threading.Event()

    def kill(self):
        self.killed += 1

    def wait(self, timeout=None):
        if not self.ended.wait(timeout):
            raise subprocess.TimeoutExpired("worker", timeout)


@contextmanager
def talking(script, *, group=None):
    """Yield a handle whose worker is a thread that runs ``script`` with its end of the channel."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    process = There()
    channel, other = Channel(ours, FromWorker), Channel(theirs, FromFront)
    channel.set_timeout(60)
    held = WorkerHandle(process, channel, group=group)

    def work():
        try:
            with suppress(ChannelClosed, ConnectionError):
                script(other)
        finally:
            other.close()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield held
    finally:
        process.ended.set()
        held.kill()
        thread.join()


def job(*ids, rows=1, room=lambda nbytes: True, beside=lambda nbytes: True):
    run = Run(program=None, micro_batch=len(ids), rows=rows, start=-1, stop=-1, ids=ids, slot=0)
    return Job(run=run, program=None, parts=[memoryview(b"x")], room=room, beside=beside)


def next_of(channel, kind):
    """Return the next message of a kind; drop the files that came with others."""
    while True:
        message, fds = channel.receive()
        for fd in fds:
            os.close(fd)
        if isinstance(message, kind):
            return message


# --------------------------------------------------------------------------------- accepted messages


def asking(*sizes, then):
    """Make a script that asks for a slot of each size, ignoring the answers."""

    def script(channel):
        next_of(channel, Run)
        for nbytes in sizes:
            channel.send(NeedSlot(nbytes=nbytes))
            next_of(channel, UseSlot)
        channel.send(then)

    return script


def imagining(*sizes, then, answers):
    """Make a worker that asks for memory for images of these sizes, and then ends with ``then``."""

    def script(channel):
        next_of(channel, Run)
        for nbytes in sizes:
            channel.send(NeedRoom(nbytes=nbytes))
            answers.append(next_of(channel, Room).granted)
        channel.send(NeedSlot(nbytes=1))
        next_of(channel, UseSlot)
        channel.send(then)

    return script


def done(count):
    return Done(frames=((b"head", None),) * count, phases={}, stages={})


def test_a_worker_is_told_whether_there_is_room_for_its_images():
    answers = []
    with talking(imagining(5, 7, 9, then=done(1), answers=answers)) as held:
        assert held.run(job(0, beside=lambda nbytes: nbytes < 9)).nbytes == 1
    assert answers == [True, True, False]


@pytest.mark.parametrize("asked", ["room", "beside"])
def test_a_job_for_which_there_never_is_room_says_so_when_its_worker_has_ended_it(asked):
    def never(nbytes):
        raise DoesNotFit(f"{nbytes} bytes are too many")

    full = Failed(body={"error": {"code": "overloaded", "message": "not now"}})
    script = asking(7, then=full) if asked == "room" else imagining(7, then=full, answers=[])
    with talking(script) as held, pytest.raises(DoesNotFit, match="7 bytes are too many"):
        held.run(job(0, **{asked: never}))


@pytest.mark.parametrize("sizes", [(0,), (-1,), (5, 5), (5, 4)])
def test_a_worker_that_asks_for_the_same_again_is_at_its_end(sizes):
    with (
        talking(imagining(*sizes, then=done(1), answers=[])) as held,
        pytest.raises(ChannelClosed, match="more memory"),
    ):
        held.run(job(0))


def test_all_that_a_job_gives_has_to_find_room_together():
    asked = []

    def room(nbytes):
        asked.append(nbytes)
        return True

    with talking(asking(100, 30, then=done(2))) as held:
        result = held.run(job(0, 1, room=room))
    assert asked == [100, 130]
    assert result.nbytes == 130


def answering(*frames):
    """Make a worker that answers with these frames at once."""

    def script(channel):
        next_of(channel, Run)
        channel.send(Done(frames=frames, phases={}, stages={}))

    return script


def test_small_payloads_come_with_the_answer_in_order_with_those_in_slots():
    def script(channel):
        next_of(channel, Run)
        channel.send(NeedSlot(nbytes=3))
        next_of(channel, UseSlot)
        frames = ((b"a", b"one"), (b"b", None), (b"c", b""))
        channel.send(Done(frames=frames, phases={}, stages={}))

    asked = []
    with talking(script) as held:
        result = held.run(job(0, 1, 2, room=lambda nbytes: not asked.append(nbytes)))
    assert [head for head, _ in result.frames] == [b"a", b"b", b"c"]
    assert [bytes(payload) for _, payload in result.frames] == [b"one", bytes(3), b""]
    assert asked == [3, 6]


def test_small_payloads_have_to_find_room_too():
    with talking(answering((b"a", b"one"))) as held, pytest.raises(Overloaded, match="no memory"):
        held.run(job(0, room=lambda nbytes: False))


@pytest.mark.parametrize(
    "frames",
    [
        [(b"a", bytes(SMALL_BYTES + 1))],
        [(b"a", bytes(SMALL_BYTES)), (b"b", b"1")],
        [(b"a", None)],
        [(b"a", b"")] * 3,
    ],
    ids=["large", "together", "no slot", "frames"],
)
def test_a_worker_that_answers_with_more_than_it_may_is_at_its_end(frames):
    with talking(answering(*frames)) as held, pytest.raises(ChannelClosed, match="2 frames at most"):
        held.run(job(0, 1))


def test_a_worker_that_asks_for_more_slots_than_its_job_has_frames_gets_none():
    with (
        talking(asking(*[1] * 9, then=done(9))) as held,
        pytest.raises(ChannelClosed, match="at most 2 slots"),
    ):
        held.run(job(0, 1, 2, 3, rows=2))


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0])
@pytest.mark.parametrize("field", ["phases", "stages"])
def test_a_worker_that_reports_impossible_seconds_is_at_its_end(field, seconds):
    said = {"phases": {}, "stages": {}, field: {{"phases": "forward", "stages": 1}[field]: seconds}}
    with talking(asking(then=Done(frames=(), **said))) as held, pytest.raises(ChannelClosed, match=field):
        held.run(job(0))


class Coming(ColdFile):
    """Weights that have not arrived yet, and arrive as soon as a worker waits for them."""

    def __init__(self, count):
        self._file = SealedFile()
        self.fd, self.nbytes = self._file.fd, count
        self._arrivals = Arrivals(count)

    def wait(self, numbers, *, timeout_s):
        return True


def coming(count):
    graph = SealedFile()
    return ProgramFiles(key="a", digest="d", graph=graph, weights=Coming(count), numbers=range(count))


def wanting(*questions):
    """Make a worker that asks for weights with these questions, and then is done."""

    def script(channel):
        next_of(channel, LoadProgram)
        channel.send(Loaded())
        next_of(channel, Run)
        for weights in questions:
            channel.send(NeedWeights(weights=weights))
            next_of(channel, Here)
        channel.send(done(0))

    return script


def test_a_worker_waits_for_each_weight_once():
    with talking(wanting((0, 1), (2,), (3,))) as held:
        assert held.run(replace(job(0), program=coming(4))).frames == []


@pytest.mark.parametrize(
    "questions", [[()], [(0,)] * 5, [(-1,)], [(4,)]], ids=["none", "again", "negative", "beyond"]
)
def test_a_worker_that_asks_for_weights_that_no_stage_waits_for_is_at_its_end(questions):
    with talking(wanting(*questions)) as held, pytest.raises(ChannelClosed, match="weights that"):
        held.run(replace(job(0), program=coming(4)))


def test_a_worker_that_is_gone_is_noticed_while_its_weights_are_still_to_come(monkeypatch):
    monkeypatch.setattr(worker_process, "LOOK_S", 0.01)
    monkeypatch.setattr(Coming, "wait", lambda file, numbers, *, timeout_s: time.sleep(timeout_s))

    def script(channel):
        next_of(channel, LoadProgram)
        channel.send(Loaded())
        next_of(channel, Run)
        channel.send(NeedWeights(weights=(0,)))  # and ends

    with talking(script) as held, pytest.raises(ChannelClosed, match="gone"):
        held.run(replace(job(0), program=coming(4)))


def test_a_slot_of_less_than_nothing_is_nonsense():
    with talking(asking(-1, then=done(1))) as held, pytest.raises(ChannelClosed):
        held.run(job(0))


def test_a_job_that_is_too_long_to_tell_is_refused_and_the_worker_goes_on():
    """A dataset's chain may be arbitrarily long: a long one must not end workers."""

    def script(channel):
        next_of(channel, Run)
        channel.send(done(0))

    long = replace(job(0), run=msgspec.structs.replace(job(0).run, chain=bytes(MAX_MESSAGE_BYTES)))
    with talking(script) as held:
        with pytest.raises(TooLarge):
            held.run(long)
        assert held.run(job(0)).frames == []


def refuse(pool, nbytes, *, owner):
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_a_front_without_descriptors_does_not_blame_its_worker(monkeypatch):
    """Check before a job is sent, and when its answer needs a descriptor."""
    answers = []

    def script(channel):
        for _ in range(2):
            next_of(channel, Run)
            channel.send(NeedSlot(nbytes=1))
            answers.append(next_of(channel, UseSlot).slot)
            channel.send(Failed(body={"error": FULL}) if answers[-1] == NO_SLOT else done(1))

    def room(nbytes):
        monkeypatch.setattr(SlotPool, "take", refuse)
        return True

    with talking(script) as held:
        with pytest.raises(Overloaded):
            held.run(job(0, room=room))
        with pytest.raises(Overloaded, match="memory"):
            held.run(job(0))
        monkeypatch.undo()
        assert held.run(job(0)).nbytes == 1
    assert answers[0] == NO_SLOT != answers[1]


def test_a_slot_that_cannot_be_had_leaves_nothing(monkeypatch):
    def memfd_create(name, flags=0):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "memfd_create", memfd_create)
    with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
        SlotPool().take(1)


# -------------------------------------------------------------------------------- release of a worker


def test_a_worker_that_cannot_be_ended_does_not_hold_anybody_up(monkeypatch):
    monkeypatch.setattr(worker_process, "KILL_TIMEOUT_S", 0.01)
    waiting = "upriver-worker-end"
    with talking(lambda channel: next_of(channel, MapSlot)) as held:
        held.kill()
        assert held._process.killed == 1
        assert any(thread.name == waiting for thread in threading.enumerate())
        held._process.ended.set()
        wait_for(lambda: not any(thread.name == waiting for thread in threading.enumerate()))


def test_that_memory_ran_out_is_known_before_a_process_is_gone(tmp_path):
    (tmp_path / "memory.events").write_text("low 0\noom 1\noom_kill 1\n")
    group = ControlGroup(tmp_path, cgroup._V2, 64 << 20)
    with talking(lambda channel: next_of(channel, MapSlot), group=group) as held:
        assert held.ending() == f"{BROKE_OFF}: it ran out of memory (64 MiB allowed)"
        assert held.out_of_memory


def test_a_worker_without_a_thread_to_read_what_it_prints_is_not_left(monkeypatch):
    def no_thread(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    before = set(psutil.Process().children())
    with pytest.raises(UpriverError, match="can't start new thread"):
        WorkerHandle.start(threads=1)
    assert set(psutil.Process().children()) <= before


class Gone:
    """Worker that has ended, for the pool's purposes."""

    pid, restarts, out_of_memory = 7, 0, True

    def __init__(self, ending):
        self._ending = ending

    def ending(self):
        return self._ending

    def kill(self):
        pass


@pytest.mark.parametrize(
    ("ending", "told"),
    [
        ("was ended by SIGKILL: it ran out of memory", "was ended by SIGKILL: it ran out of memory"),
        (BROKE_OFF, "failed (the other process is gone)"),
    ],
)
def test_the_log_says_what_a_worker_died_of(caplog, ending, told):
    reasons = []

    async def bury():
        pool = WorkerPool(count=1, setup=SETUP, job_timeout_s=1, on_restart=reasons.append)
        pool._failure = ConfigError("no other is started")
        worker = Gone(ending)
        pool._alive[worker] = WorkerWatch(pidfd=os.open(os.devnull, os.O_RDONLY), since=time.monotonic())
        pool._bury(worker, ChannelClosed("the other process is gone"))
        await pool.close()

    asyncio.run(bury())
    assert reasons == ["memory"]
    assert caplog.messages == [f"worker 7 is gone: it {told}; starting another"]


class Left:
    """Group that can be removed at the third attempt."""

    def __init__(self):
        self.tried = 0

    def remove(self):
        self.tried += 1
        return self.tried == 3


def test_the_end_of_a_pool_takes_groups_along_that_are_left(tmp_path):
    found, left = ControlGroups(tmp_path, cgroup._V2), Left()
    found._left = [left]

    async def close():
        enclosure = Enclosure(memory_bytes=1, groups=found)
        await WorkerPool(count=1, setup=SETUP, job_timeout_s=1, enclosure=enclosure).close()

    asyncio.run(close())
    assert (left.tried, found._left) == (3, [])


# ------------------------------------------------------------------------------------- the whole server

TOLD_EARLY = """
import asyncio, os, signal, sys
from upriver.server import ServerConfig, serve

run = asyncio.run

def late(coroutine, **options):
    os.kill(os.getpid(), signal.SIGTERM)
    return run(coroutine, **options)

asyncio.run = late
serve(ServerConfig(stores={"default": "memory://early"}, port=0, threads=1, sandbox="none"))
"""


@pytest.mark.slow
def test_a_server_that_is_told_to_stop_before_it_listens_ends():
    done = subprocess.run([sys.executable, "-c", TOLD_EARLY], timeout=300, check=False)
    assert done.returncode == 0
