"""Check programs that run while they load, to the bit or with a typed error; and their publication."""

from __future__ import annotations

import functools
import gc
import hashlib
import itertools
import json
import random
import threading
import time
import uuid
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from tests.coldstart.leaving import threads
from tests.coldstart.ordered import Ordered
from tests.examples import often, some
from tests.program.nets import Shared, Small
from tests.server.running import wait_for
from tests.store.faulty_server import FaultyServer
from tests.store.s3_server import S3Server, UnlistedServer
from upriver.coldstart import load_program as under_test
from upriver.coldstart.fetch import strategy
from upriver.coldstart.fetch.stream_limits import StreamLimits
from upriver.coldstart.format import manifest as layout
from upriver.coldstart.format.manifest import manifest_path
from upriver.coldstart.incoming_weights import Arriving
from upriver.coldstart.load_handle import under_way
from upriver.coldstart.load_program import arriving, publish
from upriver.errors import (
    ConfigError,
    Damaged,
    ObjectNotFound,
    ProgramError,
    ProgramNotFound,
    StoreError,
    UpriverError,
)
from upriver.program.capture.prefix import capture, capture_buckets
from upriver.program.graph import artifact_store
from upriver.program.graph.artifact_paths import digest_of, graph_path, weights_path
from upriver.program.graph.executor import Program
from upriver.program.graph.schema import Graph, constants, references
from upriver.store import DEFAULT_PREFIX, Store

Tensors = tuple[torch.Tensor, ...]


class Words(nn.Module):
    """Compute a value from the first and from late weights, without inputs; it is also an answer."""

    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.table, self.positions = nn.Embedding(20, 6), nn.Embedding(8, 6)
        self.mix, self.later = nn.Linear(6, 6), nn.Embedding(8, 6)
        self.register_buffer("mask", torch.tensor([True, False, True, True, False, True]))
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> Tensors:
        """Return the answer for token numbers, 8 per sample."""
        places = torch.arange(x.shape[1])
        late = torch.tanh(self.later(places))
        x = self.table(x) + self.positions(places)
        x = (torch.tanh(self.mix(x)) + late) * self.mask
        return self.head(x.sum(1)), late * 2


class Turned(nn.Module):
    """Two buffers with the same layout in one memory."""

    first: torch.Tensor
    turned: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        values = torch.randn(6, 6)
        self.register_buffer("first", values)
        self.register_buffer("turned", values.t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the answer for ``x`` of shape (rows, 6)."""
        return torch.tanh(x @ self.first) @ self.turned


class Weightless(nn.Module):
    """A model without weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the answer for ``x`` of shape (rows, 6)."""
        return torch.tanh(x) * 2


NETWORKS: Mapping[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor], dict[str, Any]]] = {
    "small": (Small, lambda: torch.randn(2, 3, 16, 16), {}),
    "bfloat16": (Small, lambda: torch.randn(2, 3, 16, 16), {"autocast": torch.bfloat16}),
    "shared": (Shared, lambda: torch.randn(4, 6), {"granularity": "op"}),
    "words": (Words, lambda: torch.arange(16).reshape(2, 8), {"granularity": "op"}),
    "turned": (Turned, lambda: torch.randn(4, 6), {"granularity": "op"}),
    "weightless": (Weightless, lambda: torch.randn(4, 6), {"granularity": "op"}),
}


@functools.cache
def made(name: str) -> tuple[Program, Tensors]:
    """Return a program and its inputs."""
    torch.manual_seed(8)
    build, given, options = NETWORKS[name]
    x = given()
    return capture(build().eval(), (x,), **options), (x,)


@functools.cache
def whole(name: str) -> Program:
    """Return the same program, read whole."""
    program, _ = made(name)
    return Program.from_bytes(program.graph_bytes, program.weights_bytes)


def new_store() -> Store:
    return Store.open(f"memory://programs-{uuid.uuid4().hex}")


def published(name: str) -> tuple[Store, Program, Tensors]:
    program, inputs = made(name)
    store = new_store()
    publish(program, store)
    return store, program, inputs


def weights_of(program: Program) -> str:
    return weights_path(DEFAULT_PREFIX, program.weights_digest)


def same(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    return len(found) == len(expected) and all(
        torch.equal(a, b) and a.dtype == b.dtype and a.stride() == b.stride()
        for a, b in zip(found, expected, strict=True)
    )


def needed(graph: Graph, stage: int) -> set[str]:
    """Return the keys of the weights that a stage reads, directly or through values that it needs."""
    keys = {weight.name: weight.key for weight in graph.weights}
    fixed = constants(graph.inputs, graph.nodes)
    makers = {output.name: node for node in graph.nodes for output in node.outputs if output is not None}

    def of(name: str) -> set[str]:
        if name in keys:
            return {keys[name]}
        node = makers[name] if name in fixed else None
        return set() if node is None else of_all(references([node.args, node.kwargs]))

    def of_all(names: Iterator[str]) -> set[str]:
        return {key for name in names for key in of(name)}

    start = graph.stages[stage - 1].stop if stage else 0
    nodes = graph.nodes[start : graph.stages[stage].stop]
    varying = [node for node in nodes if any(made and made.name not in fixed for made in node.outputs)]
    read = itertools.chain.from_iterable(references([node.args, node.kwargs]) for node in varying)
    return of_all(itertools.chain(read, graph.stages[stage].live))


def opened(
    monkeypatch: pytest.MonkeyPatch, store: Store, digest: str, stream: Ordered, **options: Any
) -> tuple[Program, Arriving]:
    """Return a program whose weights come from a test's stream."""
    with monkeypatch.context() as patched:
        patched.setattr(strategy, "WeightStream", stream.of)
        program, coming = under_test.begin(store=store, digest=digest, **options)
    assert coming is not None
    return program, coming


def is_left_alone(program: Program, coming: Arriving) -> bool:
    """Return whether nothing of the loading remains."""
    assert coming.wait(60)
    wait_for(lambda: not threads())  # the last thread tells it, and ends then
    return program.before_stage is None and arriving(program) is None


# ----------------------------------------------------------------------------------------------- answers


@pytest.mark.parametrize("name", often(["small", "bfloat16", "shared", "words", "turned"], "shared", "words"))
def test_every_cut_whatever_order_weights_come_in(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store, program, inputs = published(name)
    count, stages, chance = len(program.weight_tensors), program.num_stages, random.Random(8)
    assert stages > 2
    for cut in range(stages + 1):
        stream = Ordered(chance.sample(range(count), count), lets=threading.Semaphore(0))
        assert stream.lets is not None
        cold, coming = opened(monkeypatch, store, program.digest, stream)
        answers: list[tuple[Tensors, Tensors]] = []

        def asks(cold: Program = cold, cut: int = cut, answers: list[Any] = answers) -> None:
            between = cold.run(inputs, 0, cut)
            answers.append((between, cold.run(between, cut, stages)))

        callers = [threading.Thread(target=asks) for _ in range(2)]
        for caller in callers:
            caller.start()
        for _ in range(count):
            stream.lets.release()
        for caller in callers:
            caller.join(60)
        assert len(answers) == 2
        for between, after in answers:
            assert same(between, whole(name).run(inputs, 0, cut))
            assert same(after, whole(name).run(inputs, 0, stages))
        assert is_left_alone(cold, coming)
        assert bytes(cold.weights_bytes) == bytes(program.weights_bytes)


@pytest.mark.parametrize("name", some(1, ["small", "bfloat16", "shared", "words"]))
def test_a_stage_waits_for_what_it_reads_and_for_nothing_else(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, program, inputs = published(name)
    keys = list(program.weight_tensors)
    waited = 0
    for stage in range(program.num_stages):
        wanted = [keys.index(key) for key in needed(program.graph, stage)]
        order = [*wanted, *(number for number in range(len(keys)) if number not in wanted)]
        stream = Ordered(order, lets=threading.Semaphore(0))
        assert stream.lets is not None
        cold, coming = opened(monkeypatch, store, program.digest, stream)
        given = whole(name).run(inputs, 0, stage)
        answers: list[Tensors] = []
        caller = threading.Thread(
            target=lambda c=cold, g=given, s=stage, a=answers: a.append(c.run(g, s, s + 1))
        )
        caller.start()
        while caller.is_alive() and len(stream.hurried) < len(wanted):
            time.sleep(0.001)
        assert sorted(stream.hurried) == sorted(wanted)
        assert not wanted or not answers
        if wanted:
            stream.lets.release(len(wanted))
        caller.join(60)
        assert same(answers[0], whole(name).run(inputs, 0, stage + 1))
        assert not coming.wait(0)
        waited += bool(wanted)
        coming.cancel()
        with pytest.raises(StoreError, match="cancelled"):
            cold.run(given, stage, stage + 1)
    assert waited > 2


def test_what_is_computed_once_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    store, program, inputs = published("words")
    cold, coming = opened(monkeypatch, store, program.digest, Ordered())
    assert coming.wait(60)
    first = cold.run(inputs, 0, cold.num_stages)
    assert cold._constants.values.keys() == whole("words")._constants.values.keys()
    kept = dict(cold._constants.values)
    assert kept and same(cold.run(inputs, 0, cold.num_stages), first)
    assert all(cold._constants.values[name] is tensor for name, tensor in kept.items())


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.full
def test_through_a_real_stream(name: str) -> None:
    store, program, inputs = published(name)
    for grouping in ("upriver", "pisel", "layer_by_layer"):
        cold = under_test.open(store=store, digest=program.digest, grouping=grouping)
        assert same(cold.run(inputs, 0, cold.num_stages), whole(name).run(inputs, 0, cold.num_stages))
        coming = arriving(cold)
        assert coming is None or is_left_alone(cold, coming)
        assert cold.digest == program.digest and cold.weights_digest == program.weights_digest
        assert bytes(cold.weights_bytes) == bytes(program.weights_bytes)


@pytest.mark.full
def test_programs_of_one_network_share_weights_that_some_do_not_read() -> None:
    torch.manual_seed(1)
    model = Words().eval()
    given = [torch.arange(8).reshape(1, 8), torch.arange(15).reshape(3, 5)]
    store = new_store()
    for program, x in zip(capture_buckets(model, given), given, strict=True):
        publish(program, store)
        cold = under_test.open(store=store, digest=program.digest)
        with torch.no_grad():
            assert same(cold.run((x,), 0, cold.num_stages), model(x))
        coming = arriving(cold)
        assert coming is None or coming.wait(60)


# ------------------------------------------------------------------------------------ before a cut only


@pytest.fixture
def server() -> Iterator[S3Server]:
    with S3Server() as running:
        yield running


def connected(server: S3Server, **settings: str) -> Store:
    options = {"endpoint": server.url, "access_key_id": "a", "secret_access_key": "b", "max_retries": "0"}
    return Store.open("s3://bucket/p", options=options | settings)


def asked(server: S3Server, ending: str) -> list[range]:
    """Return the requested bytes of such objects."""
    found = []
    for method, path, which in server.requests:
        if method == "GET" and path.partition("?")[0].endswith(ending):
            first, last = which.removeprefix("bytes=").split("-")
            found.append(range(int(first), int(last) + 1))
    return found


@pytest.mark.parametrize("name", some(1, ["small", "words"]))
def test_nothing_behind_the_cut_is_downloaded(name: str, server: S3Server) -> None:
    program, inputs = made(name)
    store = connected(server)
    publish(program, store)
    manifest = layout.read(store, weights_of(program))
    partial = 0
    for cut in range(program.num_stages + 1):
        keys = {key for stage in range(cut) for key in needed(program.graph, stage)}
        wanted = [tensor for tensor in manifest.tensors if tensor.name in keys]
        nbytes = sum(tensor.stop - tensor.start for tensor in wanted)
        server.requests.clear()
        cold = under_test.open(store=store, digest=program.digest, stop=cut)
        coming = arriving(cold)
        assert same(cold.run(inputs, 0, cut), whole(name).run(inputs, 0, cut))
        assert coming is None or (coming.wait(60) and coming.nbytes == nbytes)
        bytes_asked = [at for each in asked(server, ".safetensors") for at in each]
        assert len(bytes_asked) == len(set(bytes_asked)) >= nbytes
        assert bool(bytes_asked) == bool(wanted)
        if wanted:
            assert min(bytes_asked) == wanted[0].start and max(bytes_asked) == wanted[-1].stop - 1
            partial += wanted[-1].stop < manifest.tensors[-1].stop
        if cut < program.num_stages:
            given = whole(name).run(inputs, 0, cut)
            with pytest.raises(ProgramError, match=f"stage {cut + 1} was not requested"):
                cold.run(given, cut, cut + 1)
        with pytest.raises(ProgramError, match="the weights file is not complete"):
            _ = cold.weights_bytes
        assert same(cold.run(inputs, 0, cut), whole(name).run(inputs, 0, cut))
    assert partial > 2


@pytest.mark.parametrize("stop", [-1, 1000])
def test_a_stop_that_is_none(stop: int) -> None:
    store, program, _ = published("small")
    with pytest.raises(ProgramError, match=f"stop must lie in 0..{program.num_stages}, got {stop}"):
        under_test.open(store=store, digest=program.digest, stop=stop)


# ------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("arrived", [0, 1, 9])
def test_everybody_gets_the_same_error_and_a_second_one_works(
    arrived: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, program, inputs = published("small")
    stream = Ordered(lets=threading.Semaphore(0), error=(arrived, StoreError("the store broke")))
    assert stream.lets is not None
    cold, coming = opened(monkeypatch, store, program.digest, stream)
    raised: list[BaseException] = []

    def asks(what: Callable[[], object]) -> None:
        try:
            what()
        except UpriverError as error:
            raised.append(error)

    stages = cold.num_stages
    waits: list[Callable[[], object]] = [
        lambda: cold.run(inputs, 0, stages),
        lambda: cold.weights_bytes,
        lambda: coming.wait(60),
    ]
    callers = [threading.Thread(target=asks, args=(what,)) for what in waits]
    for caller in callers:
        caller.start()
    stream.lets.release(arrived + 1)
    for caller in callers:
        caller.join(60)
    for what in waits:
        asks(what)
    assert [type(error) for error in raised] == [StoreError] * 6
    assert {str(error) for error in raised} == {"the store broke"} and len(set(map(id, raised))) == 6
    again = under_test.open(store=store, digest=program.digest)
    assert same(again.run(inputs, 0, stages), whole("small").run(inputs, 0, stages))


def test_a_stage_that_ran_raises_too_once_something_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    store, program, inputs = published("small")
    stream = Ordered(lets=threading.Semaphore(0), error=(20, StoreError("the store broke")))
    assert stream.lets is not None
    cold, coming = opened(monkeypatch, store, program.digest, stream)
    stream.lets.release(20)
    assert same(cold.run(inputs, 0, 1), whole("small").run(inputs, 0, 1))
    stream.lets.release()
    with pytest.raises(StoreError, match="the store broke"):
        coming.wait(60)
    with pytest.raises(StoreError, match="the store broke"):
        cold.run(inputs, 0, 1)


def others(program: Program) -> dict[str, torch.Tensor]:
    """Return weights of the same form."""
    return {key: tensor + 1 for key, tensor in program.weight_tensors.items()}


def test_a_file_that_is_another_one_is_found_out_when_it_is_there() -> None:
    store, program, inputs = published("small")
    layout.publish(others(program), store, weights_of(program), tied=False)
    cold = under_test.open(store=store, digest=program.digest)
    coming = arriving(cold)
    assert coming is not None
    for _ in range(2):
        with pytest.raises(ProgramError, match=r"has digest [0-9a-f]{64}, the graph names"):
            coming.wait(60)
        with pytest.raises(ProgramError, match=r"has digest [0-9a-f]{64}, the graph names"):
            cold.run(inputs, 0, 1)
        with pytest.raises(ProgramError, match=r"has digest [0-9a-f]{64}, the graph names"):
            _ = cold.weights_bytes


@pytest.mark.parametrize("weight", [0, 7, -1])
def test_no_weight_is_read_whose_checksum_is_wrong(weight: int) -> None:
    store, program, inputs = published("small")
    path = weights_of(program)
    manifest, data = layout.read(store, path), bytearray(store.get(path))
    data[manifest.tensors[weight].start] ^= 1
    store.put(path, data)
    forged = msgspec.structs.replace(manifest, etag=store.head(path).etag)
    store.put(manifest_path(path), forged.encode())
    cold = under_test.open(store=store, digest=program.digest)
    coming = arriving(cold)
    assert coming is not None
    with pytest.raises(Damaged, match="have another checksum"):
        cold.run(inputs, 0, cold.num_stages)
    with pytest.raises(Damaged):
        coming.wait(60)


def test_a_copy_of_a_program_arrives_as_the_original_does(monkeypatch: pytest.MonkeyPatch) -> None:
    store, program, inputs = published("small")
    path = weights_of(program)
    store.put(path, store.get(path))
    monkeypatch.setattr(under_test.artifact_store, "load", None)  # so the file is not read whole
    cold = under_test.open(store=store, digest=program.digest)
    assert same(cold.run(inputs, 0, cold.num_stages), whole("small").run(inputs, 0, cold.num_stages))
    damaged = bytearray(store.get(path))
    damaged[layout.read(store, path, copies=True).tensors[0].start] ^= 1
    store.put(path, bytes(damaged))
    cold = under_test.open(store=store, digest=program.digest)
    with pytest.raises(Damaged, match="have another checksum"):
        cold.run(inputs, 0, cold.num_stages)


def test_an_object_that_changed_is_read_whole_and_held_against_its_name() -> None:
    store, program, _ = published("small")
    path = weights_of(program)
    store.put(path, store.get(path)[:-1])
    with pytest.raises(ProgramError, match=f"program {program.digest} in store .*weights file has digest"):
        under_test.open(store=store, digest=program.digest)


def test_weights_whose_manifest_is_refused_are_read_whole() -> None:
    program, inputs = made("small")
    with S3Server() as server, UnlistedServer() as unlisted:
        publish(program, connected(server))
        unlisted.objects = dict(server.objects)
        store = connected(unlisted)
        store.delete(manifest_path(weights_of(program)))
        cold = under_test.open(store=store, digest=program.digest)
        assert arriving(cold) is None
        assert same(cold.run(inputs, 0, cold.num_stages), whole("small").run(inputs, 0, cold.num_stages))


def test_a_manifest_of_other_forms_is_refused_before_the_download(monkeypatch: pytest.MonkeyPatch) -> None:
    store, program, _ = published("small")
    monkeypatch.setattr(strategy, "WeightStream", None)
    tensors = dict(program.weight_tensors)
    layout.publish(tensors | {"stem.0.bias": torch.ones(9)}, store, weights_of(program), tied=False)
    with pytest.raises(ProgramError, match=r"'stem.0.bias' is float32 \[9\] in its file"):
        under_test.open(store=store, digest=program.digest)
    del tensors["stem.0.bias"]
    layout.publish(tensors, store, weights_of(program), tied=False)
    with pytest.raises(ProgramError, match=r"the weights file has no 'stem\.0\.bias'"):
        under_test.open(store=store, digest=program.digest)
    store.put(manifest_path(weights_of(program)), b"{}")
    with pytest.raises(ProgramError, match=r"manifest\.json in store .* cannot be read"):
        under_test.open(store=store, digest=program.digest)


def test_arguments_that_name_no_program() -> None:
    store, program, _ = published("small")
    uri = f"file:///somewhere/programs/{program.digest}"
    with pytest.raises(ConfigError, match=r"prefix goes with a store and a digest; 'file:///somewhere"):
        under_test.open(uri, prefix="other")
    with pytest.raises(ConfigError, match="stop must be a int"):
        under_test.open(store=store, digest=program.digest, stop=True)


def forged(program: Program, store: Store) -> str:
    """Return the digest of a graph that states a wrong shape, with the same weights."""
    document = json.loads(program.graph_bytes)
    document["nodes"][0]["outputs"][0]["spec"]["shape"][1] += 1
    graph = msgspec.json.encode(msgspec.json.decode(json.dumps(document), type=Graph))
    store.put(graph_path(DEFAULT_PREFIX, digest_of(graph)), graph)
    store.put(graph_path(DEFAULT_PREFIX, program.digest), graph)
    return digest_of(graph)


def test_a_graph_that_is_not_sound_is_never_a_program(server: S3Server) -> None:
    program, _ = made("small")
    store = connected(server)
    publish(program, store)
    digest = forged(program, store)
    for stop in (None, 2):
        with pytest.raises(ProgramError, match="declares"):
            under_test.open(store=store, digest=digest, stop=stop)
        until_nothing_is_left()
    server.requests.clear()
    with pytest.raises(ProgramError, match="has digest"):
        under_test.open(store=store, digest=program.digest)
    assert not asked(server, ".safetensors"), "it is not what it is called"


def test_weights_come_while_a_graph_is_checked(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    program, inputs = made("small")
    store = connected(server)
    publish(program, store)
    seen = list[list[range]]()

    def checked(graph: Graph, **options: Any) -> None:
        seen.append(wait_for(lambda: asked(server, ".safetensors"), seconds=60))

    monkeypatch.setattr(under_test, "check", checked)
    server.requests.clear()
    cold = under_test.open(store=store, digest=program.digest)
    assert seen and seen[0]
    assert same(cold.run(inputs, 0, cold.num_stages), whole("small").run(inputs, 0, program.num_stages))


@pytest.mark.parametrize("error", [ProgramError("not sound"), KeyboardInterrupt()])
def test_a_check_that_fails_ends_the_load(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    store, program, _ = published("small")
    for lets in (threading.Semaphore(0), None):  # no weight has arrived by then, or all have
        stream = Ordered(lets=lets)

        def checked(graph: Graph, stream: Ordered = stream, **options: Any) -> None:
            if stream.lets is None:
                stream.join()
            raise error

        with monkeypatch.context() as patched:
            patched.setattr(strategy, "WeightStream", stream.of)
            patched.setattr(under_test, "check", checked)
            with pytest.raises(type(error)):
                under_test.open(store=store, digest=program.digest)
        stream.join()
        until_nothing_is_left()


def until_nothing_is_left() -> None:
    """Wait until no thread of a load remains, and no caller waits for one."""
    wait_for(lambda: not threads(), seconds=60)
    gc.collect()
    assert not under_way


def test_a_program_that_is_dropped_ends_its_load(monkeypatch: pytest.MonkeyPatch) -> None:
    store, program, _ = published("small")
    stream = Ordered(lets=threading.Semaphore(0))
    cold, coming = opened(monkeypatch, store, program.digest, stream)
    file = weakref.ref(cold._file)
    gone = weakref.ref(cold)
    del cold
    gc.collect()
    stream.join()
    assert gone() is None and stream.over
    with pytest.raises(StoreError, match="cancelled"):
        coming.wait(60)
    gc.collect()
    assert file() is None


@pytest.mark.full
@pytest.mark.parametrize("num_days", [15, pytest.param(40, marks=pytest.mark.full)])
def test_a_store_on_a_bad_day_gives_the_right_answer_or_a_typed_error(num_days: int) -> None:
    program, inputs = made("small")
    expected = whole("small").run(inputs, 0, program.num_stages)
    kinds: list[Any] = ["flipped", "short", "reset", "cut", "stalled", "changed", 503, 403]
    outcomes = Counter[str]()
    for seed in range(num_days):
        chance = random.Random(seed)
        some = [None] * chance.choice((4, 40))
        faults = chance.sample([*some, *chance.choices(kinds, k=4)], 4)
        patience_s = 0.3 if "stalled" in faults else 60.0  # how busy the machine is decides no other day
        with FaultyServer() as server:
            publish(program, connected(server))
            store = connected(server, read_timeout_s=str(patience_s))
            server.faults[:] = faults
            limits = StreamLimits(request_bytes=4096, in_flight_bytes=16384, timeout_s=patience_s)
            try:
                cold = under_test.open(store=store, digest=program.digest, limits=limits)
                found = cold.run(inputs, 0, cold.num_stages)
                coming = arriving(cold)
                assert coming is None or coming.wait(60)
            except (StoreError, ProgramError) as error:
                outcomes[type(error).__name__] += 1
            else:
                assert same(found, expected)
                outcomes["right"] += 1
            server.faults.clear()
    assert outcomes["right"] > num_days // 8 and len(outcomes) > (2 if num_days >= 40 else 1)


# ------------------------------------------------------------------------------------------- publishing


@pytest.mark.parametrize("name", NETWORKS)
def test_the_weights_are_the_file_that_the_graph_names(name: str) -> None:
    store, program, _ = published(name)
    data = store.get(weights_of(program))
    assert hashlib.sha256(data).hexdigest() == program.weights_digest
    assert data == bytes(program.weights_bytes)
    manifest = layout.read(store, weights_of(program))
    layout.check_head(store, weights_of(program), manifest)
    assert [tensor.name for tensor in manifest.tensors] == list(program.weight_tensors)
    assert not manifest.ties
    read = artifact_store.load(store, program.digest)
    assert read.graph_bytes == program.graph_bytes
    # As a program that was read has it, too.
    other = new_store()
    publish(read, other)
    assert other.get(weights_of(program)) == data
    assert layout.read(other, weights_of(program)).tensors == manifest.tensors


def test_what_is_there_is_not_written_again(server: S3Server) -> None:
    program, _ = made("small")
    store = connected(server)

    def written() -> list[str]:
        paths = [path for method, path, _ in server.requests if method in ("PUT", "POST")]
        server.requests.clear()
        names = [path.partition("?")[0] for path in paths]
        assert sum("/used/" in name for name in names) == 2  # so that nobody removes what is pushed anew
        return [name.rpartition(".")[2] for name in names if "/used/" not in name]

    publish(program, store)
    assert set(written()) == {"safetensors", "json"}
    publish(program, store)
    assert not written()
    store.delete(manifest_path(weights_of(program)))
    publish(program, store)
    assert set(written()) == {"safetensors", "json"}
    assert layout.read(store, weights_of(program)).tensors


def test_weights_without_a_manifest_get_one() -> None:
    program, inputs = made("shared")
    store = new_store()
    artifact_store.publish(program, store)
    cold = under_test.open(store=store, digest=program.digest)
    assert arriving(cold) is None and cold.before_stage is None
    assert same(cold.run(inputs, 0, cold.num_stages), whole("shared").run(inputs, 0, cold.num_stages))
    with pytest.raises(ObjectNotFound):
        layout.read(store, weights_of(program))
    publish(cold, store)
    assert layout.read(store, weights_of(program)).tensors


def test_a_file_that_is_laid_out_otherwise_has_no_manifest() -> None:
    program, inputs = made("shared")
    data = bytes(program.weights_bytes)
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    text = json.dumps(dict(reversed(header.items())), separators=(",", ":")).encode()
    turned = data[:8] + text.ljust(start - 8) + data[start:]
    graph = msgspec.structs.replace(program.graph, weights_digest=digest_of(turned)).encode()
    other = Program.from_bytes(graph, turned)
    store = new_store()
    publish(other, store)
    assert store.get(weights_of(other)) == turned
    assert not store.exists(manifest_path(weights_of(other)))
    cold = under_test.open(store=store, digest=other.digest)
    assert arriving(cold) is None
    assert same(cold.run(inputs, 0, cold.num_stages), whole("shared").run(inputs, 0, cold.num_stages))


def test_a_program_that_is_still_arriving_is_published_when_it_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, program, _ = published("small")
    stream = Ordered(lets=threading.Semaphore(0))
    assert stream.lets is not None
    cold, _coming = opened(monkeypatch, store, program.digest, stream)
    other = new_store()
    publisher = threading.Thread(target=publish, args=(cold, other))
    publisher.start()
    stream.lets.release(len(program.weight_tensors))
    publisher.join(60)
    assert other.get(weights_of(program)) == bytes(program.weights_bytes)


# ---------------------------------------------------------------------------------------------- naming


@pytest.mark.parametrize("ending", ["", "/", "/graph.json"])
def test_a_program_is_named_by_its_uri(ending: str, tmp_path: Any) -> None:
    program, inputs = made("words")
    store = Store.open(tmp_path.as_uri())
    publish(program, store)
    cold = under_test.open(f"{tmp_path.as_uri()}/.upriver/programs/{program.digest}{ending}")
    assert same(cold.run(inputs, 0, cold.num_stages), whole("words").run(inputs, 0, cold.num_stages))
    coming = arriving(cold)
    assert coming is None or coming.wait(60)


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "s3://bucket",
        "s3://programs/x",
        "/a/programs/x",
        "file:///a/.upriver/x",
        "s3://.upriver/programs/x",
    ],
)
def test_a_uri_that_is_none(uri: str) -> None:
    with pytest.raises(ConfigError, match="a program is STORE/PREFIX/programs/DIGEST"):
        under_test.open(uri)


def test_a_program_is_named_once() -> None:
    with pytest.raises(ConfigError, match="by its URI, or by a store and a digest"):
        under_test.open()
    with pytest.raises(ConfigError, match="by its URI, or by a store and a digest"):
        under_test.open(store=new_store())
    with pytest.raises(ConfigError, match="got both"):
        under_test.open("memory://x/.upriver/programs/y", store=new_store())
    with pytest.raises(ProgramError, match="a digest is 64 hexadecimal characters"):
        under_test.open(store=new_store(), digest="../x")
    with pytest.raises(ProgramNotFound, match="no program 0000"):
        under_test.open(store=new_store(), digest="0" * 64)
    store, program, _ = published("shared")
    with pytest.raises(ConfigError, match="grouping must be one of"):
        under_test.open(store=store, digest=program.digest, grouping="none")


def test_weights_that_are_gone() -> None:
    store, program, _ = published("shared")
    store.delete(weights_of(program))
    with pytest.raises(ProgramNotFound):
        under_test.open(store=store, digest=program.digest)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    for thread in threading.enumerate():
        if thread.name.startswith("upriver-coldstart"):
            thread.join(60)
            assert not thread.is_alive()
