"""Check the loader against servers that are killed, stopped, restarted: real processes, HTTP, files."""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.pipeline.making import samples, shard, write
from tests.server.running import free_port
from upriver.control.delivery_table import PrefetchWindow
from upriver.control.server_choice import Health
from upriver.engine.engine import Engine
from upriver.errors import BadSample, NotAuthorized, ObjectChanged
from upriver.finetune.prefetch.fetch_threads import LOCAL, RemoteFetch
from upriver.finetune.prefetch.local_source import LocalSource
from upriver.finetune.prefetch.prefetcher import Prefetcher
from upriver.pipeline import CenterCrop, Dataset, Decode, Normalize, RandomHorizontalFlip, Resize, index
from upriver.protocol import DatasetRef, RunRequest
from upriver.rpc.client import ServerClient
from upriver.rpc.link_meter import LinkMeter
from upriver.rpc.local_server import EmbeddedServer
from upriver.rpc.server_pool import ServerPool
from upriver.store import Store
from upriver.types import MicroBatch

pytestmark = pytest.mark.slow

MICRO_BATCH = 4
STAGES = (
    Decode(),
    Resize(size=20),
    CenterCrop(size=16),
    RandomHorizontalFlip(),
    Normalize(mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25)),
)


class Job:
    """A dataset in a file store, and everything needed to load an epoch."""

    on_bad_sample = "fail"

    def __init__(self, root: Path, files: dict[str, bytes]) -> None:
        self.store = Store.open(write(root, files))
        self.dataset = index(self.store, "data", stages=STAGES)
        self.dataset.publish()
        order = torch.randperm(len(self.dataset), generator=torch.Generator().manual_seed(5)).tolist()
        self.micro_batches = [tuple(order[i : i + MICRO_BATCH]) for i in range(0, len(order), MICRO_BATCH)]

    def local(self, dataset: Dataset | None = None) -> LocalSource:
        return LocalSource(
            dataset=dataset or self.dataset,
            engine=Engine(chain=self.dataset.chain, program=None, micro_batch=MICRO_BATCH),
            seed=3,
            epoch=1,
            on_bad_sample=self.on_bad_sample,
        )

    def request(self, indices, cut: int | None = None, *, stop: int = 0) -> RunRequest:
        return RunRequest(
            micro_batches=tuple(self.micro_batches[i] for i in indices),
            start=self.dataset.chain.start,
            stop=stop,
            micro_batch=MICRO_BATCH,
            dataset=DatasetRef(store="default", digest=self.dataset.digest),
            seed=3,
            epoch=1,
            on_bad_sample=self.on_bad_sample,
        )

    def loader(
        self, pool: ServerPool, sources: list[str], *, window: int = 4, per_request: int = 2
    ) -> Prefetcher:
        remote = RemoteFetch(pool=pool, make_request=self.request, connections=2, per_request=per_request)
        return Prefetcher(
            self.micro_batches,
            local=self.local(),
            remote=remote,
            window=PrefetchWindow(micro_batches=window),
            on_timings=lambda index, source, batch, timings: sources.append(source),
        )

    def serve(self, **options: object) -> EmbeddedServer:
        return EmbeddedServer.start({"default": self.store.uri}, threads=1, **options)

    def check(self, got: list[MicroBatch]) -> None:
        """Check the whole epoch: in order, and equal to the plain path bit for bit."""
        local = self.local()
        assert [batch.ids for batch in got] == self.micro_batches
        for batch in got:
            wanted, _ = local(batch.ids)
            assert batch.position == wanted.position and batch.skipped == wanted.skipped
            for ours, theirs in zip(wanted.tensors, batch.tensors, strict=True):
                assert torch.equal(ours, theirs) and ours.stride() == theirs.stride()


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Job:
    root = tmp_path_factory.mktemp("store")
    files = {f"data/{i}.tar": shard(samples(40, first=40 * i)) for i in range(3)}
    return Job(root, files)


@pytest.fixture(scope="module")
def server(job) -> Iterator[EmbeddedServer]:
    with job.serve() as running:
        yield running


@contextlib.contextmanager
def pool_of(*urls: str, **options: object) -> Iterator[ServerPool]:
    with ServerPool([ServerClient(url) for url in urls], **options) as pool:
        until(lambda: all(status.health is Health.UP for status in pool.status()))
        yield pool


def until(condition: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


# ------------------------------------------------------------------------------------------ all well


@pytest.mark.full
def test_servers_give_the_bits_of_the_plain_way(job, server):
    sources: list[str] = []
    with pool_of(server.url) as pool, job.loader(pool, sources, window=16) as loader:
        job.check(list(loader))
    assert set(sources) == {server.url}
    assert loader.report.samples == {server.url: len(job.dataset)}
    assert loader.report.retried == 0


@pytest.mark.parametrize("stop", [-4, -1])
def test_cuts_among_the_input_stages(job, server, stop):
    engine = Engine(chain=job.dataset.chain, program=None, micro_batch=MICRO_BATCH)
    with ServerClient(server.url) as client:
        answers = list(client.run(job.request(range(3), stop=stop)))
    for batch, timings in answers:
        assert batch.position == stop
        assert set(timings.phases) >= {"read", "input"}
        names = [ref.object for ref in job.dataset.locate(batch.ids)]
        done = engine.resume(batch, object_names=names, stop=0, seed=3, epoch=1)
        assert torch.equal(done.tensors[0], job.local()(batch.ids)[0].tensors[0])


def test_bytes_are_counted_for_both_ways(job, server):
    meter = LinkMeter()
    with ServerClient(server.url, meter=meter) as client:
        tensors = sum(batch.tensors[0].nbytes for batch, _ in client.run(job.request(range(3))))
    answered = meter.bytes_by_kind["answers"]
    assert tensors < answered < tensors + 3 * 4096
    direct = job.dataset.with_store(job.store.observed_by(meter))
    job.local(direct)(job.micro_batches[0])
    stored = sum(ref.stop - ref.start for ref in job.dataset.locate(job.micro_batches[0]))
    assert meter.bytes_by_kind["direct"] >= stored
    assert meter.bytes_by_kind["answers"] == answered


# ------------------------------------------------------------------------------------ kill and restart


@pytest.mark.full
def test_only_server_is_killed_and_restarted_in_mid_epoch(job):
    sources: list[str] = []
    got: list[MicroBatch] = []
    with contextlib.ExitStack() as stack:
        port = free_port()
        first = stack.enter_context(job.serve(port=port))
        pool = stack.enter_context(pool_of(first.url))
        loader = stack.enter_context(job.loader(pool, sources))
        for batch in loader:
            got.append(batch)
            if len(got) == 5:
                os.kill(first.pid, signal.SIGKILL)
            if len(got) == 15:
                stack.enter_context(job.serve(port=port))
                until(lambda: pool.usable)
    job.check(got)
    assert sources[:5] == [first.url] * 5
    assert sources[10] == LOCAL, "the epoch went on with no server"
    assert sources[-1] == first.url, "and used it again once it was back"
    report = loader.report
    assert sum(report.samples.values()) == len(job.dataset)
    assert report.samples[LOCAL] >= 3 * MICRO_BATCH


@pytest.mark.full
def test_one_of_two_servers_is_killed(job, server):
    sources: list[str] = []
    got: list[MicroBatch] = []
    with (
        job.serve() as victim,
        pool_of(server.url, victim.url) as pool,
        job.loader(pool, sources) as loader,
    ):
        for batch in loader:
            got.append(batch)
            if len(got) == 8:
                os.kill(victim.pid, signal.SIGKILL)
    job.check(got)
    assert set(sources[:8]) == {server.url, victim.url}
    assert set(sources[-12:]) == {server.url}
    assert LOCAL not in sources


@pytest.mark.full
def test_a_stopped_server_is_left_and_used_again_when_it_goes_on(job, server):
    sources: list[str] = []
    got: list[MicroBatch] = []
    with (
        job.serve() as stuck,
        pool_of(server.url, stuck.url, quiet_s=0.3) as pool,
        job.loader(pool, sources) as loader,
    ):
        try:
            for batch in loader:
                got.append(batch)
                if len(got) == 6:
                    os.kill(stuck.pid, signal.SIGSTOP)
                if len(got) == 18:
                    until(lambda: pool.status()[1].health is Health.DOWN)
                    os.kill(stuck.pid, signal.SIGCONT)
                    until(lambda: pool.status()[1].health is Health.UP)
        finally:
            os.kill(stuck.pid, signal.SIGCONT)
    job.check(got)
    assert stuck.url in sources[:6]
    assert stuck.url not in sources[10:18]
    assert stuck.url in sources[18:]


# --------------------------------------------------------------------------------------------- errors


@pytest.mark.full
def test_bad_samples_fail_in_their_place_or_are_skipped(tmp_path):
    members = samples(24)
    members[2 * 9 + 1] = ("000009.jpg", b"no image")
    strict = Job(tmp_path, {"data/0.tar": shard(members)})
    lenient = copy.copy(strict)
    lenient.on_bad_sample = "skip"
    place = next(i for i, ids in enumerate(strict.micro_batches) if 9 in ids)
    with strict.serve() as server, pool_of(server.url) as pool:
        got = []
        with pytest.raises(BadSample, match=r"sample 9 in object 'data/0\.tar'") as caught:
            for batch in strict.loader(pool, []):
                got.append(batch)
        assert caught.value.sample == 9
        assert [batch.ids for batch in got] == strict.micro_batches[:place]

        sources: list[str] = []
        with lenient.loader(pool, sources) as loader:
            lenient.check(list(loader))
        assert loader.report.skipped == (9,)
        assert set(sources) == {server.url}

        (tmp_path / "data/0.tar").write_bytes(shard(samples(24, first=1)))
        with pytest.raises(ObjectChanged, match=r"data/0\.tar"), lenient.loader(pool, []) as loader:
            list(loader)
        assert pool.usable


# -------------------------------------------------------------------------------------------- embedded


@pytest.mark.full
def test_token_cores_and_end_of_an_embedded_server(job):
    core = min(os.sched_getaffinity(0))
    before = os.sched_getaffinity(0)
    with job.serve(token="hush", cpu={core}) as server:
        assert os.sched_getaffinity(server.pid) == {core}
        assert os.sched_getaffinity(0) == before
        assert "hush" not in Path(f"/proc/{server.pid}/cmdline").read_text()
        with ServerClient(server.url) as stranger, pytest.raises(NotAuthorized):
            stranger.info()
        with ServerClient(server.url, token="hush") as client:
            assert client.info().stores == ("default",)
            assert client.probe(1000).num_bytes == 1000
    assert not server.running
    server.close()


def test_an_embedded_server_ends_with_its_parent_however_that_dies(job):
    script = (
        "import sys, time\n"
        "from upriver.rpc.local_server import EmbeddedServer\n"
        "server = EmbeddedServer.start({'default': sys.argv[1]}, threads=1)\n"
        "print(server.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script, job.store.uri], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    with parent.stdout:
        pid = int(parent.stdout.readline())
        assert _lives(pid)
        parent.kill()
        parent.wait()
        until(lambda: not _lives(pid))


def _lives(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False
