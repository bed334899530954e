"""Test a weights file that is still arriving: its memory, its waiters, and what it leaves behind."""

from __future__ import annotations

import asyncio
import copy
import gc
import mmap
import os
import subprocess
import sys
import threading
import weakref
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.server.cold import ROWS, WIDTH, cold_file, wide
from tests.server.running import wait_for
from upriver.coldstart.fetch import strategy
from upriver.coldstart.fetch.stream_limits import StreamLimits
from upriver.coldstart.format import manifest as layout
from upriver.coldstart.load_program import publish
from upriver.errors import ConfigError, ProgramError, UpriverError
from upriver.program.capture.prefix import capture
from upriver.program.graph.artifact_paths import weights_path
from upriver.program.graph.executor import Program
from upriver.server.ipc.shared_memory import FillingFile, map_privately
from upriver.server.scheduling.program_footprint import MOST_RUNS, runs_of
from upriver.store import DEFAULT_PREFIX, Store

LIMITS = [StreamLimits(), StreamLimits(request_bytes=1 << 16, in_flight_bytes=1 << 17, concurrency=3)]


@given(data=st.data(), limits=st.sampled_from(LIMITS))
def test_whatever_is_asked_for_in_whatever_order_comes_to_its_place(data: st.DataObject, limits: Any) -> None:
    program = wide()
    store = Store.open("memory://cold")
    publish(program, store)
    file = bytes(program.weights_bytes)
    numbers = st.sets(st.integers(0, len(program.weight_tensors) - 1))
    asked = data.draw(st.lists(numbers, max_size=4))
    to_end = data.draw(st.booleans())

    async def go() -> None:
        cold = cold_file(store, program, limits, [])
        view = map_privately(cold.fd, cold.nbytes)  # before any byte has arrived, as a worker does
        tensors = list(cold._tensors)
        assert view[: tensors[0].start] == file[: tensors[0].start]
        for some in asked:
            cold.ask(some)
            if some and data.draw(st.booleans()):
                await cold.ready(some, some, within_s=0.0)
                for number in some:
                    place = slice(tensors[number].start, tensors[number].stop)
                    assert view[place] == file[place]
        await cold.over()
        wanted = set().union(*asked)
        for number, tensor in enumerate(tensors):
            here = view[tensor.start : tensor.stop]
            assert here == (file[tensor.start : tensor.stop] if number in wanted else bytes(len(here)))
        assert not cold.whole
        if to_end:
            cold.ask((), to_end=True)
            await cold.checked()
            assert cold.whole
            assert view == file
        cold.cancel()
        await asyncio.to_thread(cold.join)

    asyncio.run(go())


@pytest.mark.parametrize("error", [ConfigError("no such group"), RuntimeError("can't start new thread")])
def test_what_cannot_be_asked_for_is_an_error_of_all_who_wait(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = wide()
    store = Store.open("memory://cold")
    publish(program, store)

    def fail(*_: Any) -> None:
        raise copy.copy(error)  # the raised error keeps its traceback

    async def go() -> None:
        file = cold_file(store, program, StreamLimits(), [])
        monkeypatch.setattr(strategy, "plan_requests", fail)
        file.ask([1])
        for waiting in (file.ready([1], [1], within_s=0.0), file.over(), file.checked()):
            with pytest.raises(UpriverError, match=str(error)):
                await waiting
        file.cancel()
        await asyncio.to_thread(file.join)

    asyncio.run(go())


def path_of(program: Program) -> str:
    return weights_path(DEFAULT_PREFIX, program.weights_digest)


def damage(store: Store, path: str) -> None:
    """Flip one bit; the manifest still claims to describe the file."""
    data = bytearray(store.get(path))
    data[len(data) // 2] ^= 1
    store.put(path, bytes(data))
    beside = layout.manifest_path(path)
    manifest = layout.decode(store.get(beside))
    store.put(beside, msgspec.structs.replace(manifest, etag=store.head(path).etag).encode())


@pytest.mark.parametrize("what", ["part", "whole", "damaged", "cancelled"])
def test_its_memory_goes_with_the_last_one_who_has_it(what: str) -> None:
    """Check that the memory is freed at once: a front rarely triggers Python's garbage collection."""
    program, well = wide(), what in ("part", "whole")
    store = Store.open(f"memory://cold-{what}")
    publish(program, store)
    if what == "damaged":
        damage(store, path_of(program))

    async def go() -> weakref.ref[FillingFile]:
        file = cold_file(store, program, StreamLimits(), [])
        file.ask([3, 5], to_end=what != "part")
        if what == "cancelled":
            file.cancel()
        for waiting in (
            file.over(),
            file.checked(),
            file.ready([3], [3, 5], within_s=0.0),
            asyncio.to_thread(file.wait, [3, 5], timeout_s=60),
        ):
            try:
                await waiting
            except UpriverError:
                assert not well
            else:
                assert well
        assert file.whole == (what == "whole")
        file.cancel()
        await asyncio.to_thread(file.join)
        return weakref.ref(file._memory)

    gc.collect()
    gc.disable()
    try:
        memory = asyncio.run(go())
        wait_for(lambda: memory() is None)
    finally:
        gc.enable()


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", torch.arange(WIDTH) % 3 == 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layers to `x` of shape `(rows, WIDTH)`."""
        return self.first(x).masked_fill(self.mask, 0.0)


def test_a_bool_that_is_neither_0_nor_1_never_comes() -> None:
    torch.manual_seed(0)
    program = capture(Masked().eval(), (torch.randn(ROWS, WIDTH),), granularity="op")
    store = Store.open("memory://cold-bool")
    publish(program, store)
    (mask,) = [at for at, each in enumerate(program.weight_tensors.values()) if each.dtype is torch.bool]
    forged = {
        name: torch.full(each.shape, 2, dtype=torch.uint8).view(torch.bool)
        if each.dtype is torch.bool
        else each
        for name, each in program.weight_tensors.items()
    }

    async def go() -> None:
        right = cold_file(store, program, StreamLimits(), [])
        right.ask([mask])
        await right.over()
        layout.publish(forged, store, path_of(program), tied=False)
        file = cold_file(store, program, StreamLimits(), [])
        file.ask([mask])
        with pytest.raises(ProgramError, match="a bool holds 0 or 1 only"):
            await file.over()

    asyncio.run(go())


def test_where_no_thread_can_check_it_all_who_wait_get_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    program = wide()
    store = Store.open("memory://cold")
    publish(program, store)
    start = threading.Thread.start

    def fail(thread: threading.Thread) -> None:
        if thread.name == "upriver-cold-digest":
            raise RuntimeError("can't start new thread")
        start(thread)

    async def go() -> None:
        file = cold_file(store, program, StreamLimits(), [])
        monkeypatch.setattr(threading.Thread, "start", fail)
        file.ask([1], to_end=True)
        for waiting in (file.over(), file.checked()):
            with pytest.raises(UpriverError, match="can't start new thread"):
                await waiting
        assert not file.coming
        file.cancel()
        await asyncio.to_thread(file.join)

    asyncio.run(go())


@pytest.mark.parametrize("cancelled", [False, True])
def test_what_is_asked_for_together_is_chosen_beside_the_loop(
    cancelled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, planned = wide(), strategy.plan_requests
    store = Store.open("memory://cold")
    publish(program, store)
    threads, go_on = [], threading.Event()

    def slow(*arguments: Any) -> Any:
        threads.append(threading.get_ident())
        assert go_on.wait(60)
        return planned(*arguments)

    async def go() -> None:
        file = cold_file(store, program, StreamLimits(), [])
        monkeypatch.setattr(strategy, "plan_requests", slow)
        file.ask([1, 7])
        waiting = asyncio.create_task(file.ready([7], [7], within_s=0.0))
        await asyncio.sleep(0)  # urgent, before a stream exists
        assert file.coming and not waiting.done()
        if cancelled:
            file.cancel()
        go_on.set()
        if cancelled:
            with pytest.raises(UpriverError, match="cancelled"):
                await waiting
        else:
            await waiting
            await file.over()
            file.cancel()
        await asyncio.to_thread(file.join)

    asyncio.run(go())
    assert len(threads) == 1 and threads != [threading.get_ident()]


@pytest.mark.full
def test_what_is_kept_of_a_file_is_no_more_than_is_said() -> None:
    """Use many small tensors, whose bytes are the smallest part."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.server.kept"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    kept, said = map(int, done.stdout.split())
    assert said / 4 < kept < said


def test_memory_that_fills_can_be_written_by_its_owner_alone() -> None:
    memory = FillingFile(1 << 16)
    view = map_privately(memory.fd, 1 << 16)
    memory.room(100, 103)[:] = b"abc"
    assert bytes(view[99:104]) == b"\0abc\0"
    tried = """
import mmap, os, sys
fd = int(sys.argv[1])
for attempt in (lambda: mmap.mmap(fd, 1 << 16), lambda: os.pwrite(fd, b"x", 0), lambda: os.ftruncate(fd, 1)):
    try:
        attempt()
    except OSError:
        continue
    sys.exit("it could")
private = mmap.mmap(fd, 1 << 16, access=mmap.ACCESS_COPY)
private[100:103] = b"xyz"
print(private[99:104])
"""
    done = subprocess.run(
        [sys.executable, "-c", tried, str(memory.fd)],
        pass_fds=[memory.fd],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "b'\\x00xyz\\x00'\n"), done.stderr
    assert bytes(view[99:104]) == b"\0abc\0"
    memory.close()
    with pytest.raises(OSError, match="not permitted"):
        mmap.mmap(memory.fd, 1 << 16)
    assert os.fstat(memory.fd).st_size == 1 << 16


@given(numbers=st.sets(st.integers(0, 400)).map(sorted))
def test_runs_hold_all_numbers_and_are_few(numbers: list[int]) -> None:
    runs = runs_of(numbers)
    assert len(runs) <= MOST_RUNS
    held = [number for start, stop in runs for number in range(start, stop)]
    assert held == sorted(set(held))
    assert set(held) >= set(numbers)
    if len(runs) < MOST_RUNS:
        assert held == numbers
