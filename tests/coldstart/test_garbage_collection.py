"""Check which objects a garbage collection removes from a store, and which it never removes."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import some
from tests.store.s3_server import S3Server
from upriver.cli import main
from upriver.coldstart.garbage_collection import (
    FRESH_S,
    LEAST_AGE_S,
    begin_upload,
    check_asked,
    check_staying,
    collect,
    end_upload,
    folders,
    note_use,
    survey,
    unused,
    why_kept,
)
from upriver.errors import ConfigError, Overloaded, StorageFull, StoreError
from upriver.program.graph.artifact_paths import graph_path, weights_path
from upriver.store import ObjectInfo, Store

PREFIX = ".upriver"
DAY_S = 86400.0


def digest(number: int) -> str:
    return f"{number:064x}"


P, Q, W, V, F, G = map(digest, range(1, 7))


class Clocked(Store):
    """A store in memory whose objects have the age that a test sets; a hook runs before each request."""

    numbers = itertools.count()

    def __init__(self) -> None:
        uri = f"memory://clocked-{next(self.numbers)}"
        super().__init__(Store.open(uri)._backend, name="here", uri=uri)
        self.ages: dict[str, float] = {}
        self.before: Callable[[], None] = lambda: None

    def _aged(self, info: ObjectInfo) -> ObjectInfo:
        age_s = self.ages.get(info.path, 0.0)
        return ObjectInfo(path=info.path, size=info.size, etag=info.etag, modified_s=time.time() - age_s)

    def put(self, path: str, data: Any) -> None:
        self.before()
        super().put(path, data)
        self.ages.pop(path, None)

    def head(self, path: str) -> ObjectInfo:
        self.before()
        return self._aged(super().head(path))

    def list(self, prefix: str = "", *, on_unreachable: Any = None) -> Iterator[ObjectInfo]:
        self.before()
        return iter([self._aged(info) for info in super().list(prefix)])

    def delete(self, path: str) -> None:
        self.before()
        super().delete(path)

    def old(self, path: str, data: bytes, age_s: float = 90 * DAY_S) -> None:
        self.put(path, data)
        self.ages[path] = age_s

    def program(self, number: str, weights: str, age_s: float = 90 * DAY_S) -> None:
        self.old(graph_path(PREFIX, number), graph(weights), age_s)

    def weights(self, number: str, age_s: float = 90 * DAY_S) -> None:
        path = weights_path(PREFIX, number)
        self.old(path, b"w" * 100, age_s)
        self.old(path.replace(".safetensors", ".manifest.json"), b"{}", age_s)

    def shard(self, stretch: str, number: int, age_s: float = 90 * DAY_S, *, nbytes: int = 100) -> None:
        self.old(shard_path(stretch, number), b"r" * nbytes, age_s)

    def paths(self) -> set[str]:
        return {info.path.removeprefix(f"{PREFIX}/") for info in super().list()}


def shard_path(stretch: str, number: int, *, folder: str = PREFIX) -> str:
    return f"{folder}/features/{stretch}/rows-{number}-{number:016x}.safetensors"


def graph(weights: str) -> bytes:
    return json.dumps({"weights_digest": weights}).encode()


@pytest.fixture
def store() -> Clocked:
    return Clocked()


def removed(store: Store, *, days: float = 30, **options: Any) -> list[str]:
    return [each.digest for each in collect(store, PREFIX, older_than_s=days * DAY_S, **options)]


# ------------------------------------------------------------------------------------------ decisions

NAMES = st.sampled_from("abc")


@given(
    programs=st.dictionaries(NAMES, st.integers(0, 3), max_size=3),
    weights=st.dictionaries(st.sampled_from("xyz"), st.integers(0, 3), max_size=3),
    needs=st.dictionaries(NAMES, st.sampled_from("xyz"), max_size=3),
    before=st.integers(0, 3),
    only=st.sets(st.sampled_from("abcxyz"), max_size=3),
)
def test_what_goes_is_the_most_that_may(
    programs: dict[str, int],
    weights: dict[str, int],
    needs: dict[str, str],
    before: int,
    only: set[str],
) -> None:
    """The oracle tries every choice of programs and weights."""

    def may_go(gone: set[str], let_go: set[str]) -> bool:
        for each in gone:
            if programs[each] >= before or (only and each not in only and needs.get(each) not in only):
                return False
        for each in let_go:
            named_by_gone = any(needs.get(name) == each for name in gone)
            named_by_kept = any(needs.get(name) == each for name in programs.keys() - gone)
            if weights[each] >= before or named_by_kept or (only and each not in only and not named_by_gone):
                return False
        return True

    def choices(names: Any) -> Iterator[set[str]]:
        for count in range(len(names) + 1):
            yield from map(set, itertools.combinations(sorted(names), count))

    allowed = [pair for pair in itertools.product(choices(programs), choices(weights)) if may_go(*pair)]
    most = max(allowed, key=lambda pair: len(pair[0]) + len(pair[1]))
    assert all(gone <= most[0] and let_go <= most[1] for gone, let_go in allowed)
    assert unused(programs, weights, needs, before_s=before, only=only) == most


# ------------------------------------------------------------------------------------------- removals


def test_what_nobody_used_for_long_goes_with_its_weights_and_notes(store: Clocked) -> None:
    store.program(P, W)
    store.weights(W)
    store.old(f"{PREFIX}/used/{P}", b"used", 31 * DAY_S)
    store.old(f"{PREFIX}/used/{digest(9)}", b"used", 31 * DAY_S)
    store.old(f"{PREFIX}/uploads/10-a", b"upload", 31 * DAY_S)
    store.old(f"{PREFIX}/datasets/{P}/chain.json", b"{}")
    assert removed(store) == [P, W]
    assert store.paths() == {f"datasets/{P}/chain.json"}


@pytest.mark.parametrize(
    ("name", "age_s"),
    [
        (f"used/{P}", 29 * DAY_S),
        (f"used/{W}", 29 * DAY_S),
        (f"programs/{P}/graph.json", 29 * DAY_S),
        (f"weights/{W}.safetensors", 29 * DAY_S),
        (f"weights/{W}.manifest.json", 29 * DAY_S),
    ],
)
def test_what_was_used_since_stays(store: Clocked, name: str, age_s: float) -> None:
    store.program(P, W)
    store.weights(W)
    if name.startswith("used"):
        store.put(f"{PREFIX}/{name}", b"used")
    store.ages[f"{PREFIX}/{name}"] = age_s
    of_weights = W in name
    assert removed(store) == ([P] if of_weights else [])
    assert f"weights/{W}.safetensors" in store.paths()


def test_weights_stay_for_a_program_that_stays(store: Clocked) -> None:
    store.program(P, W)
    store.program(Q, W, age_s=DAY_S)
    store.weights(W)
    store.weights(V)
    assert removed(store) == [P, V]
    assert removed(store) == []


def test_a_digest_takes_nothing_else_along(store: Clocked) -> None:
    for program, weights in ((P, W), (Q, V)):
        store.program(program, weights)
        store.weights(weights)
    assert removed(store, only=[Q], dry_run=True) == [Q, V]
    assert removed(store, only=[V]) == [Q, V]
    assert {f"programs/{P}/graph.json", f"weights/{W}.safetensors"} <= store.paths()


def test_a_dry_run_writes_nothing(store: Clocked) -> None:
    store.program(P, W)
    store.weights(W)
    before = store.paths()
    assert removed(store, dry_run=True) == [P, W]
    assert store.paths() == before


def test_files_of_others_and_damaged_graphs_do_no_harm(store: Clocked) -> None:
    store.old(graph_path(PREFIX, P), b"no graph")
    store.old(f"{PREFIX}/programs/README.md", b"mine")
    store.old(f"{PREFIX}/weights/notes.txt", b"mine")
    assert removed(store) == [P]
    assert store.paths() == {"programs/README.md", "weights/notes.txt"}


def test_what_uploads_left_in_a_file_store_counts_and_goes(tmp_path: Path) -> None:
    store = Store.open(tmp_path.as_uri())
    store.put(f"{PREFIX}/weights/{W}.safetensors", b"w" * 100)
    rest = tmp_path / PREFIX / "weights" / f"{V}.safetensors#1"
    rest.write_bytes(b"cut off")
    (tmp_path / PREFIX / "weights" / "nowhere").symlink_to("/does/not/exist")
    assert survey(store, PREFIX).nbytes == 107
    assert removed(store) == []
    assert rest.exists()
    os.utime(rest, (1e9, 1e9))
    assert removed(store, dry_run=True) == [] and rest.exists()
    assert removed(store) == []
    assert survey(store, PREFIX).nbytes == 100


# ------------------------------------------------------------------------------------ kept features


AGES = st.integers(0, 4).map(lambda days: days + 0.5)
STRETCHES = st.sampled_from([F, G, P])


@given(
    shards=st.dictionaries(STRETCHES, st.lists(AGES, min_size=1, max_size=2), max_size=3),
    notes=st.dictionaries(STRETCHES, AGES, max_size=3),
    only=st.sets(STRETCHES, max_size=2),
    days=st.integers(1, 4),
)
def test_features_go_if_neither_a_note_nor_a_shard_is_recent(
    shards: dict[str, list[float]], notes: dict[str, float], only: set[str], days: int
) -> None:
    store = Clocked()
    for stretch, ages in shards.items():
        for number, age in enumerate(ages):
            store.shard(stretch, number, age * DAY_S, nbytes=10 + number)
    for stretch, age in notes.items():
        store.old(f"{PREFIX}/used/{stretch}", b"used", age * DAY_S)
    unused_days = {stretch: min([*ages, notes.get(stretch, 9.0)]) for stretch, ages in shards.items()}
    gone = [each for each in sorted(shards) if unused_days[each] > days and (not only or each in only)]
    before = store.paths()
    assert removed(store, days=days, only=only, dry_run=True) == gone
    assert store.paths() == before
    found = collect(store, PREFIX, older_than_s=days * DAY_S, only=only)
    assert [each.digest for each in found] == gone
    for each in found:
        assert (each.kind, each.path) == ("features", f"{PREFIX}/features/{each.digest}")
        assert each.nbytes == (10 if len(shards[each.digest]) == 1 else 21)
        assert abs(time.time() - each.used_s - unused_days[each.digest] * DAY_S) < 3600
    left = shards.keys() - set(gone)
    assert store.paths() == {
        *(path for path in before if path.startswith("features") and path.split("/")[1] in left),
        *(f"used/{each}" for each, age in notes.items() if each in left or age < days),
    }


def test_features_outlast_their_program_and_go_without_a_plan(store: Clocked) -> None:
    store.program(P, W)
    store.weights(W)
    store.shard(F, 1)
    store.shard(G, 1, DAY_S)
    plans, steps = [], []

    def look() -> None:
        paths = store.paths()
        if "collecting.json" in paths:
            plans.append(json.loads(Store.get(store, f"{PREFIX}/collecting.json")))
            assert shard_path(F, 1).removeprefix(f"{PREFIX}/") in paths

    store.before = look
    found = collect(
        store, PREFIX, older_than_s=30 * DAY_S, on_progress=lambda done, total: steps.append((done, total))
    )
    assert [(each.kind, each.digest) for each in found] == [("program", P), ("weights", W), ("features", F)]
    assert plans and all(plan == [P, W] for plan in plans)
    assert steps == [(1, 1), (1, 3), (2, 3), (3, 3)]
    assert store.paths() == {shard_path(G, 1).removeprefix(f"{PREFIX}/")}


def test_features_alone_go_without_any_plan(store: Clocked) -> None:
    store.shard(F, 1)
    seen: set[str] = set()
    store.before = lambda: seen.update(store.paths())
    assert removed(store) == [F]
    assert store.paths() == set() and "collecting.json" not in seen


@pytest.mark.parametrize(
    "name",
    [
        "README.md",
        f"{F}/stretch.json",
        f"{F}/rows-1-{1:015x}.safetensors",
        f"{F}/rows--{1:016x}.safetensors",
        f"{F}/rows-1-{1:016x}.safetensors.bak",
        f"{F}/more/rows-1-{1:016x}.safetensors",
        f"{F[1:]}/rows-1-{1:016x}.safetensors",
        f"{F.replace('0', 'A')}/rows-1-{1:016x}.safetensors",
    ],
)
def test_what_is_no_shard_below_features_is_neither_counted_nor_removed(store: Clocked, name: str) -> None:
    store.shard(F, 1)
    store.old(f"{PREFIX}/features/{name}", b"mine")
    assert survey(store, PREFIX).nbytes == 100
    assert removed(store) == [F]
    assert store.paths() == {f"features/{name}"}


def test_an_unfinished_shard_of_a_file_store_counts_and_goes(tmp_path: Path) -> None:
    store = Store.open(tmp_path.as_uri())
    store.put(shard_path(F, 1), b"r" * 100, private=True)
    whole = tmp_path / shard_path(F, 1)
    rest = whole.with_name(f".{whole.name}-abcdefgh#1")
    rest.write_bytes(b"cut off")
    found = survey(store, PREFIX)
    assert found.nbytes == 107 and [info.path for info in found.features[F]] == [shard_path(F, 1)]
    os.utime(rest, (1e9, 1e9))
    assert removed(store) == []
    assert not rest.exists() and survey(store, PREFIX).nbytes == 100


def test_a_shard_that_is_written_during_a_removal_stays(store: Clocked) -> None:
    outcomes = set()
    for moment in range(20):
        store = Clocked()
        store.shard(F, 1)
        requests = itertools.count()

        def write(store: Clocked = store, requests: Iterator[int] = requests, moment: int = moment) -> None:
            if next(requests) == moment:
                store.before = lambda: None
                note_use(store, PREFIX, [F])
                store.put(shard_path(F, 2), b"r")

        store.before = write
        removed(store)
        if next(requests) > moment:
            assert shard_path(F, 2).removeprefix(f"{PREFIX}/") in store.paths(), moment
            outcomes.add(shard_path(F, 1).removeprefix(f"{PREFIX}/") in store.paths())
    assert outcomes == {True, False}


def test_features_that_are_used_after_they_were_listed_stay(store: Clocked) -> None:
    store.shard(F, 1)
    requests: list[None] = []
    store.before = lambda: requests.append(None)
    assert removed(store, dry_run=True) == [F]
    listed = len(requests)

    def use() -> None:
        requests.append(None)
        if len(requests) > 2 * listed:  # the first request after the second listing
            store.before = lambda: None
            note_use(store, PREFIX, [F])

    store.before = use
    assert removed(store) == []
    assert store.paths() == {shard_path(F, 1).removeprefix(f"{PREFIX}/"), f"used/{F}"}


def test_features_that_are_old_by_now_are_not_taken_for_weights(store: Clocked) -> None:
    store.shard(F, 1, 5 * 3600.0)
    said = why_kept(store, PREFIX, F, looked_at=[PREFIX], older_than_s=LEAST_AGE_S)
    assert said == f"{F} under {PREFIX!r} stays: it was used 5.0 h ago; --older-than asks for 4 h"


@pytest.mark.parametrize("age_s", [LEAST_AGE_S - 1, -1.0, float("nan")])
def test_a_short_age_is_refused(age_s: float) -> None:
    check_asked(LEAST_AGE_S, [P])
    with pytest.raises(ConfigError, match="used in the last 4 hours is never removed; got"):
        check_asked(age_s, [])


def test_two_removals_at_once_are_refused_and_one_that_was_broken_off_is_not_waited_for(
    store: Clocked,
) -> None:
    store.program(P, W)
    plan = f"{PREFIX}/collecting.json"
    store.put(plan, json.dumps([P]).encode())
    with pytest.raises(StoreError, match="another removal runs"):
        removed(store)
    store.ages[plan] = FRESH_S + 1
    assert removed(store) == [P]
    assert store.paths() == set()


# --------------------------------------------------------------------------- concurrent uploads and uses


def uploading(store: Clocked, program: str, weights: str) -> Iterator[None]:
    """Upload one request at a time, as a server does."""
    note_use(store, PREFIX, (weights, program))
    yield
    check_staying(store, PREFIX, (weights, program))
    yield
    is_there = Store.exists(store, weights_path(PREFIX, weights))
    yield
    if not is_there:
        store.put(weights_path(PREFIX, weights), b"w" * 100)
        yield
    store.put(graph_path(PREFIX, program), graph(weights))


def using(store: Clocked, program: str, weights: str) -> Iterator[None]:
    """Record a use, as a server does."""
    for each in (weights, program):
        note_use(store, PREFIX, (each,))
        yield


def interleaved(store: Clocked, other: Iterator[None], at: list[int]) -> bool:
    """Run a removal while ``other`` makes its steps before the requests ``at``.

    Returns:
        Whether ``other`` ended well.
    """
    requests, steps, ended = itertools.count(), sorted(at), []

    def step() -> None:
        hook, store.before = store.before, lambda: None
        try:
            next(other)
        except StopIteration:
            ended.append(True)
        except Overloaded:
            ended.append(False)
        store.before = hook

    def before() -> None:
        number = next(requests)
        while steps and steps[0] <= number and not ended:
            steps.pop(0)
            step()

    store.before = before
    removed(store)
    store.before = lambda: None
    while not ended:
        step()
    return ended[0]


def moments(num_steps: int) -> Iterator[list[int]]:
    """Yield, per step, the request of a removal that it precedes: some steps together, then the others."""
    for first, start in itertools.product(range(num_steps), range(20)):
        for then in range(start, 20):
            yield [start] * first + [then] * (num_steps - first)


@pytest.mark.parametrize("program", some(1, [P, Q]))
def test_an_upload_that_ends_well_is_whole_whenever_a_removal_ran(program: str) -> None:
    ends = set()
    for at in moments(6):
        store = Clocked()
        store.program(P, W)
        store.weights(W)
        ended_well = interleaved(store, uploading(store, program, W), at)
        if ended_well:
            assert {f"programs/{program}/graph.json", f"weights/{W}.safetensors"} <= store.paths(), at
        assert "collecting.json" not in store.paths()
        ends.add(ended_well)
    assert ends == {True, False}


def test_a_program_that_is_used_meanwhile_is_there_whole_or_not_at_all() -> None:
    left = set()
    for at in moments(3):
        store = Clocked()
        store.program(P, W)
        store.weights(W)
        interleaved(store, using(store, P, W), at)
        has_graph = f"programs/{P}/graph.json" in store.paths()
        has_weights = f"weights/{W}.safetensors" in store.paths()
        assert has_weights or not has_graph, at
        left.add(has_graph)
    assert left == {True, False}


# --------------------------------------------------------------------------------------------- counts


def refusing(most: int) -> Callable[[int, int, int], None]:
    def check(stored: int, coming: int, more: int) -> None:
        if stored + coming + more > most:
            raise StorageFull(f"{stored} {coming} {more}")

    return check


def test_what_is_stored_and_what_others_write_counts_and_what_is_there_is_not_added(store: Clocked) -> None:
    store.weights(W)
    objects = {weights_path(PREFIX, W): 100, graph_path(PREFIX, P): 50}
    first = begin_upload(store, PREFIX, objects, check=refusing(152))
    with pytest.raises(StorageFull, match="102 150 50"):
        begin_upload(store, PREFIX, objects, check=refusing(301))
    end_upload(store, first)
    end_upload(store, begin_upload(store, PREFIX, objects, check=refusing(152)))
    assert not any(path.startswith("uploads") for path in store.paths())


def test_an_upload_that_was_broken_off_counts_for_an_hour(store: Clocked) -> None:
    store.old(f"{PREFIX}/uploads/70-a", b"upload", FRESH_S - 60)
    with pytest.raises(StorageFull, match="0 70 50"):
        begin_upload(store, PREFIX, {graph_path(PREFIX, P): 50}, check=refusing(100))
    store.ages[f"{PREFIX}/uploads/70-a"] = FRESH_S + 60
    begin_upload(store, PREFIX, {graph_path(PREFIX, P): 50}, check=refusing(100))
    assert "uploads/70-a" not in store.paths()


@given(
    stored=st.integers(0, 20),
    sizes=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    limit=st.integers(0, 70),
    moment=st.integers(0, 12),
    ends_first=st.booleans(),
)
def test_two_uploads_of_shards_at_once_never_exceed_the_limit(
    stored: int, sizes: tuple[int, int], limit: int, moment: int, ends_first: bool
) -> None:
    """The second upload begins before any request of the first."""
    store = Clocked()
    store.put(shard_path(F, 0), b"r" * stored)
    admitted: list[int] = []
    requests = itertools.count()

    def begin(number: int) -> str | None:
        size = sizes[number - 1]
        try:
            return begin_upload(store, PREFIX, {shard_path(F, number): size}, check=refusing(limit))
        except StorageFull:
            return None

    def finish(number: int, note: str | None) -> None:
        if note is not None:
            store.put(shard_path(F, number), b"r" * sizes[number - 1])
            admitted.append(number)
            end_upload(store, note)

    notes: list[str | None] = []

    def second() -> None:
        store.before = lambda: None
        notes.append(begin(2))
        if ends_first:
            finish(2, notes[0])

    def before() -> None:
        if next(requests) == moment:
            second()

    store.before = before
    note = begin(1)
    store.before = lambda: None
    if not notes:
        second()
    finish(1, note)
    if not ends_first:
        finish(2, notes[0])
    total = survey(store, PREFIX).nbytes
    assert total == stored + sum(sizes[number - 1] for number in admitted)
    assert total <= max(stored, limit)
    if stored + 2 * sum(sizes) <= limit:  # whichever was counted twice
        assert sorted(admitted) == [1, 2]
    assert not any(path.startswith("uploads") for path in store.paths())


def test_a_shard_that_is_written_again_adds_nothing(store: Clocked) -> None:
    store.shard(F, 1)
    end_upload(store, begin_upload(store, PREFIX, {shard_path(F, 1): 100}, check=refusing(100)))
    with pytest.raises(StorageFull, match="100 0 50"):
        begin_upload(store, PREFIX, {shard_path(F, 2): 50}, check=refusing(149))


@pytest.mark.parametrize("name", ["x", "-1-a", "99999999999999999999-a", "٣-a", "1"])
def test_what_is_no_note_of_an_upload_is_not_counted(store: Clocked, name: str) -> None:
    store.put(f"{PREFIX}/uploads/{name}", b"")
    end_upload(store, begin_upload(store, PREFIX, {graph_path(PREFIX, P): 50}, check=refusing(51)))


# ----------------------------------------------------------------------------------------- the command


def test_the_command_over_s3_goes_through_all_tenants_or_one(capsys: pytest.CaptureFixture[str]) -> None:
    def run(*arguments: str) -> Any:
        assert main(list(arguments)) == 0
        return json.loads(capsys.readouterr().out)

    with S3Server() as s3:
        options = {"endpoint": s3.url, "access_key_id": "KEY", "secret_access_key": "SECRET"}
        store = Store.open("s3://bucket", options=options)
        places = [PREFIX, f"{PREFIX}/tenants/alice", f"{PREFIX}/tenants/bob"]
        for number, place in enumerate(places):
            s3.objects[f"bucket/{graph_path(place, digest(number))}"] = graph(W)
        assert folders(store, PREFIX, shared=True) == [*places[1:], PREFIX]
        given = [f"--option={name}={value}" for name, value in options.items()]
        command = ["gc", "s3://bucket", *given, "--json"]
        tenant = run(*command, "--tenant", "bob")
        assert [each["digest"] for each in tenant["removed"]] == [digest(2)]
        tried = run(*command, "--dry-run", "--older-than", "2w", "--shared")
        assert [each["digest"] for each in tried["removed"]] == [digest(1), digest(0)]
        assert tried["removed"][0]["last_used"] == "2026-01-01T00:00:00+00:00"
        store.put(f"{PREFIX}/used/{digest(0)}", b"used")
        assert run(*command, "--shared", "--digest", digest(0))["removed"] == []
        rest = run(*command)
        assert [each["digest"] for each in rest["removed"]] == [digest(1)]
        assert [path for path in s3.objects if "/programs/" in path] == [
            f"bucket/{graph_path(PREFIX, digest(0))}"
        ]


@pytest.fixture
def shared_store(tmp_path: Path) -> Store:
    """Return a file store with an old program of a tenant, and an old pushed one of newer weights."""
    store = Store.open(tmp_path.as_uri())
    for place, program in ((f"{PREFIX}/tenants/alice", Q), (PREFIX, P)):
        store.put(graph_path(place, program), graph(W))
        os.utime(tmp_path / graph_path(place, program), (1e9, 1e9))
        store.put(weights_path(place, W), b"w" * 100)
    return store


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--digest", V],
            f"no program, no weights and no features under '.upriver' in store 'default' have digest {V}",
        ),
        (["--digest", P], f"{P} lies under '.upriver', which was not looked at; add --shared"),
        (["--shared", "--digest", W], f"{W} under '.upriver/tenants/alice' stays: it was used 0.0 h ago"),
    ],
)
def test_gc_of_a_digest_that_stays_says_why(
    shared_store: Store, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main(["gc", shared_store.uri, *arguments]) == 0
    captured = capsys.readouterr().err
    assert ("0 B in 0 objects were removed" in captured) == (W not in arguments)
    assert said in captured


def test_gc_of_a_digest_of_another_tenant_names_that(
    shared_store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    shared_store.put(graph_path(f"{PREFIX}/tenants/bob", V), graph(W))
    assert main(["gc", shared_store.uri, "--json", "--tenant", "bob", "--digest", Q]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["removed"] == []
    assert (
        captured.err
        == f"{Q} lies under '.upriver/tenants/alice', which was not looked at; add --tenant alice\n"
    )


def test_gc_of_weights_that_a_program_needs_says_so(
    shared_store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = f"{PREFIX}/tenants/alice"
    os.utime(tmp_path / weights_path(place, W), (1e9, 1e9))
    shared_store.put(f"{place}/used/{Q}", b"used")
    assert main(["gc", shared_store.uri, "--digest", W]) == 0
    assert f"{W} under {place!r} stays: a program that was used since needs" in capsys.readouterr().err


def test_gc_of_a_digest_that_goes_says_no_more(
    shared_store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["gc", shared_store.uri, "--digest", Q]) == 0
    said = capsys.readouterr().err
    assert "in 1 objects were removed" in said and "stays" not in said and "looked at" not in said


def test_gc_without_tenants_points_to_shared_programs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["gc", tmp_path.as_uri()]) == 0
    assert "no tenant has stored anything under '.upriver'; --shared looks at" in capsys.readouterr().err


@pytest.mark.parametrize("age", ["99999999d", "1000000h", "9" * 400 + "w", "1e3d", "3", "-1d"])
def test_gc_of_an_age_beyond_the_limit_names_the_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], age: str
) -> None:
    assert main(["gc", tmp_path.as_uri(), f"--older-than={age}"]) == 2
    said = capsys.readouterr().err
    assert "--older-than is a number below 1000000 with h, d or w as in 12h" in said and len(said) < 300
    assert main(["gc", tmp_path.as_uri(), "--older-than=999999.5w"]) == 0


@pytest.mark.parametrize("name", ["", "../x", ".", "a/b", "a" * 65, "-a", "a\n"])
def test_gc_of_what_is_no_tenants_name_says_what_is_allowed(
    shared_store: Store, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert main(["gc", shared_store.uri, f"--tenant={name}"]) == 2
    assert "a tenant's name has 1 to 64 letters, digits" in capsys.readouterr().err
    assert main(["gc", shared_store.uri, "--tenant=carol"]) == 2
    assert "tenant 'carol' has stored nothing" in capsys.readouterr().err
