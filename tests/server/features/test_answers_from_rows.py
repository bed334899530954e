"""Test requests that kept rows alone answer: in little memory, without a program, also if rows vanish."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.server.cold import Place, Served, serving
from tests.server.configured import bearer, read_run
from tests.server.conftest import images
from tests.server.features.test_feature_store import (
    answered,
    dataset_in,
    features_in,
    found,
    request_for,
    until_kept,
    why_not,
)
from tests.server.running import Running, ask, body_of, changed, connect, refused, run, running, wait_for
from tests.server.test_by_memory import idle
from upriver.coldstart.load_program import publish
from upriver.control.memory_budget import INDEXES, MemoryHold
from upriver.errors import Overloaded
from upriver.features.shard import INDEX_NBYTES
from upriver.pipeline import CenterCrop, Decode, Normalize, Resize
from upriver.program.capture.prefix import capture
from upriver.program.graph.executor import Program
from upriver.protocol import RunRequest
from upriver.server.features import feature_store
from upriver.server.features.feature_store import FeatureStore, RequestRows
from upriver.server.scheduling.footprint import ANSWER_BYTES
from upriver.server.tenants import Tenant, hash_token
from upriver.store import Store
from upriver.types import MicroBatch

PIXELS, WIDTH, MICRO = 3 * 16 * 16, 16 * 16 * 48, 4
WEIGHTS_BYTES, ROW_BYTES = 4 * PIXELS * WIDTH, 4 * WIDTH

ROOM = 24 << 20
"""Memory that answers any of these requests from rows, and computes none."""

SOME, MANY = ((0, 1, 2, 3), (4, 5)), ((0, 1, 2, 3), (4, 5, 6, 7), (3, 1, 2, 0), (7, 5))

TENANTS = tuple(Tenant(name=name, token_hashes=(hash_token(name),)) for name in ("alice", "bob"))
ALICE, BOB = bearer("alice"), bearer("bob")


class Heavy(nn.Module):
    """One layer with far more bytes of weights than of features."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(PIXELS, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer to images of shape `(MICRO, 3, 16, 16)`."""
        return torch.tanh(self.layer(x.flatten(1)))


@pytest.fixture(scope="module")
def program() -> Program:
    torch.manual_seed(0)
    return capture(Heavy().eval(), (torch.zeros(MICRO, 3, 16, 16),), granularity="op")


def asked_in(
    store: Store, program: Program, number: int, micro_batches: Sequence[tuple[int, ...]], folder: str
) -> RunRequest:
    """Return a request for rows that no request with another number shares."""
    stages = [Decode(), Resize(18 + number), CenterCrop(16), Normalize()]
    dataset = dataset_in(store, folder, stages=stages)
    return request_for(dataset, *micro_batches, stop=program.num_stages, program=program.digest)


def same(found: Sequence[MicroBatch], plain: Sequence[MicroBatch]) -> bool:
    """Return whether samples, bits and strides are equal; what pads a short micro-batch is nobody's."""
    return [each.ids for each in found] == [each.ids for each in plain] and all(
        torch.equal(x[: len(one.ids)], y[: len(one.ids)]) and x.stride() == y.stride()
        for one, other in zip(found, plain, strict=True)
        for x, y in zip(one.tensors, other.tensors, strict=True)
    )


# ------------------------------------------------------------------------- servers in their own processes


@dataclass(frozen=True)
class Filled:
    """Store with the rows of six samples.

    Attributes:
        plain: Answer to the request as it was computed.
        base_bytes: Memory that an idle server holds.
    """

    root: Path
    asked: RunRequest
    plain: list[MicroBatch]
    base_bytes: int


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory, program: Program) -> Filled:
    root = tmp_path_factory.mktemp("filled")
    store = Store.open(root.as_uri())
    publish(program, store)
    asked = asked_in(store, program, 0, SOME, "photos")
    with running(root.as_uri(), workers=1) as server:
        base = idle(server.wait_ready())
        plain = run(server, asked)
        until_kept(server, asked)
    return Filled(root, asked, plain, base)


def loaded(server: Running) -> float:
    """Return how many requests needed a program, and the bytes of those that are there."""
    return server.metric("upriver_program_requests_total") + server.metric("upriver_program_bytes")


def test_server_too_small_to_compute_answers_from_rows_and_refuses_others(filled: Filled) -> None:
    with running(filled.root.as_uri(), workers=1, memory_budget_bytes=filled.base_bytes + ROOM) as server:
        server.wait_ready()
        assert same(run(server, filled.asked), filled.plain)
        before = idle(server)
        for other in (
            changed(filled.asked, micro_batches=((0, 1, 2, 3), (4, 6))),
            changed(filled.asked, micro_batches=((7,),)),
            changed(filled.asked, keep=False),
        ):
            status, error = refused(server, body_of(other))
            assert (status, error["code"]) == (413, "does_not_fit")
        assert same(run(server, filled.asked), filled.plain)
        assert idle(server) == before
        assert answered(server) == 12
        assert loaded(server) == 0
        assert server.metric("upriver_forward_rows_count") == 0


def test_fresh_server_loads_a_program_only_when_a_row_is_missing(filled: Filled) -> None:
    with running(filled.root.as_uri(), workers=1) as server:
        server.wait_ready()
        assert same(run(server, filled.asked), filled.plain)
        assert loaded(server) == 0
        other = changed(filled.asked, micro_batches=((0, 1, 2, 3), (6, 7)))
        first, _ = run(server, other)
        assert same([first], filled.plain[:1])
        assert loaded(server) > WEIGHTS_BYTES
        assert server.metric("upriver_forward_rows_sum") == 2


# --------------------------------------------------------------------------------- a server in this process


class Inside:
    """Server of two tenants in this process, whose memory and store tests change while it answers."""

    def __init__(self, root: Path, program: Program, served: Served) -> None:
        self.root, self.served, self._program = root, served, program
        self.store = Store.open(root.as_uri())
        self._numbers = itertools.count()

    @property
    def unit(self) -> Any:
        return self.served.units[0]

    def kept(
        self, micro_batches: Sequence[tuple[int, ...]] = MANY, *, folder: str = "photos"
    ) -> tuple[RunRequest, list[MicroBatch], list[Path]]:
        """Let Alice compute rows; return her request, its answer and the shards."""
        asked = asked_in(self.store, self._program, next(self._numbers), micro_batches, folder)
        before = features_in(self.root)
        plain = batches(self.ask(asked))
        until_kept(self.served, asked, ALICE)
        shards = [path for path in features_in(self.root) if path not in before]
        assert shards
        self.wait_released()
        return asked, plain, shards

    def ask(self, request: RunRequest, who: dict[str, str] = ALICE) -> list[Any]:
        """Return all messages of an answer."""
        status, _, body = ask(self.served, "POST", "/v1/run", body_of(request), who)
        assert status == 200, body
        return read_run(body)

    def metric(self, name: str) -> float:
        lines = self.served.front.metrics.text().decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.partition("{")[0] == name)

    @property
    def held_bytes(self) -> int:
        """Memory that requests hold, without programs."""
        held = sum(self.unit.budget.held_by(tenant.name) for tenant in TENANTS)
        return held - self.unit.program_cache.nbytes

    def wait_released(self) -> None:
        """Wait until no request is there, and check that none has left anything."""
        wait_for(lambda: self.unit.runner.running == 0 and self.held_bytes == 0)
        queue = self.unit.line.queue
        assert queue.waiting == sum(queue.admitted_of(tenant.name) for tenant in TENANTS) == 0

    @contextmanager
    def starving(
        self, monkeypatch: pytest.MonkeyPatch, shards: Sequence[Path]
    ) -> Iterator[Callable[[], None]]:
        """Remove the rows when a request is about to read its second micro-batch, and take all other memory.

        Yields:
            Function that gives the memory back.
        """
        holds, loops = list[MemoryHold](), list[asyncio.AbstractEventLoop]()

        def starve() -> None:
            for shard in shards:
                shard.unlink()
            for tenant in TENANTS:
                self.unit.program_cache.drop_idle(tenant.name, 0)
            holds.append(self.unit.budget.hold(self.unit.budget.free_bytes, owner="others"))
            loops.append(asyncio.get_running_loop())

        def release() -> None:
            for hold, loop in zip(holds, loops, strict=True):
                loop.call_soon_threadsafe(hold.release)

        before_frame(monkeypatch, 1, starve)
        try:
            yield release
        finally:
            release()


@pytest.fixture(scope="module")
def inside(tmp_path_factory: pytest.TempPathFactory, program: Program) -> Iterator[Inside]:
    root = tmp_path_factory.mktemp("inside")
    publish(program, Store.open(root.as_uri()))
    with serving(Place(root.as_uri()), workers=1, tenants=TENANTS) as served:
        yield Inside(root, program, served)


def before_frame(monkeypatch: pytest.MonkeyPatch, number: int, act: Callable[[], object]) -> None:
    """Call ``act`` just before the micro-batch with this number is read from kept rows."""
    frame, numbers = RequestRows.frame, itertools.count()

    async def made(self: RequestRows, *args: Any, **kwargs: Any) -> Any:
        if next(numbers) == number:
            act()
        return await frame(self, *args, **kwargs)

    monkeypatch.setattr(RequestRows, "frame", made)


def batches(messages: Sequence[Any]) -> list[MicroBatch]:
    return [message for message in messages if isinstance(message, MicroBatch)]


def removed(shard: Path) -> None:
    shard.unlink()


def damaged(shard: Path) -> None:
    """Change every row, and neither the index nor the ETag."""
    before, content = shard.stat(), shard.read_bytes()
    shard.write_bytes(content[:8192] + bytes(byte ^ 0xFF for byte in content[8192:]))
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_request_from_rows_holds_memory_for_rows_alone(
    inside: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, plain, _ = inside.kept()
    held, needed = list[int](), inside.metric("upriver_program_requests_total")
    before_frame(monkeypatch, 2, lambda: held.append(inside.held_bytes))
    assert same(batches(inside.ask(asked)), plain)
    assert ANSWER_BYTES < held[0] <= ANSWER_BYTES + 4 * MICRO * ROW_BYTES
    assert inside.metric("upriver_program_requests_total") == needed
    inside.wait_released()


@pytest.mark.parametrize(("how", "at"), [(removed, 0), (damaged, 2)])
def test_rows_that_are_gone_after_the_lookup_are_computed(
    inside: Inside, monkeypatch: pytest.MonkeyPatch, how: Callable[[Path], None], at: int
) -> None:
    asked, plain, shards = inside.kept()
    needed = inside.metric("upriver_program_requests_total")
    before_frame(monkeypatch, at, lambda: [how(shard) for shard in shards])
    assert same(batches(inside.ask(asked)), plain)
    assert inside.metric("upriver_program_requests_total") == needed + 1
    inside.wait_released()
    later = changed(asked, micro_batches=asked.micro_batches[at:])
    until_kept(inside.served, later, ALICE)
    assert same(batches(inside.ask(asked)), plain)
    inside.wait_released()


def test_object_replaced_after_the_lookup_is_an_error_as_for_any_request(
    inside: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, plain, _ = inside.kept(folder="replaced")
    name = sorted(images(8))[4]
    before_frame(monkeypatch, 1, lambda: inside.store.put(f"replaced/{name}", images(9)["dog/008.png"]))
    messages = inside.ask(asked)
    assert same(batches(messages), plain[:1])
    assert messages[-1].code == "object_changed"
    inside.wait_released()


def test_rows_that_are_gone_where_nothing_can_be_computed_end_the_answer(
    inside: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, plain, shards = inside.kept()
    budget = inside.unit.budget

    def act() -> None:
        for shard in shards:
            shard.unlink()
        for tenant in TENANTS:
            inside.unit.program_cache.drop_idle(tenant.name, 0)
        monkeypatch.setattr(budget, "total_bytes", budget.reserved_bytes + ROOM // 3)

    before_frame(monkeypatch, 1, act)
    messages = inside.ask(asked)
    assert same(batches(messages), plain[:1])
    assert messages[-1].code == "does_not_fit"
    inside.wait_released()
    monkeypatch.undo()
    assert same(batches(inside.ask(asked)), plain)
    inside.wait_released()


def test_requests_that_lose_their_rows_at_once_do_not_wait_for_each_other(
    inside: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No memory is left but what they hold, which computes one of them at a time."""
    asked, plain, shards = inside.kept()
    count, frame, budget = 4, RequestRows.frame, inside.unit.budget
    barrier, entered = asyncio.Barrier(count), itertools.count()
    holds, loops = list[MemoryHold](), list[asyncio.AbstractEventLoop]()

    async def made(self: RequestRows, *args: Any, **kwargs: Any) -> Any:
        if next(entered) < count and await barrier.wait() == count - 1:
            for shard in shards:
                shard.unlink()
            holds.append(budget.hold(budget.free_bytes, owner="others"))
            loops.append(asyncio.get_running_loop())
        return await frame(self, *args, **kwargs)

    monkeypatch.setattr(RequestRows, "frame", made)
    try:
        with ThreadPoolExecutor(count) as pool:
            for messages in pool.map(inside.ask, [asked] * count):
                assert same(batches(messages), plain)
        assert budget.most_reserved_bytes <= budget.total_bytes
    finally:
        for hold, loop in zip(holds, loops, strict=True):
            loop.call_soon_threadsafe(hold.release)
    assert holds
    inside.wait_released()


@pytest.mark.parametrize("end", ["memory comes free", "client leaves", "deadline"])
def test_request_that_waits_to_be_computed_after_all_holds_nothing(
    inside: Inside, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    asked, plain, shards = inside.kept()
    sent = changed(asked, deadline_s=5.0 if end == "deadline" else None)
    queue = inside.unit.line.queue
    with (
        inside.starving(monkeypatch, shards) as release,
        closing(connect(inside.served)) as connection,
    ):
        connection.request("POST", "/v1/run", body=body_of(sent), headers=ALICE)
        wait_for(lambda: queue.waiting == 1)
        assert inside.held_bytes == queue.admitted_of("alice") == 0
        if end == "client leaves":
            connection.close()
            wait_for(lambda: queue.waiting == 0)
        else:
            if end == "memory comes free":
                release()
            messages = read_run(connection.getresponse().read())
            assert same(batches(messages), plain if end == "memory comes free" else plain[:1])
            assert end == "memory comes free" or messages[-1].code == "deadline"
        inside.wait_released()
    monkeypatch.undo()
    assert same(batches(inside.ask(asked)), plain)
    inside.wait_released()


def test_clients_of_two_tenants_that_leave_at_any_moment_leave_nothing(inside: Inside) -> None:
    asked, plain, _ = inside.kept()
    assert same(batches(inside.ask(asked, BOB)), plain)  # computed, since Alice's rows are hers
    until_kept(inside.served, asked, BOB)
    long = changed(asked, micro_batches=MANY * 30)  # more bytes than connections hold
    for nbytes, who in itertools.product((0, 1, 100_000), (ALICE, BOB, ALICE)):
        connection = connect(inside.served)
        connection.request("POST", "/v1/run", body=body_of(long), headers=who)
        if nbytes:
            connection.getresponse().read(nbytes)
        connection.close()
    inside.wait_released()
    for who in (ALICE, BOB):
        assert same(batches(inside.ask(asked, who)), plain)
    inside.wait_released()


@pytest.mark.parametrize("path", ["/v1/features", "/v1/features/remove"])
def test_question_about_stages_that_the_program_lacks_is_refused_as_the_run_is(
    inside: Inside, program: Program, path: str
) -> None:
    asked, _, _ = inside.kept()
    for wrong in ({"stop": program.num_stages + 1}, {"micro_batch": MICRO + 1}):
        body = body_of(changed(asked, **wrong))
        answers = [ask(inside.served, "POST", where, body, ALICE) for where in (path, "/v1/run")]
        assert [(status, b'"protocol"' in text) for status, _, text in answers] == [(400, True)] * 2
    assert found(inside.served, asked, ALICE)


# -------------------------------------------------------------------------------------- memory of indexes


class Indexes:
    """The memory of the indexes that the server has open, as its budget counts it."""

    def __init__(self, inside: Inside) -> None:
        self._inside = inside
        self._others = self._held - sum(entry.index.nbytes for entry in self.opened)

    @property
    def opened(self) -> list[Any]:
        return list(self._inside.served.front.features._open.values())

    @property
    def _held(self) -> int:
        return int(self._inside.unit.budget.held_by(INDEXES))

    @property
    def nbytes(self) -> int:
        return self._held - self._others

    @property
    def are_right(self) -> bool:
        """Return whether just the rows that are there are counted."""
        return self.nbytes == sum(entry.rows.index_nbytes for entry in self.opened)


def test_as_many_indexes_are_kept_as_may_be_however_many_are_asked_for_at_once(
    inside: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, rows = [inside.kept()[0] for _ in range(5)], len({*itertools.chain(*MANY)})
    indexes = Indexes(inside)
    monkeypatch.setattr(feature_store, "MOST_STRETCHES", 2)
    monkeypatch.setattr(feature_store, "REFRESH_S", 0.0)
    for _ in range(3):
        with ThreadPoolExecutor(15) as pool:
            answers = list(pool.map(lambda each: found(inside.served, each, ALICE), asked * 6))
        assert {len(set(answer)) for answer in answers} == {rows}

    def opened() -> int:
        found(inside.served, asked[0], ALICE), found(inside.served, asked[1], ALICE)
        return sum(entry.tenant.name == "alice" for entry in indexes.opened)

    wait_for(lambda: opened() == 2)
    assert indexes.are_right


def test_index_gives_back_the_memory_of_rows_that_are_gone(
    inside: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, _, [shard, *others] = inside.kept()
    monkeypatch.setattr(feature_store, "REFRESH_S", 0.0)
    indexes = Indexes(inside)
    before = indexes.nbytes
    forged = shard.with_name("rows-400000-00000000000000aa.safetensors")
    forged.touch()
    os.truncate(forged, 400_000 * INDEX_NBYTES)
    assert found(inside.served, asked, ALICE)
    assert not forged.exists()
    assert indexes.nbytes == before and indexes.are_right
    for each in (shard, *others):
        removed(each)
    assert found(inside.served, asked, ALICE) == ()
    assert indexes.nbytes < before and indexes.are_right


def test_rows_whose_index_has_no_memory_are_neither_read_nor_written(
    inside: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, plain, _ = inside.kept()
    written = features_in(inside.root)

    @contextmanager
    def none(*args: Any) -> Iterator[None]:
        raise Overloaded("there is no memory for this index")
        yield

    inside.served.front.features._open.clear()
    with monkeypatch.context() as full:
        full.setattr(FeatureStore, "_index_room", none)
        assert found(inside.served, asked, ALICE) == ()
        assert same(batches(inside.ask(asked)), plain)
        wait_for(lambda: "no memory for this index" in why_not(inside.served, asked, ALICE))
    assert features_in(inside.root) == written
    inside.served.front.features._open.clear()
    assert found(inside.served, asked, ALICE)
