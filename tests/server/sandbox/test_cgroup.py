"""Test control groups of workers: where they can be made, what they limit and report, and their removal."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.enclosed import SMALL, give_back, inner, large, worker
from tests.server.running import wait_for
from upriver.server.execution.worker_process import BROKE_OFF
from upriver.server.ipc.channel import ChannelClosed
from upriver.server.sandbox import cgroup as module
from upriver.server.sandbox.bubblewrap import Enclosure
from upriver.server.sandbox.cgroup import PREFIX, ControlGroups

MIB = 1 << 20


@pytest.fixture
def groups():
    found = ControlGroups.find()
    if found is None:
        pytest.skip("this process may make no control groups with a memory limit")
    yield found
    found.close()


def folder_of(groups):
    """Return the folder in which control groups are made."""
    group = groups.make(64 * MIB)
    path = group._path
    groups.remove(group)
    return path.parent


# ------------------------------------------------------------------------- available hierarchies


def tree(root, *files):
    """Make a hierarchy of plain files from a map of path to content."""
    for name, content in files:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


def place(root, membership):
    (root / "membership").write_text(membership)
    return module._place(root, root / "membership")


V1 = ("memory/a/b/memory.use_hierarchy", "1\n")
V2_ROOT = ("cgroup.controllers", "cpu memory\n")


def test_version_1_is_divided_where_this_process_is(tmp_path):
    root = tree(tmp_path, V1)
    assert place(root, "9:cpu:/x\n4:memory:/a/b\n0::/\n") == (root / "memory/a/b", module._V1)
    assert place(root, "4:cpuset,memory:/a/b\n") == (root / "memory/a/b", module._V1)


def test_version_1_without_hierarchy_is_let_be(tmp_path):
    """Check that an unmounted hierarchy is left alone: its groups would not count for the group around it."""
    root = tree(tmp_path, ("memory/a/b/memory.use_hierarchy", "0\n"))
    assert place(root, "4:memory:/a/b\n") is None


def test_version_2_needs_a_group_that_may_be_divided(tmp_path):
    ours = "system.slice/ours"
    root = tree(
        tmp_path, V2_ROOT, (f"{ours}/cgroup.type", "domain\n"), (f"{ours}/cgroup.subtree_control", "memory\n")
    )
    assert place(root, f"0::/{ours}\n") is None


def test_version_2_divides_the_root_of_all(tmp_path):
    root = tree(tmp_path, V2_ROOT, ("cgroup.subtree_control", "cpu memory\n"))
    assert place(root, "0::/\n") == (root, module._V2)
    (root / "cgroup.subtree_control").write_text("cpu\n")
    assert place(root, "0::/\n") is None


def delegate(monkeypatch, folder):
    """Make a folder look as if systemd had delegated it."""

    def getxattr(path, name, **_):
        if Path(path) == folder and name == "user.delegate":
            return b"1"
        raise OSError("none")

    monkeypatch.setattr(os, "getxattr", getxattr)


def test_version_2_divides_what_was_delegated(tmp_path, monkeypatch):
    root = tree(tmp_path, V2_ROOT, ("ours/cgroup.subtree_control", "memory\n"))
    delegate(monkeypatch, root / "ours")
    assert place(root, "0::/ours\n") == (root / "ours", module._V2)
    (root / "ours/front").mkdir()
    assert place(root, "0::/ours/front\n") == (root / "ours", module._V2)
    (root / "ours/front/deeper").mkdir()
    assert place(root, "0::/ours/front/deeper\n") is None


def test_version_2_steps_aside_only_from_a_group_of_its_own(tmp_path, monkeypatch):
    root = tree(
        tmp_path,
        V2_ROOT,
        ("ours/cgroup.controllers", "memory\n"),
        ("ours/cgroup.subtree_control", ""),
        ("ours/cgroup.procs", f"{os.getpid()}\n1\n"),
    )
    delegate(monkeypatch, root / "ours")
    assert place(root, "0::/ours\n") is None
    assert sorted(path.name for path in (root / "ours").iterdir() if path.is_dir()) == []
    (root / "ours/cgroup.procs").write_text(f"{os.getpid()}\n")
    assert place(root, "0::/ours\n") == (root / "ours", module._V2)
    (aside,) = (path for path in (root / "ours").iterdir() if path.is_dir())
    assert re.fullmatch(rf"{PREFIX}-{os.getpid()}-\d+-front", aside.name)
    assert (aside / "cgroup.procs").read_text() == str(os.getpid())
    assert (root / "ours/cgroup.subtree_control").read_text() == "+memory"


@pytest.mark.parametrize("membership", ["", "x", "0::/none\n", "4:memory\n", "1:cpu:/\n", "\n\n"])
def test_where_there_are_none_there_are_none(tmp_path, membership):
    assert place(tmp_path, membership) is None


def test_a_path_that_leads_out_is_the_mount_itself(tmp_path):
    root = tree(tmp_path, ("memory/memory.use_hierarchy", "1\n"), ("memory.use_hierarchy", "1\n"))
    assert place(root, "4:memory:/../../x\n") == (root / "memory", module._V1)


# --------------------------------------------------------------------------------------- effects


def test_a_group_is_made_and_goes(groups):
    group = groups.make(64 * MIB)
    assert group.nbytes == 64 * MIB
    assert not group.oom_killed()
    path = group._path
    assert path.is_dir()
    assert str(64 * MIB) in {
        (path / name).read_text().strip()
        for name in ("memory.max", "memory.limit_in_bytes")
        if (path / name).exists()
    }
    groups.remove(group)
    assert not path.exists()
    assert group.remove()  # a second removal is no error


def enter(fd, *, then):
    """Run a process in a group; ``then`` is what the process does there."""
    code = f"import os, sys\nos.write({fd}, b'0')\nprint('in', flush=True)\n{then}"
    return subprocess.Popen(
        [sys.executable, "-S", "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[fd],
    )


def test_a_group_with_a_process_stays_until_that_is_gone(groups):
    group = groups.make(256 * MIB)
    fd = group.open()
    with enter(fd, then="sys.stdin.read()") as process:
        os.close(fd)
        assert process.stdout.readline() == b"in\n"
        assert process.pid in map(int, (group._path / "cgroup.procs").read_text().split())
        groups.remove(group)
        assert group._path.exists()
        process.stdin.close()
    wait_for(lambda: not (groups.close() or group._path.exists()))


def test_the_kernel_ends_what_takes_too_much_and_says_so(groups):
    group = groups.make(48 * MIB)
    fd = group.open()
    with enter(fd, then=f"kept = bytearray({128 * MIB})") as process:
        os.close(fd)
        assert process.stdout.read() == b"in\n"
    assert process.returncode == -9
    assert group.oom_killed()
    wait_for(group.remove)
    assert not group.oom_killed()  # the group no longer exists


def test_groups_of_dead_fronts_are_removed_and_those_of_living_ones_are_not(groups):
    folder = folder_of(groups)
    with subprocess.Popen([sys.executable, "-S", "-c", ""]) as gone:
        pass
    own, start = os.getpid(), module._start_of(os.getpid())
    dead = [f"{PREFIX}-{gone.pid}-{start}-1", f"{PREFIX}-{own}-{start - 1}-1", f"{PREFIX}-{gone.pid}-1-front"]
    living = [f"{PREFIX}-{own}-{start}-999", f"{PREFIX}-of-somebody-else"]
    try:
        for name in dead + living:
            (folder / name).mkdir()
        assert ControlGroups.find() is not None
        assert [name for name in dead + living if (folder / name).exists()] == living
    finally:
        for name in dead + living:
            if (folder / name).exists():
                (folder / name).rmdir()


# -------------------------------------------------------------------------------------- a worker


def held(path):
    """Return the memory that a group holds and cannot drop, for either cgroup version."""
    usage = next(
        path / name for name in ("memory.current", "memory.usage_in_bytes") if (path / name).exists()
    )
    stat = dict(line.split() for line in (path / "memory.stat").read_text().splitlines())
    return int(usage.read_text()) - int(stat["inactive_file"]) - int(stat["active_file"])


def limit(path, nbytes):
    """Set another limit on a group."""
    for name in ("memory.max", "memory.limit_in_bytes", "memory.memsw.limit_in_bytes"):
        if (path / name).exists():
            (path / name).write_text(str(nbytes))


@pytest.mark.full
@pytest.mark.slow
def test_a_worker_is_in_a_group_of_its_own_as_long_as_it_lives(groups):
    with worker(Enclosure(memory_bytes=MIB, groups=groups)) as (handle, _):
        path = handle._group._path
        assert str(inner(handle.pid)) in (path / "cgroup.procs").read_text().split()
        assert str(os.getpid()) not in (path / "cgroup.procs").read_text().split()
        assert give_back(handle) == SMALL
    wait_for(lambda: not (groups.close() or path.exists()))


def ended(handle):
    """Return how an exiting worker ended."""
    wait_for(lambda: not handle.ending().startswith(BROKE_OFF))
    return handle.ending()


@pytest.mark.slow
def test_a_worker_that_runs_out_of_memory_is_told_from_one_that_crashed(groups):
    with worker(Enclosure(memory_bytes=MIB, groups=groups)) as (handle, _):
        path = handle._group._path
        limit(path, held(path) + 32 * MIB)
        with pytest.raises(ChannelClosed):
            handle.run(large(6000))
        ending = ended(handle)
        assert re.fullmatch(r"was ended by SIGKILL: it ran out of memory \(\d+ MiB allowed\)", ending)
        assert handle.out_of_memory
        assert handle.ending() == ending
    with worker(Enclosure(memory_bytes=MIB, groups=groups)) as (handle, _):
        os.kill(inner(handle.pid), 9)
        with pytest.raises(ChannelClosed):
            give_back(handle)
        assert ended(handle) == "was ended by SIGKILL"
        assert not handle.out_of_memory
