"""Test the limits of a worker: exceeding one is an error of its job alone."""

import errno
import os
import resource

import psutil
import pytest
import torch

from tests.pipeline.making import encoded, pixels
from tests.server.enclosed import SMALL, give_back, inner, large, payload, status, worker
from upriver.errors import Overloaded
from upriver.pipeline.formats import image
from upriver.server.execution.worker_main import _as_ours
from upriver.server.sandbox.bubblewrap import Enclosure
from upriver.server.sandbox.environment import worker_environment
from upriver.server.sandbox.rlimits import ALLOCATOR, MAX_FILES, OVERHEAD_BYTES, allowed_bytes, limits

MIB = 1 << 20
SIDE = 4000
"""Side of an image that needs 64 MB as Pillow decodes it, and 48 MB more as a tensor."""


def test_every_byte_that_may_be_admitted_may_be_taken():
    assert allowed_bytes(0) == OVERHEAD_BYTES
    for nbytes in (1, MIB, 10 * MIB, 300 << 30):
        assert allowed_bytes(nbytes) >= nbytes + OVERHEAD_BYTES


def test_a_device_with_memory_of_its_own_sets_no_limit_on_the_machines():
    on_cpu = limits(MIB, device="cpu")
    assert on_cpu["RLIMIT_DATA"] == allowed_bytes(MIB)
    assert on_cpu["RLIMIT_FSIZE"] == 0
    assert limits(MIB, device="cuda:0") == {"RLIMIT_NOFILE": MAX_FILES}
    assert "RLIMIT_DATA" not in limits(None, device="cpu")
    assert all(hasattr(resource, name) for name in on_cpu)


def test_an_operators_own_allocator_settings_win():
    assert ALLOCATOR.items() <= worker_environment({}, threads=1).items()
    own = {name: "8" for name in ALLOCATOR}
    assert own.items() <= worker_environment(own, threads=1).items()


def test_a_worker_with_its_own_files_has_its_own_home():
    seen = worker_environment({"HOME": "/home/me", "TMPDIR": "/var/me", "SECRET": "x"}, threads=1, boxed=True)
    assert (seen["HOME"], seen["TMPDIR"], "SECRET" in seen) == ("/tmp", "/tmp", False)


@pytest.mark.parametrize(
    ("error", "want"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"), True),
        (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), True),
        (OSError(errno.EINVAL, os.strerror(errno.EINVAL)), False),
        (RuntimeError("shapes do not match"), False),
    ],
)
def test_want_of_memory_is_told_as_what_may_be_otherwise_elsewhere(error, want):
    assert isinstance(_as_ours(error), Overloaded) is want
    wrapped = ValueError("in a stage")
    wrapped.__cause__ = error
    assert isinstance(_as_ours(wrapped), Overloaded) is want


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("can't allocate memory: you tried"),
        OSError("out of memory error when reading image file"),
    ],
)
def test_an_image_that_finds_no_memory_is_not_a_bad_one(monkeypatch, error):
    """Check that the sample is not treated as bad: it could be skipped then, and nobody would notice."""

    def refuse(*_, **__):
        raise error

    monkeypatch.setattr(image, "to_tensor", refuse)
    with pytest.raises(MemoryError):
        image.decode(encoded(pixels(8, 8)), max_pixels=64, orient=False)


@pytest.mark.slow
def test_the_limits_hold_and_a_worker_works_under_them():
    with worker(Enclosure(memory_bytes=MIB)) as (handle, _):
        pid = inner(handle.pid)
        found = {name: resource.prlimit(pid, getattr(resource, name)) for name in limits(0, device="cpu")}
        assert found["RLIMIT_DATA"] == (allowed_bytes(MIB),) * 2
        assert found["RLIMIT_FSIZE"] == (0, 0)
        assert max(found["RLIMIT_NOFILE"]) <= MAX_FILES
        for name in ("RLIMIT_NPROC", "RLIMIT_AS", "RLIMIT_CPU"):
            number = getattr(resource, name)
            assert resource.prlimit(pid, number) == resource.getrlimit(number)
        assert give_back(handle) == SMALL
        assert payload(handle.run(large(1000)))


@pytest.mark.full
@pytest.mark.slow
def test_memory_that_is_not_known_is_not_limited():
    with worker() as (handle, _):
        found = resource.prlimit(inner(handle.pid), resource.RLIMIT_DATA)
        assert found == resource.getrlimit(resource.RLIMIT_DATA)


@pytest.mark.full
@pytest.mark.slow
def test_a_job_that_takes_too_much_fails_and_the_worker_goes_on():
    with worker(Enclosure(memory_bytes=MIB)) as (handle, _):
        pid = inner(handle.pid)
        before = payload(handle.run(large(200)))
        taken, hard = int(status(pid, "VmData").split()[0]) << 10, allowed_bytes(MIB)
        resource.prlimit(pid, resource.RLIMIT_DATA, (taken + 8 * MIB, hard))
        with pytest.raises(Overloaded, match="ran out of memory"):
            handle.run(large(SIDE))
        assert payload(handle.run(large(200))) == before
        resource.prlimit(pid, resource.RLIMIT_DATA, (hard, hard))
        assert payload(handle.run(large(SIDE)))
        assert inner(handle.pid) == pid


@pytest.mark.slow
@pytest.mark.full
def test_what_a_job_took_goes_back_to_the_system():
    """Use tensors of a few MiB: a process tends to keep these, and never keeps larger ones."""

    def held(handle):
        return psutil.Process(inner(handle.pid)).memory_full_info().uss

    with worker() as (handle, _):
        handle.run(large(200))
        before = held(handle)
        for side in (1300, 1400, 1700, 2000, SIDE) * 2:
            handle.run(large(side))
        assert held(handle) - before < 24 * MIB


@pytest.mark.slow
@pytest.mark.full
def test_a_worker_leaves_no_core_file_and_goes_first_when_memory_runs_out():
    with worker() as (handle, _):
        with open(f"/proc/{inner(handle.pid)}/oom_score_adj", encoding="ascii") as file:
            assert int(file.read()) >= 500
        assert resource.prlimit(inner(handle.pid), resource.RLIMIT_CORE) == (0, 0)
