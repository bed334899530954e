"""Test a worker's end of the channel: a job without an answer must not shift later answers."""

import os
import resource
import socket
import subprocess
import sys

import msgspec
import psutil
import pytest

from tests.examples import some
from tests.pipeline.making import npy, pixels
from tests.server.conftest import make_world
from tests.server.enclosed import inner
from tests.server.http.test_limits import same
from tests.server.running import run, running
from upriver.pipeline import InputChain, LoadTensor
from upriver.protocol import DEFAULT_CAPS
from upriver.server.execution import worker_entry
from upriver.server.ipc.channel import Channel, ChannelClosed
from upriver.server.ipc.messages import Done, FromWorker, Hello, MapSlot, NeedSlot, Run, Setup, UseSlot
from upriver.server.ipc.shared_memory import SlotPool
from upriver.server.sandbox.environment import worker_environment

pytestmark = pytest.mark.slow

SAMPLE = npy(pixels(160, 160))  # more than fits into `Done`
READ = Run(
    program=None,
    micro_batch=1,
    rows=1,
    start=-1,
    stop=-1,
    ids=(0,),
    slot=0,
    chain=msgspec.json.encode(InputChain((LoadTensor("npy"),)).to_json()),
    object_names=("a/0.npy",),
    blobs=((0, len(SAMPLE)),),
)
"""Job that returns the stored bytes."""


class Worker:
    """Worker process, with this test in the front's place."""

    def __init__(self, process, channel):
        self.process = process
        self.channel = channel

    def map(self, slot):
        self.channel.send(MapSlot(slot=slot.id, nbytes=slot.nbytes), [slot.fd])

    def map_beyond_its_end(self, slot):
        self.channel.send(MapSlot(slot=slot.id, nbytes=slot.nbytes + 1), [slot.fd])

    def receive(self):
        return self.channel.receive()[0]

    def ended(self):
        """Return exit code and output, once the worker has closed the channel without another message."""
        with pytest.raises(ChannelClosed):
            self.receive()
        return self.process.wait(timeout=60), self.process.stdout.read()


@pytest.fixture
def worker():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", worker_entry.__file__, str(theirs.fileno()), str(os.getpid())],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[theirs.fileno()],
            env=worker_environment(os.environ, threads=1),
            text=True,
        )
    channel = Channel(ours, FromWorker)
    try:
        channel.set_timeout(120)
        channel.send(Setup(threads=1, device="cpu", caps=DEFAULT_CAPS, memory_bytes=1 << 30))
        found = Worker(process, channel)
        assert isinstance(found.receive(), Hello)
        yield found
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        channel.close()


@pytest.fixture
def slot():
    """Make a slot that holds the sample."""
    slot = SlotPool().take(len(SAMPLE))
    slot.array(len(SAMPLE))[:] = memoryview(SAMPLE)
    return slot


@pytest.mark.full
def test_a_slot_that_cannot_be_mapped_ends_the_worker(worker, slot):
    worker.map_beyond_its_end(slot)
    code, printed = worker.ended()
    assert code == 1
    assert printed == "MapSlot failed: ValueError: mmap length is greater than file size\n"


@pytest.mark.full
def test_so_does_one_without_memory(worker):
    worker.channel.send(MapSlot(slot=1, nbytes=1))
    code, printed = worker.ended()
    assert code == 1
    assert printed == "MapSlot failed: IndexError: list index out of range\n"


@pytest.mark.parametrize("whole", some(1, [True, False]))
def test_an_answer_that_finds_no_room_ends_the_worker_too(worker, slot, whole):
    """The worker waits for a slot in the middle of its job."""
    worker.map(slot)
    worker.channel.send(msgspec.structs.replace(READ, slot=slot.id))
    asked = worker.receive()
    assert isinstance(asked, NeedSlot)
    room = SlotPool().take(asked.nbytes)
    if whole:
        worker.map(room)
        worker.channel.send(UseSlot(slot=room.id))
        assert isinstance(worker.receive(), Done)
        assert room.array(len(SAMPLE)).tobytes() == SAMPLE
    else:
        worker.map_beyond_its_end(room)
        assert worker.ended()[0] == 1


@pytest.mark.full
def test_a_worker_without_memory_for_a_slot_is_replaced_and_everyone_gets_their_own_answer(tmp_path):
    """A decoder ignores bytes after an image's end, and these bytes make the slot of its job large."""
    own = make_world(tmp_path, 6, padding=bytes(8 << 20))
    jobs = [(0, 1, 2, 3), (4, 5), (3,), (5, 0)]
    with running(own.store.uri) as server:
        (worker,) = server.wait_ready().workers()
        allow_no_more(inner(worker), nbytes=8 << 20)
        for ids in jobs:
            (got,) = run(server, own.request(ids))
            same(got, own.here(ids, 0))
        assert server.metric("upriver_worker_restarts_total") == 1
        assert server.workers() != [worker]


def allow_no_more(pid, *, nbytes):
    """Let a process have only ``nbytes`` more address space than it has."""
    limit = psutil.Process(pid).memory_info().vms + nbytes
    resource.prlimit(pid, resource.RLIMIT_AS, (limit, limit))
