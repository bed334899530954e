"""Check that measurements come back for exactly equal jobs, whatever happens to the folder."""

import json
import logging
import os
import resource
import subprocess
import sys
import tempfile
import textwrap
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.server.running import wait_for
from upriver.cache import LEFT_BEHIND_S, MAX_FILE_BYTES
from upriver.errors import ConfigError
from upriver.profile.throughput import MOST, Candidate
from upriver.profile.throughput_cache import (
    STORE_SCHEMA,
    KnownThroughput,
    LocalResources,
    MetricsStore,
    RemoteResources,
    RemoteWorker,
    StoreKey,
    model_key,
    pipeline_key,
    sample_key,
)
from upriver.resources import available_cpus

LOCAL = LocalResources(cpus=2, num_workers=1, threads=2, device="cpu", machine="x86_64 AVX2")
ONE = RemoteWorker(address="http://one:7001", cpus=4, processes=4)
TWO = RemoteWorker(address="http://two:7001")
REMOTE = RemoteResources(workers=(ONE, TWO), candidates=("p1", "p2"))
KEY = StoreKey(model="name:m", pipeline="birds", batch_size=8, local=LOCAL, remote=REMOTE, sample="floats")
P1, P2 = Candidate(name="p1", rthp=20, ocycle=4), Candidate(name="p2", rthp=34.5, ocycle=0)
ALL = KnownThroughput(gthp=200, lthp=40.5, pcycle=10, candidates=(P1, P2))


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "metrics"


@pytest.fixture
def told():
    """Yield the growing list of logged messages."""

    class Listener(logging.Handler):
        def emit(self, record):
            messages.append(record.getMessage())

    messages, listener, log = [], Listener(logging.WARNING), logging.getLogger("upriver")
    log.addHandler(listener)
    yield messages
    log.removeHandler(listener)


# ---------------------------------------------------------------------------------------------------- matches


def test_what_was_saved_comes_back_to_another_job(folder, told):
    assert MetricsStore(folder).load(KEY) == KnownThroughput()
    MetricsStore(folder).save(KEY, ALL)
    assert MetricsStore(str(folder)).load(KEY) == ALL
    assert len(list(folder.iterdir())) == 5
    assert not told


def rates(**limits):
    return st.floats(0, MOST, **limits)


@st.composite
def knowns(draw):
    names = draw(st.lists(st.sampled_from(["p1", "p2", "p3"]), unique=True))
    plain = {name: draw(st.none() | rates(exclude_min=True)) for name in ("gthp", "lthp", "pcycle")}
    candidates = [Candidate(name=name, rthp=draw(rates()), ocycle=draw(rates())) for name in sorted(names)]
    return KnownThroughput(**plain, candidates=tuple(candidates))


@st.composite
def keys(draw):
    """Draw keys from so few values that many keys share some."""
    several = st.lists(st.sampled_from([ONE, TWO]), min_size=1).map(tuple)
    remote = st.builds(RemoteResources, workers=several, candidates=st.just(("p1", "p2", "p3")))
    return StoreKey(
        model=draw(st.sampled_from(["name:m", "name:n"])),
        pipeline=draw(st.sampled_from(["birds", "cats"])),
        batch_size=draw(st.sampled_from([None, 8])),
        local=replace(LOCAL, num_workers=draw(st.sampled_from([1, 2]))),
        remote=draw(remote),
        sample=draw(st.sampled_from(["", "floats"])),
    )


@given(key=keys(), known=knowns())
def test_any_figures_come_back_to_the_last_bit(key, known):
    with tempfile.TemporaryDirectory() as folder:
        MetricsStore(folder).save(key, known)
        assert MetricsStore(folder).load(key) == known


def rows(key, known):
    """Yield the paper's tables as one mapping: the dependencies of a figure, and the known value."""
    job = (key.model, key.batch_size, key.local)
    yield ("gthp", *job, key.sample), known.gthp
    yield ("lthp", *job, key.pipeline), known.lthp
    yield ("pcycle", *job, key.pipeline), known.pcycle
    measured = {candidate.name: candidate for candidate in known.candidates}
    workers = tuple(sorted(worker.address for worker in key.remote.workers))
    for name in key.remote.candidates:
        yield ("candidate", *job, key.pipeline, workers, name), measured.get(name)


@given(saved=st.lists(st.tuples(keys(), knowns()), max_size=8), asked=keys())
def test_many_jobs_see_what_a_mapping_of_the_tables_says(saved, asked):
    tables = {}
    with tempfile.TemporaryDirectory() as folder:
        store = MetricsStore(folder)
        for key, known in saved:
            store.save(key, known)
            tables.update({row: value for row, value in rows(key, known) if value is not None})
        for key in [asked, *(key for key, _ in saved)]:
            wanted = {
                row[0]: tables.get(row) for row, _ in rows(key, KnownThroughput()) if row[0] != "candidate"
            }
            candidates = [tables.get(row) for row, _ in rows(key, KnownThroughput()) if row[0] == "candidate"]
            found = store.load(key)
            assert {name: getattr(found, name) for name in wanted} == wanted
            assert list(found.candidates) == [each for each in candidates if each is not None]


OF_MODEL = KnownThroughput(gthp=200)
OF_PIPELINE = KnownThroughput(lthp=40.5, pcycle=10)


@pytest.mark.parametrize(
    ("other", "seen"),
    [
        (replace(KEY, model="name:other"), KnownThroughput()),
        (replace(KEY, batch_size=16), KnownThroughput()),
        (replace(KEY, batch_size=None), KnownThroughput()),
        *(
            (replace(KEY, local=replace(LOCAL, **change)), KnownThroughput())
            for change in (
                {"cpus": 4},
                {"num_workers": 2},
                {"threads": 1},
                {"device": "NVIDIA H100"},
                {"machine": "aarch64 DEFAULT"},
                {"ranks": 2},
            )
        ),
        (replace(KEY, pipeline="cats"), OF_MODEL),
        (replace(KEY, sample=""), replace(OF_PIPELINE, candidates=(P1, P2))),
        (replace(KEY, remote=None), replace(ALL, candidates=())),
        *(
            (replace(KEY, remote=replace(REMOTE, workers=workers)), replace(ALL, candidates=()))
            for workers in (
                (ONE,),
                (ONE, ONE, TWO),
                (ONE, replace(TWO, address="http://three:7001")),
                (ONE, replace(TWO, cpus=4)),
                (ONE, replace(TWO, processes=4)),
                (replace(ONE, cpus=8), TWO),
            )
        ),
        (replace(KEY, remote=replace(REMOTE, workers=(TWO, ONE))), ALL),
        (replace(KEY, remote=replace(REMOTE, candidates=("p2", "p3"))), replace(ALL, candidates=(P2,))),
        (replace(KEY, remote=replace(REMOTE, candidates=("p2", "p1"))), replace(ALL, candidates=(P2, P1))),
    ],
)
def test_another_job_sees_what_it_shares(folder, other, seen):
    MetricsStore(folder).save(KEY, ALL)
    assert MetricsStore(folder).load(other) == seen


@pytest.mark.parametrize("version", ["upriver.__version__", "torch.__version__"])
def test_other_versions_measure_anew(folder, monkeypatch, version):
    MetricsStore(folder).save(KEY, ALL)
    monkeypatch.setattr(version, "99")
    assert MetricsStore(folder).load(KEY) == KnownThroughput()


def test_what_is_not_known_now_stays_as_it_was(folder):
    store = MetricsStore(folder)
    store.save(KEY, KnownThroughput(lthp=1, candidates=(P1,)))
    store.save(KEY, KnownThroughput(gthp=3, pcycle=4))
    store.save(KEY, KnownThroughput())
    assert store.load(KEY) == KnownThroughput(gthp=3, lthp=1, pcycle=4, candidates=(P1,))
    slower = replace(P1, rthp=0)
    store.save(KEY, KnownThroughput(lthp=2, candidates=(P2, slower)))
    assert store.load(KEY) == KnownThroughput(gthp=3, lthp=2, pcycle=4, candidates=(slower, P2))


def test_what_was_only_told_is_not_new(folder, monkeypatch):
    store = MetricsStore(folder)
    store.save(KEY, ALL)
    now = time.time() + 1000
    monkeypatch.setattr(time, "time", lambda: now)
    told = store.load(KEY)
    slower = replace(P2, ocycle=1)
    found = replace(told, lthp=7, candidates=(P1, slower))
    assert found.beyond(told) == KnownThroughput(lthp=7, candidates=(slower,))
    store.save(KEY, found.beyond(told))
    assert store.load(KEY) == found
    assert store.load(KEY, max_age_s=500) == KnownThroughput(lthp=7, candidates=(slower,))


@given(before=knowns(), now=knowns())
def test_what_is_new_makes_of_what_was_known_what_is_known_now(before, now):
    with tempfile.TemporaryDirectory() as folder:
        one, other = MetricsStore(Path(folder) / "one"), MetricsStore(Path(folder) / "other")
        key = replace(KEY, remote=replace(REMOTE, candidates=("p1", "p2", "p3")))
        for store in (one, other):
            store.save(key, before)
        one.save(key, now)
        other.save(key, now.beyond(before))
        assert one.load(key) == other.load(key)
    assert now.beyond(now) == KnownThroughput()


def test_figures_may_be_too_old(folder, monkeypatch):
    now = time.time()
    store = MetricsStore(folder)
    monkeypatch.setattr(time, "time", lambda: now - 1000)
    store.save(KEY, ALL)
    monkeypatch.setattr(time, "time", lambda: now - 10)
    store.save(KEY, KnownThroughput(lthp=7))
    monkeypatch.setattr(time, "time", lambda: now)
    assert store.load(KEY) == store.load(KEY, max_age_s=1001) == replace(ALL, lthp=7)
    assert store.load(KEY, max_age_s=999) == KnownThroughput(lthp=7)
    assert store.load(KEY, max_age_s=9) == KnownThroughput()
    monkeypatch.setattr(time, "time", lambda: now - 2000)  # the clock was set back
    assert store.load(KEY, max_age_s=900) == KnownThroughput()


# --------------------------------------------------------------------------------------------------- folders


def test_the_folder_is_beside_the_other_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("UPRIVER_CACHE", str(tmp_path / "own"))
    MetricsStore().save(KEY, ALL)
    assert MetricsStore(tmp_path / "own" / "metrics").load(KEY) == ALL
    monkeypatch.delenv("UPRIVER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    assert MetricsStore().load(KEY) == KnownThroughput()
    MetricsStore().save(KEY, ALL)
    assert MetricsStore(tmp_path / "user" / "upriver" / "metrics").load(KEY) == ALL


@pytest.mark.parametrize("off", [os.devnull, "/dev/null/nowhere"])
def test_nothing_may_be_kept_and_nothing_is_said_of_it(monkeypatch, told, off):
    monkeypatch.setenv("UPRIVER_CACHE", off)
    for store in (MetricsStore(), MetricsStore(off)):
        store.save(KEY, ALL)
        assert store.load(KEY) == KnownThroughput()
    assert not told


def test_metrics_store_without_a_home_keeps_nothing(monkeypatch, told):
    def nowhere():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("UPRIVER_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nowhere)
    store = MetricsStore()
    store.save(KEY, ALL)
    assert store.load(KEY) == KnownThroughput()
    assert not told


def test_only_the_user_may_read_it(folder):
    MetricsStore(folder).save(KEY, ALL)
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


def test_the_oldest_go_when_there_are_too_many(folder, monkeypatch):
    folder.mkdir()
    others = [folder / "notes.json", folder / ("a" * 64), folder / ".hidden"]
    for path in others:
        path.write_text("somebody else's")
        os.utime(path, (0, 0))
    store = MetricsStore(folder)
    monkeypatch.setattr(store._cache, "_max_files", 3)
    sizes = [5, 4, 3, 2, 1]
    for age, size in enumerate(sizes):
        before = set(folder.iterdir())
        store.save(replace(KEY, batch_size=size), KnownThroughput(gthp=size))
        [new] = set(folder.iterdir()) - before
        os.utime(new, (0, time.time() - 1000 + age))
    found = {size: store.load(replace(KEY, batch_size=size)).gthp for size in sizes}
    assert found == {5: None, 4: None, 3: 3, 2: 2, 1: 1}
    assert all(path.exists() for path in others)
    assert len(list(folder.iterdir())) == 3 + len(others)


# ---------------------------------------------------------------------------------------------- damage


def kept_files(folder):
    """Return the files by their first figure: gthp, lthp, pcycle."""
    found = {next(iter(json.loads(path.read_text())["figures"])): path for path in folder.iterdir()}
    assert all(json.loads(path.read_text())["schema"] == STORE_SCHEMA for path in found.values())
    return found


def changed(**changes):
    return lambda text: json.dumps({**json.loads(text), **changes})


DAMAGE = {
    "empty": lambda text: "",
    "truncated": lambda text: text[: len(text) // 2],
    "two in one": lambda text: text + text,
    "binary": lambda text: "\udcff\udcfe\udc80",
    "null": lambda text: "null",
    "deep": lambda text: "[" * 4000,
    "long": lambda text: text + " " * MAX_FILE_BYTES,
    "newer": changed(schema="upriver.metrics-store/2"),
    "foreign": changed(schema="upriver.metrics/1"),
    "more fields": changed(unit="MB/s"),
    "no schema": lambda text: json.dumps({k: v for k, v in json.loads(text).items() if k != "schema"}),
    "another key": changed(key="0" * 64),
    "no time": changed(saved=None),
    "no figure": changed(figures={}),
    "another figure": changed(figures={"lthp": 1}),
    "one figure more": changed(figures={"gthp": 1, "lthp": 1}),
    "text": changed(figures={"gthp": "fast"}),
    "zero": changed(figures={"gthp": 0}),
    "negative": changed(figures={"gthp": -1}),
    "too much": changed(figures={"gthp": 1e13}),
    "infinite": lambda text: text.replace('"gthp":200', '"gthp":1e999'),
    "no number": lambda text: text.replace('"gthp":200', '"gthp":NaN'),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_told_of_once_and_replaced(folder, told, damage):
    MetricsStore(folder).save(KEY, KnownThroughput(gthp=200, lthp=40.5))
    path = kept_files(folder)["gthp"]
    before, after = path.read_text(), damage(path.read_text())
    assert after != before
    path.write_text(after, errors="surrogateescape")
    store = MetricsStore(folder)
    for _ in range(3):
        assert store.load(KEY) == KnownThroughput(lthp=40.5)
    assert len(told) == 1 and path.name in told[0]
    store.save(KEY, KnownThroughput(gthp=300))
    assert store.load(KEY) == KnownThroughput(gthp=300, lthp=40.5)


@given(data=st.data())
def test_no_damage_is_an_error(data):
    with tempfile.TemporaryDirectory() as name:
        store = MetricsStore(name)
        store.save(KEY, ALL)
        for path in sorted(Path(name).iterdir()):
            text = bytearray(path.read_bytes())
            at = data.draw(st.integers(0, 200))
            text[at : at + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=9))
            path.write_bytes(text)
        store.load(KEY)  # a digit may have become another, so any allowed value may come back
        store.save(KEY, ALL)
        assert store.load(KEY) == ALL


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_file_is_not_waited_for(folder, told, make):
    MetricsStore(folder).save(KEY, KnownThroughput(gthp=200, lthp=40.5))
    path = kept_files(folder)["gthp"]
    path.unlink()
    make(path)
    store = MetricsStore(folder)
    for _ in range(2):
        assert store.load(KEY) == KnownThroughput(lthp=40.5)
    assert len(told) == 1 and path.name in told[0]


def test_reading_leaves_no_file_open(folder):
    MetricsStore(folder).save(KEY, KnownThroughput(gthp=200, lthp=40.5))
    kept_files(folder)["gthp"].write_text("{")
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(5):
        MetricsStore(folder).load(KEY)
    wait_for(lambda: set(os.listdir("/proc/self/fd")) <= before)  # other tests' threads may have some


# ----------------------------------------------------------------------------------------- unwritable folders


@contextmanager
def files_of_at_most(num_bytes):
    """Limit the size of files: the system refuses further bytes, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_what_was_there_and_no_half(folder, told):
    store = MetricsStore(folder)
    store.save(KEY, ALL)
    before = {path: path.read_text() for path in folder.iterdir()}
    for _ in range(2):
        with files_of_at_most(20):
            store.save(KEY, KnownThroughput(gthp=1, lthp=1, pcycle=1))
    assert {path: path.read_text() for path in folder.iterdir()} == before
    assert len(told) == 1 and str(folder) in told[0]
    store.save(KEY, KnownThroughput(gthp=1))
    assert store.load(KEY) == replace(ALL, gthp=1)


@pytest.mark.parametrize("call", ["os.replace", "os.scandir", "tempfile.mkstemp"])
def test_any_step_of_saving_may_fail(folder, told, monkeypatch, call):
    store = MetricsStore(folder)
    store.save(KEY, ALL)

    def full(*_args, **_options):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(call, full)
        store.save(KEY, replace(ALL, candidates=()))
        store.save(KEY, replace(ALL, candidates=()))
    assert len(told) == 1 and "No space left" in told[0]
    assert store.load(KEY) == ALL
    assert len(list(folder.iterdir())) == 5


def test_a_folder_that_nobody_may_write_to(told):
    store = MetricsStore("/sys")  # not even root may
    store.save(KEY, ALL)
    store.save(KEY, ALL)
    assert store.load(KEY) == KnownThroughput()
    assert len(told) == 1 and "/sys" in told[0]


def test_a_file_in_place_of_the_folder(folder, told):
    folder.write_text("a file")
    store = MetricsStore(folder)
    store.save(KEY, ALL)
    assert store.load(KEY) == KnownThroughput()
    assert folder.read_text() == "a file"
    assert len(told) == 1


# ------------------------------------------------------------------------------- several processes, and kills

JOBS = """
import os, random, signal, sys, time
from dataclasses import replace
from pathlib import Path
from upriver.profile.throughput import Candidate
from upriver.profile.throughput_cache import KnownThroughput, MetricsStore
from tests.profile.test_throughput_cache import KEY

folder = sys.argv[1]
store = MetricsStore(folder)


def job(work):
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return child


def known(number):
    candidates = tuple(Candidate(name=name, rthp=number, ocycle=number / 2) for name in ("p1", "p2"))
    return KnownThroughput(gthp=number, lthp=number, pcycle=number, candidates=candidates)
"""


def run(folder, script):
    """Run jobs in a process of their own; return the output and the log."""
    return subprocess.run(
        [sys.executable, "-c", JOBS + textwrap.dedent(script), str(folder)],
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )


@pytest.mark.full
@pytest.mark.slow
def test_jobs_that_are_killed_while_they_save_leave_whole_files(folder):
    MetricsStore(folder).save(KEY, replace(ALL, candidates=(replace(P1, rthp=1, ocycle=0.5),)))
    done = run(
        folder,
        """
        mother = os.getpid()

        def forever():
            while os.getppid() == mother:
                store.save(KEY, known(random.randrange(1, 10**6)))

        for turn in range(30):
            jobs = [job(forever) for _ in range(3)]
            time.sleep(random.random() / 50)
            for child in jobs:
                os.kill(child, signal.SIGKILL)
                assert os.waitpid(child, 0)[1] == signal.SIGKILL
            found = MetricsStore(folder).load(KEY)
            assert found.gthp and found.lthp and found.pcycle and found.candidates, found
            assert all(each.rthp == 2 * each.ocycle for each in found.candidates), found
        """,
    )
    assert done.stderr == ""  # no file was damaged
    kept = [path for path in folder.iterdir() if not path.name.startswith(".")]
    assert len(kept) == 5


@pytest.mark.slow
@pytest.mark.parametrize("halt", [pytest.param("Path.write_text", marks=pytest.mark.full), "os.replace"])
@pytest.mark.full
def test_what_a_killed_job_leaves_half_written_is_cleared_up(folder, halt):
    store = MetricsStore(folder)
    store.save(KEY, ALL)
    before = set(folder.iterdir())
    owner, _, call = halt.partition(".")
    run(
        folder,
        f"""
        def half(path, text, *_args, **_options):
            if {call!r} == "write_text":
                with open(path, "w") as file:
                    file.write(text[: len(text) // 2])
            os.kill(os.getpid(), signal.SIGKILL)

        def killed():
            {owner}.{call} = half
            store.save(KEY, known(9))

        assert os.waitpid(job(killed), 0)[1] == signal.SIGKILL
        """,
    )
    [left] = set(folder.iterdir()) - before
    assert store.load(KEY) == ALL
    store.save(KEY, KnownThroughput(lthp=5))
    assert left.exists()  # its writer may be alive
    os.utime(left, (0, time.time() - LEFT_BEHIND_S - 5))
    store.save(KEY, KnownThroughput(lthp=6))
    assert set(folder.iterdir()) == before
    assert store.load(KEY) == replace(ALL, lthp=6)


@pytest.mark.slow
@pytest.mark.full
def test_jobs_that_save_at_once_lose_nothing_of_each_others(folder):
    done = run(
        folder,
        """
        whole = known(4)
        parts = [KnownThroughput(gthp=4), KnownThroughput(lthp=4), KnownThroughput(pcycle=4)]
        parts += [KnownThroughput(candidates=(each,)) for each in whole.candidates]

        def saves(part):
            for size in range(1, 21):
                store.save(replace(KEY, batch_size=size), part)

        for child in [job(lambda part=part: saves(part)) for part in parts]:
            assert os.waitpid(child, 0)[1] == 0
        for size in range(1, 21):
            assert store.load(replace(KEY, batch_size=size)) == whole
        """,
    )
    assert done.stderr == ""
    assert len(list(folder.iterdir())) == 20 * 5


# -------------------------------------------------------------------------------------------------- keys


def network(width=4, **options):
    return nn.Sequential(nn.Conv2d(3, width, 3, **options), nn.BatchNorm2d(width), nn.ReLU())


def test_a_model_is_its_architecture_and_not_its_values():
    trained = network()
    with torch.no_grad():
        for tensor in trained.state_dict().values():
            tensor.zero_()
    assert model_key(trained) == model_key(network()) == model_key(network().eval())
    trained.register_buffer("seen", torch.ones(3))  # some make their tables at the first call
    assert model_key(trained) == model_key(network())


@pytest.mark.parametrize(
    "other",
    [
        network(5),
        network(stride=2),
        network(bias=False),
        network().half(),
        network().requires_grad_(False),
        nn.Sequential(*network(), nn.ReLU()),
        nn.Sequential(*network()[:2], nn.GELU()),
        nn.ModuleList(network()),
        nn.Sequential(network()),
    ],
)
def test_another_architecture_is_another_model(other):
    assert model_key(other) != model_key(network())


def test_what_a_users_module_says_of_itself_is_no_difference():
    class Told(nn.Linear):
        def extra_repr(self):
            return str(id(self))

    one, other = Told(2, 2), Told(2, 2)
    assert model_key(one) == model_key(other)


def test_a_model_without_shapes_yet_has_a_key():
    lazy = nn.LazyLinear(3)
    assert model_key(lazy) == model_key(nn.LazyLinear(3)) != model_key(nn.Linear(2, 3))


def test_a_name_is_never_an_architecture(folder):
    digest = model_key(network())
    assert model_key("resnet") == model_key("resnet") != model_key("resnet2")
    assert model_key(digest) != digest
    longest = replace(KEY, model=model_key("x" * 200))
    MetricsStore(folder).save(longest, ALL)
    assert MetricsStore(folder).load(longest) == ALL


def test_a_pipeline_is_its_name_its_arguments_and_what_collates():
    key = pipeline_key("a.b:C", {"root": "/data", "train": True})
    assert key == pipeline_key("a.b:C", {"train": True, "root": "/data"}, None)
    others = [
        pipeline_key("a.b:D", {"root": "/data", "train": True}),
        pipeline_key("a.b:C", {"root": "/data", "train": 1}),
        pipeline_key("a.b:C", {"root": "/data"}),
        pipeline_key("a.b:C", {}),
        pipeline_key("a.b:C", {"root": "/data", "train": True}, "a.b:collate"),
        pipeline_key("a.b:C", {"root": "/data", "train": True}, code=StoreKey),
    ]
    assert len({key, *others}) == 1 + len(others)


def test_a_change_of_the_code_is_another_pipeline(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "birds_of_a_test.py"
    path.write_text("class Birds:\n    size = 1\n")
    import birds_of_a_test

    name = "birds_of_a_test:Birds"
    before = pipeline_key(name, {}, code=birds_of_a_test.Birds)
    assert pipeline_key(name, {}, code=birds_of_a_test.Birds) == before
    path.write_text("class Birds:\n    size = 2\n")
    assert pipeline_key(name, {}, code=birds_of_a_test.Birds) != before
    path.unlink()
    assert pipeline_key(name, {}, code=birds_of_a_test.Birds) == pipeline_key(name, {})
    assert pipeline_key(name, {}, code=len) == pipeline_key(name, {})


def test_the_form_of_a_sample_is_its_shapes_and_types():
    def form(value):
        return sample_key({"x": [value, 3, "a"], "y": None})

    assert form(torch.zeros(2, 3)) == form(torch.ones(2, 3))
    others = [
        torch.zeros(3, 2),
        torch.zeros(2, 3, dtype=torch.uint8),
        np.zeros((2, 3)),
        1,
        1.0,
        b"",
        (1,),
        [1],
    ]
    assert len({form(value) for value in [torch.zeros(2, 3), *others]}) == 1 + len(others)


def test_this_process_has_what_it_has(monkeypatch):
    here = LocalResources.here(3)
    assert (here.cpus, here.num_workers, here.threads) == (available_cpus(), 3, torch.get_num_threads())
    assert here == LocalResources.here(3) == replace(LocalResources.here(0), num_workers=3)
    assert here.ranks == 1 and os.uname().machine in here.machine
    assert LocalResources.here(3, "meta").device == "meta"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert LocalResources.here(3).device == LocalResources.here(3, torch.device("cpu")).device == "cpu"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"Accelerator on {device}")
    assert LocalResources.here(3).device == "Accelerator on cuda"
    assert LocalResources.here(3, "cuda:1").device == "Accelerator on cuda:1"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: replace(LOCAL, cpus=0), "cpus must be a whole number >= 1, got 0"),
        (lambda: replace(LOCAL, num_workers=True), "num_workers must be a whole number >= 0, got True"),
        (lambda: replace(LOCAL, threads=1.5), "threads must be"),
        (lambda: replace(LOCAL, ranks=0), "ranks must be"),
        (lambda: replace(LOCAL, device=""), "device must be a string of 1 to 200 characters, got ''"),
        (lambda: replace(LOCAL, machine=None), "machine must be"),
        (lambda: LocalResources.here(0, "gpu"), "device must be one that PyTorch has here, got 'gpu'"),
        (
            lambda: LocalResources.here(0, "cuda:99"),
            "device must be one that PyTorch has here, got 'cuda:99'",
        ),
        (lambda: LocalResources.here(0, 1.5), "device must be one that PyTorch has here, got 1.5"),
        (lambda: replace(ONE, address=""), "address must be"),
        (lambda: replace(ONE, cpus=0), "cpus must be"),
        (lambda: replace(ONE, processes="4"), "processes must be a whole number >= 1, got '4'"),
        (lambda: replace(REMOTE, workers=()), "there must be a worker"),
        (lambda: replace(REMOTE, candidates=("p1", "p1")), "names of their own, got 'p1' twice"),
        (lambda: replace(REMOTE, candidates=("",)), "a candidate's name must be"),
        (
            lambda: replace(REMOTE, candidates=tuple(map(str, range(4097)))),
            "at most 4096 candidates, got 4097",
        ),
        (lambda: replace(KEY, model=""), "model must be"),
        (lambda: replace(KEY, pipeline=3), "pipeline must be a string of 1 character or more, got 3"),
        (lambda: replace(KEY, batch_size=0), "batch_size must be a whole number >= 1, got 0"),
        (lambda: KnownThroughput(gthp=0), "gthp must be a finite number > 0"),
        (lambda: KnownThroughput(lthp=float("nan")), "lthp must be"),
        (lambda: KnownThroughput(pcycle=1e13), "pcycle must be"),
        (lambda: KnownThroughput(candidates=(P1, P1)), "got 'p1' twice"),
        (lambda: model_key(""), "model must be a string of 1 to 200 characters, got ''"),
        (lambda: model_key(7), "model must be"),
        (lambda: model_key("x" * 201), "model must be"),
        (lambda: pipeline_key("", {}), "name must be"),
        (lambda: pipeline_key("a:B", {"root": Path("/")}), "the arguments of a:B must be what JSON can say"),
        (lambda: MetricsStore(3), "folder must be a path or None, got 3"),
        (lambda: MetricsStore(b"/tmp"), "folder must be a path"),
        (lambda: MetricsStore(""), "folder must be a path"),
        (lambda: MetricsStore("a\0b"), "folder must be a path"),
        (lambda: MetricsStore("/sys").load(KEY, max_age_s=-1), "max_age_s must be"),
        (lambda: MetricsStore("/sys").load(KEY, max_age_s=float("nan")), "max_age_s must be"),
        (
            lambda: MetricsStore(os.devnull).save(KEY, KnownThroughput(candidates=(replace(P1, name="p3"),))),
            "'p3' is no candidate of the key (p1, p2)",
        ),
        (
            lambda: MetricsStore(os.devnull).save(replace(KEY, remote=None), ALL),
            "'p1' is no candidate of the key (there are none)",
        ),
    ],
)
def test_bad_input_is_named(make, message):
    with pytest.raises(ConfigError) as raised:
        make()
    assert message in str(raised.value)
