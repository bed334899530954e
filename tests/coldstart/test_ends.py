"""Check how disturbed loads end: a changed file, a fork, a slow store, an interrupt."""

from __future__ import annotations

import asyncio
import copy
import gc
import json
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
import uuid
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.coldstart.networks import Bare
from tests.coldstart.ordered import Ordered
from tests.server.running import wait_for
from upriver.coldstart import load_model as under_test
from upriver.coldstart.fetch import strategy
from upriver.coldstart.format.manifest import publish
from upriver.coldstart.grouping import groups
from upriver.coldstart.load_model import Loading, begin, load
from upriver.coldstart.model.assignment import WeightMemory
from upriver.errors import Cancelled, ObjectChanged, StoreError, UpriverError
from upriver.store import Store


@pytest.fixture
def store() -> Store:
    """Return a store with the weights of a model, as ``model.safetensors``."""
    found = Store.open(f"memory://ends-{uuid.uuid4().hex}")
    publish(Bare().state_dict(), found, "model.safetensors")
    return found


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_that_waited_is_no_guarded_one(
    copied: Any, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Ordered(lets=threading.Semaphore(0))
    assert stream.lets is not None
    monkeypatch.setattr(strategy, "WeightStream", stream.of)
    release = Loading._release

    def late(handle: Loading, model: nn.Module) -> None:
        time.sleep(0.3)  # callers woken by now go on
        release(handle, model)

    monkeypatch.setattr(Loading, "_release", late)
    model = load(Bare, "model", store=store)
    copies: list[nn.Module] = []
    caller = threading.Thread(target=lambda: copies.append(copied(model)))
    caller.start()
    stream.lets.release(len(stream.order))
    caller.join(60)
    stream.join()
    assert [type(each) for each in copies] == [Bare]
    assert all(
        torch.equal(one, other) for one, other in zip(copies[0].parameters(), model.parameters(), strict=True)
    )


def test_a_history_may_be_asked_for_while_it_is_made(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Ordered(lets=threading.Semaphore(0))
    monkeypatch.setattr(strategy, "WeightStream", stream.of)
    _, handle = begin(Bare, "model", store=store)

    class Meanwhile(str):
        """A kind of load event that lets another thread act before each comparison."""

        def __ne__(self, other: object) -> bool:
            handle._steps["loaded"] = 3.0
            return str.__ne__(self, other)

        __hash__ = str.__hash__

    handle._steps = {"began": 1.0, Meanwhile("constructed"): 2.0}
    assert [moment.kind for moment in handle.history()] == ["constructed"]
    handle.cancel()


def test_a_file_that_is_written_in_place_meanwhile_is_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(600, 600), nn.Linear(600, 600))

    file = tmp_path / "model.safetensors"
    save_file(build().state_dict(), file)
    os.utime(file, (1, 1))
    settle = WeightMemory.settle

    def and_write(memory: WeightMemory) -> None:
        monkeypatch.setattr(WeightMemory, "settle", settle)
        settle(memory)
        with file.open("r+b") as opened:
            opened.seek(-8, os.SEEK_END)
            opened.write(bytes(8))

    monkeypatch.setattr(WeightMemory, "settle", and_write)
    model, handle = begin(build, f"file://{file}")
    with pytest.raises(ObjectChanged, match="was replaced"):
        handle.wait(60)
    with pytest.raises(ObjectChanged, match="was replaced"):
        model(torch.ones(1, 600))


def test_nobody_waits_for_what_is_written_down_for_the_next_one(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "SMALL_BYTES", 0)
    begun, may, written = threading.Event(), threading.Event(), threading.Event()

    def put(path: str, data: bytes) -> None:
        begun.set()
        may.wait(60)
        written.set()

    monkeypatch.setattr(store, "put", put)
    model, handle = begin(Bare, "model", store=store)
    assert begun.wait(60)
    assert handle.wait(0.2)
    handle.cancel()
    assert handle.wait(0)
    gone = [weakref.ref(model), *map(weakref.ref, model.parameters())]
    del model
    gc.collect()
    assert [each() for each in gone] == [None] * len(gone)
    assert not written.is_set()
    may.set()
    assert handle.wait(60)
    assert written.is_set()


@pytest.mark.parametrize("error", [TypeError, KeyboardInterrupt])
def test_an_error_of_the_constructor_waits_for_no_store(
    error: type[BaseException], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may, said = threading.Event(), threading.Event(), threading.Event()

    def silent(*_: Any, **__: Any) -> None:
        begun.set()
        may.wait(60)
        said.set()
        raise StoreError("too late")

    def build() -> nn.Module:
        assert begun.wait(60)
        raise error("mine")

    monkeypatch.setattr(under_test, "find", silent)
    with pytest.raises(error, match="mine"):
        load(build, "model", store=store)
    assert not said.is_set()
    may.set()
    assert said.wait(60)


def a_process(body: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Return the output of a script; after five minutes the script is killed and the test fails."""
    command = [sys.executable, "-c", SCRIPT + textwrap.dedent(body), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


SCRIPT = """
import asyncio, sys, threading, time
from torch import nn
import torch
from upriver.coldstart import load
from upriver.coldstart import load_model
from upriver.coldstart.format import checkpoint
from upriver.store import Store

"""


@pytest.mark.parametrize("what", ["find", pytest.param("_foreign", marks=pytest.mark.full)])
@pytest.mark.full
def test_a_process_ends_that_nobody_gives_an_answer(what: str, tmp_path: Path) -> None:
    Store.open(tmp_path.as_uri()).put(
        "model.safetensors.index.json", b'{"weight_map": {"a": "a.safetensors"}}'
    )
    ended = a_process(
        f"""
        begun = threading.Event()

        def silent(*_, **__):
            begun.set()
            time.sleep(600)

        def build():
            assert begun.wait(50)
            raise TypeError("mine")

        setattr(load_model if "{what}" == "find" else checkpoint, "{what}", silent)
        load(build, sys.argv[1])
        """,
        f"{tmp_path.as_uri()}/model.safetensors.index.json",
    )
    assert ended.returncode == 1 and ended.stderr.endswith("TypeError: mine\n")


@pytest.mark.full
def test_a_process_may_end_while_a_weight_is_copied(tmp_path: Path) -> None:
    """Python stops threads where they are, which inside a torch operator aborts the process."""
    save_file(nn.Linear(4, 4).state_dict(), tmp_path / "model.safetensors")
    ended = a_process(
        """
        from upriver.coldstart.model.assignment import WeightMemory

        copies, one, other = threading.Event(), torch.zeros(10**6), torch.ones(10**6)

        def settle(_memory):
            copies.set()
            until_s = time.monotonic() + 0.5
            while time.monotonic() < until_s:
                one.copy_(other)

        WeightMemory.settle = settle
        model = load(lambda: nn.Linear(4, 4), sys.argv[1])
        assert copies.wait(50)
        """,
        f"{tmp_path.as_uri()}/model",
    )
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.full
def test_what_the_first_call_shows_outlives_a_process_that_ends_then(tmp_path: Path) -> None:
    torch.manual_seed(0)
    save_file(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).state_dict(), tmp_path / "model.safetensors")
    ended = a_process(
        """
        put, read, asked = Store.put, Store.read_into_async, threading.Event()

        def slow(store, path, data):
            time.sleep(0.3)
            put(store, path, data)

        async def patient(*given, **options):
            await asyncio.to_thread(asked.wait, 50)
            await read(*given, **options)

        Store.put, Store.read_into_async = slow, patient
        forward = nn.Linear.forward
        nn.Linear.forward = lambda linear, x: asked.set() or forward(linear, x)
        model = load(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), sys.argv[1])
        model(torch.ones(1, 4))
        """,
        f"{tmp_path.as_uri()}/model",
    )
    assert ended.returncode == 0, ended.stderr
    order = json.loads((tmp_path / "model.order.json").read_text())
    assert order["names"][0].startswith("0.") and order["names"][-1].startswith("1.")


@dataclass
class Parent:
    """An object that an answer may hold: fields set later or never, and a reference back to the object."""

    answer: torch.Tensor
    child: Child | None = None
    late: torch.Tensor = field(init=False)


@dataclass
class Child:
    """Refer to its parent."""

    parent: Parent
    hidden: torch.Tensor


class Family(nn.Module):
    """Answer with objects that refer to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Parent:
        """Return the answer for ``x`` of shape (rows, 4)."""
        answer = Parent(self.first(x))
        answer.child = Child(answer, self.first.weight)
        return answer


def test_an_answer_may_be_any_dataclass(monkeypatch: pytest.MonkeyPatch) -> None:
    store, stored, x = Store.open(f"memory://ends-{uuid.uuid4().hex}"), Family(), torch.ones(1, 4)
    publish(stored.state_dict(), store, "model.safetensors")
    stream = Ordered(lets=threading.Semaphore(0))
    assert stream.lets is not None
    monkeypatch.setattr(strategy, "WeightStream", stream.of)
    model = load(Family, "model", store=store)
    with ThreadPoolExecutor(1) as beside:
        asked = beside.submit(model, x)
        wait_for(lambda: stream.hurried)
        stream.lets.release(len(stream.order))
        found = asked.result(60)
    stream.join()
    expected = stored(x)
    assert torch.equal(found.answer, expected.answer)
    assert found.child.parent is found and torch.equal(found.child.hidden, expected.child.hidden)


def no_thread(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Fail to start a thread, as where a process may have no more threads."""
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)


def test_an_answer_needs_no_thread_to_write_down_what_it_showed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Asked(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            asked.set()
            return super().forward(x)

    def build() -> nn.Module:
        return nn.Sequential(Asked(4, 4), Asked(4, 4))

    async def patient(*given: Any, **options: Any) -> None:
        await asyncio.to_thread(asked.wait, 60)
        await read(*given, **options)

    asked, read = threading.Event(), Store.read_into_async
    monkeypatch.setattr(Store, "read_into_async", patient)
    stored, x = build(), torch.ones(1, 4)
    expected = stored(x)
    asked.clear()
    save_file(stored.state_dict(), tmp_path / "model.safetensors")
    for name in ("order", "keep"):
        no_thread(monkeypatch, f"upriver-coldstart-{name}")
    model, handle = begin(build, f"{tmp_path.as_uri()}/model")
    assert torch.equal(model(x), expected)
    assert handle.wait(60) and handle.touched
    assert not (tmp_path / "model.order.json").exists()


@pytest.mark.parametrize("name", ["find", "stream"])
def test_a_load_without_threads_is_a_typed_error(
    name: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_thread(monkeypatch, f"upriver-coldstart-{name}")
    with pytest.raises(UpriverError, match="no thread can be started: RuntimeError: can't start new thread"):
        load(Bare, "model", store=store)
    monkeypatch.undo()
    model, handle = begin(Bare, "model", store=store)
    assert handle.wait(60) and type(model) is Bare


def test_a_forked_child_is_told_that_nothing_comes(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Event()

    async def silent(*_: Any, **__: Any) -> None:
        asked.set()
        await asyncio.sleep(600)

    monkeypatch.setattr(store, "read_into_async", silent)
    model, handle = begin(Bare, "model", store=store)
    assert asked.wait(60)
    held, over = threading.Event(), threading.Event()

    def holds() -> None:
        with handle._arrivals._changed, handle._stream._lock:
            held.set()
            over.wait(60)

    holder = threading.Thread(target=holds)
    holder.start()
    assert held.wait(60)
    x = torch.ones(1, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons: threads are running
        child = os.fork()
    if not child:
        os._exit(_right_in_a_child(model, handle, x))
    over.set()
    holder.join(60)
    ended = _ended(child)
    handle.cancel()
    assert ended == 0


def _right_in_a_child(model: nn.Module, handle: Loading, x: torch.Tensor) -> int:
    """Return exit code 0 if every call raises `Cancelled`; another code names the failing call."""
    asks = [lambda: model(x), lambda: model.state_dict(), lambda: handle.wait(), handle.cancel]
    for number, ask in enumerate(asks, start=1):
        try:
            ask()
        except Cancelled:
            continue
        except BaseException:
            return 10 + number
        if ask != handle.cancel:
            return number
    return 0


def _ended(child: int) -> int | None:
    """Return a process's exit code; kill a process that hangs."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None
