import asyncio
import threading
import time
import types

import pytest

from tests.store.s3_server import S3Server
from upriver.errors import ConfigError, ObjectNotFound, StoreError
from upriver.rpc.link_meter import PIECE_BYTES, LinkMeter
from upriver.store import Store


class Scripted:
    """A meter on a clock of its own, which sleeping advances: each second carries a scripted amount."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        clock = types.SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep)
        monkeypatch.setattr("upriver.rpc.link_meter.time", clock)
        self.meter = LinkMeter()

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def carry(self, bytes_per_s: float, seconds: float = 1.0) -> float:
        """Carry one transfer, in pieces of 50 ms."""
        with self.meter.transfer():
            for _ in range(round(seconds * 20)):
                self.now += 0.05
                self.meter.account(round(bytes_per_s / 20), "direct")
        observed = self.meter.observed_bandwidth()
        assert observed is not None
        return observed


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Scripted:
    return Scripted(monkeypatch)


def test_counts_by_kind():
    meter = LinkMeter()
    meter.account(3 * PIECE_BYTES + 1, "answers")
    meter.account(7, "direct")
    assert meter.bytes_by_kind == {"answers": 3 * PIECE_BYTES + 1, "direct": 7}
    assert meter.total_bytes == 3 * PIECE_BYTES + 8


def test_counts_from_many_threads():
    meter = LinkMeter()
    threads = [
        threading.Thread(target=lambda: [meter.account(3, "direct") for _ in range(1000)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert meter.total_bytes == 4 * 1000 * 3


def test_rate_is_one_bucket_for_all_streams():
    rate = 2_000_000
    meter = LinkMeter(rate)
    per_stream = 200_000
    start = time.monotonic()
    threads = [
        threading.Thread(target=meter.account, args=(per_stream, kind)) for kind in ("answers", "direct")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # A lower bound holds on a machine of any speed; only the burst may pass unpaced.
    assert time.monotonic() - start >= (2 * per_stream - PIECE_BYTES) / rate


def test_streams_share_the_link(monkeypatch):
    """A short transfer does not wait for the whole of a long one that began before it."""
    throttled, ended, slept = threading.Event(), threading.Event(), []

    def sleep(seconds: float) -> None:
        if threading.current_thread() is long:
            throttled.set()
            assert ended.wait(60)
        else:
            slept.append(seconds)

    clock = types.SimpleNamespace(monotonic=lambda: 1000.0, sleep=sleep)
    monkeypatch.setattr("upriver.rpc.link_meter.time", clock)
    meter = LinkMeter(1_000_000, burst_bytes=0)
    long = threading.Thread(target=meter.account, args=(20 * PIECE_BYTES, "direct"))
    long.start()
    assert throttled.wait(60)
    meter.account(PIECE_BYTES, "answers")
    assert meter.bytes_by_kind == {"answers": PIECE_BYTES, "direct": 0}
    ended.set()
    long.join()
    assert slept == [pytest.approx(2 * PIECE_BYTES / 1_000_000)]
    assert meter.bytes_by_kind == {"answers": PIECE_BYTES, "direct": 20 * PIECE_BYTES}


def test_idle_link_saves_up_no_more_than_its_burst(link):
    meter = LinkMeter(1_000_000, burst_bytes=1000)
    link.now += 0.05  # 50,000 bytes' worth
    start = link.now
    meter.account(31_000, "direct")
    assert link.now - start == pytest.approx(0.03)


def test_observed_bandwidth_counts_busy_time_only(link):
    rate = 4_000_000.0
    meter = LinkMeter(rate, burst_bytes=0)
    assert meter.observed_bandwidth() is None
    for _ in range(3):
        with meter.transfer():
            meter.account(200_000, "answers")
        link.now += 0.1  # the server computes: the link is not the cause
    assert meter.observed_bandwidth() == pytest.approx(rate)


def test_quiet_begins_when_the_last_transfer_ends(link):
    with link.meter.transfer():
        link.now += 50
        assert link.meter.quiet_s == 0, "a large object is on its way"
    link.now += 3
    assert link.meter.quiet_s == pytest.approx(3)


@pytest.mark.parametrize("rate", [0, -1, float("nan"), float("inf")])
def test_bad_rate(rate):
    with pytest.raises(ConfigError, match="rate_bytes_per_s"):
        LinkMeter(rate)


def test_bad_account():
    with pytest.raises(ConfigError, match="answers"):
        LinkMeter().account(1, "sideways")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="-1"):
        LinkMeter().account(-1, "direct")


def test_metered_store(tmp_path):
    store = Store.open(tmp_path.as_uri(), name="photos")
    store.put("a/b.bin", b"0123456789")
    meter = LinkMeter()
    metered = store.observed_by(meter)
    assert (metered.name, metered.uri) == ("photos", store.uri)
    assert metered.get("a/b.bin") == b"0123456789"
    assert metered.get_range("a/b.bin", 2, 5) == b"234"
    room = bytearray(6)
    metered.read_into("a/b.bin", 1, memoryview(room))
    assert room == b"123456"
    assert metered.head("a/b.bin").size == 10
    assert [info.path for info in metered.list()] == ["a/b.bin"]
    assert meter.bytes_by_kind == {"answers": 0, "direct": 19}
    assert asyncio.run(metered.get_async("a/b.bin")) == b"0123456789"
    assert asyncio.run(metered.get_range_async("a/b.bin", 0, 4)) == b"0123"
    asyncio.run(metered.read_into_async("a/b.bin", 4, memoryview(room)))
    assert room == b"456789"
    assert meter.total_bytes == 39
    with pytest.raises(ObjectNotFound, match="missing"):
        metered.get("missing")
    assert meter.total_bytes == 39


def test_bytes_over_a_network_count_as_they_arrive():
    body = bytes(range(256)) * 16384
    with S3Server() as server:
        server.objects["bucket/big"] = body
        options = {"endpoint": server.url, "region": "none", "anonymous": "true"}
        meter, counted = LinkMeter(), []
        meter.account = lambda num_bytes, kind: counted.append(num_bytes)
        far = Store.open("s3://bucket", options=options).observed_by(meter)
        told = []
        assert far.get("big", on_answer=told.append) == body
        assert told == [far.head("big")]
        assert sum(counted) == len(body) and len(counted) > 4
        assert far.get_range("big", 100, 300_100) == body[100:300_100]
        assert far.get_range("big", 5, 5) == b""
        room = bytearray(300_000)
        far.read_into("big", 100, memoryview(room))
        assert room == body[100:300_100]
        asyncio.run(far.read_into_async("big", 200, memoryview(room)))
        assert room == body[200:300_200]
        assert sum(counted) == len(body) + 900_000
        with pytest.raises(ObjectNotFound, match="missing"):
            far.get("missing")
        with pytest.raises(StoreError, match="ended early"):
            far.get_range("big", 0, len(body) + 1)
        with pytest.raises(ConfigError, match="byte range"):
            far.get_range("big", 3, 2)
    assert meter.quiet_s < 60


def test_as_many_reads_fill_a_link_as_come_while_a_store_looks(link):
    assert link.meter.filled_by(100_000) is None, "nothing has crossed"
    link.carry(1e6, seconds=2)
    assert link.meter.filled_by(100_000) is None, "no store has been asked"
    for waited_s in (0.9, 0.25, 0.5):  # on a full link, heads wait for other bytes, too
        link.meter.head_came(waited_s)
    assert link.meter.filled_by(100_000) == 2 + 2
    assert link.meter.filled_by(1e6) == 2
    assert link.meter.filled_by(0) > 1000


def test_a_store_over_a_network_says_how_long_it_looked():
    with S3Server() as server:
        server.objects["bucket/some"] = bytes(300_000)
        options = {"endpoint": server.url, "region": "none", "anonymous": "true"}
        meter, heads = LinkMeter(), []
        meter.head_came = heads.append
        far = Store.open("s3://bucket", options=options).observed_by(meter)
        far.get("some")
        far.get_range("some", 0, 10)
        far.read_into("some", 0, memoryview(bytearray(10)))
        asyncio.run(far.read_into_async("some", 0, memoryview(bytearray(10))))
        with pytest.raises(ObjectNotFound, match="missing"):
            far.get("missing")
    assert len(heads) == 4 and all(0 < seconds < 60 for seconds in heads)


def test_throttled_async_reads_do_not_block_the_loop(tmp_path, monkeypatch):
    """The link's clock advances only after the loop has done other work."""
    store = Store.open(tmp_path.as_uri())
    store.put("x", bytes(200_000))
    throttled, ticked = threading.Event(), threading.Event()

    def sleep(seconds: float) -> None:
        throttled.set()
        assert ticked.wait(60)
        time.sleep(seconds)

    clock = types.SimpleNamespace(monotonic=time.monotonic, sleep=sleep)
    monkeypatch.setattr("upriver.rpc.link_meter.time", clock)
    metered = store.observed_by(LinkMeter(1_000_000, burst_bytes=0))

    async def main() -> list[str]:
        order: list[str] = []

        async def read() -> None:
            await metered.get_async("x")
            order.append("read")

        async def tick() -> None:
            while not throttled.is_set():
                await asyncio.sleep(0.001)
            order.append("tick")
            ticked.set()

        await asyncio.gather(read(), tick())
        return order

    assert asyncio.run(main()) == ["tick", "read"]
