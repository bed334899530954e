"""Test the sandbox of workers: which mechanism is chosen, and what a sandboxed worker can see and do."""

import os
import signal
import sys
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.server.enclosed import SMALL, give_back, inner, large, payload, status, worker
from tests.server.http.test_limits import same
from tests.server.running import alive, run, running, wait_for
from upriver.errors import ConfigError
from upriver.server import Server, ServerConfig
from upriver.server.execution.worker_process import how_it_ended
from upriver.server.ipc.channel import ChannelClosed
from upriver.server.sandbox import bubblewrap as sandbox
from upriver.server.sandbox.bubblewrap import Enclosure, Sandbox, bubblewrap, choose, holds, outermost, probe
from upriver.server.sandbox.cgroup import ControlGroups

CUT_OFF = {"--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--die-with-parent"}


def after(options, name):
    """Return the values that follow the first occurrence of each option of that name."""
    return [options[index + 1] for index, option in enumerate(options) if option == name]


# ---------------------------------------------------------------------------- the command line


def test_a_worker_is_shown_its_libraries_and_nothing_of_anybodys():
    command = bubblewrap("bwrap", ("--unshare-user",), device="cpu")
    shown = after(command, "--ro-bind-try")
    assert command[0] == "bwrap"
    assert command[-1] == "--"
    assert set(command) > CUT_OFF
    assert after(command, "--cap-drop") == ["ALL"]
    for needed in (sys.prefix, sys.base_prefix, os.path.dirname(sandbox.upriver.__file__), "/usr"):
        assert any(Path(needed).is_relative_to(path) for path in shown)
    for private in (
        Path.home(),
        "/tmp",
        "/var/tmp",
        "/etc/passwd",
        "/run",
        "/proc",
        "/dev",
        "/home",
        "/root",
    ):
        assert not any(Path(private).is_relative_to(path) for path in shown)
    assert "--dev-bind-try" not in command
    assert "--bind" not in command


def test_what_is_shown_may_lie_in_tmp_and_the_rest_is_closed_behind_it():
    command = bubblewrap("bwrap", (), device="cpu")
    last = max(index for index, option in enumerate(command) if option in ("--ro-bind-try", "--symlink"))
    assert command.index("--tmpfs") < command.index("--ro-bind-try")
    assert after(command, "--remount-ro") == ["/"]
    assert command.index("--remount-ro") > last


def test_an_accelerators_devices_are_there_where_it_is_used(tmp_path, monkeypatch):
    for name in ("nvidia0", "nvidiactl", "other"):
        (tmp_path / name).touch()
    monkeypatch.setattr(sandbox, "DEVICES", (str(tmp_path / "nvidia*"),))
    devices = [str(tmp_path / "nvidia0"), str(tmp_path / "nvidiactl")]
    assert after(bubblewrap("bwrap", (), device="cuda:0"), "--dev-bind-try") == devices
    assert after(bubblewrap("bwrap", (), device="cpu"), "--dev-bind-try") == []


def test_an_interpreter_that_lies_apart_is_shown_link_by_link(tmp_path, monkeypatch):
    real = os.path.realpath(sys.executable)
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to(real)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "a"))
    links = ["--symlink", "b", str(tmp_path / "a"), "--symlink", real, str(tmp_path / "b")]
    assert list(sandbox._executable([os.path.dirname(real)])) == links
    assert list(sandbox._executable([])) == [*links, "--ro-bind", real, real]
    assert list(sandbox._executable([str(tmp_path), os.path.dirname(real)])) == []


def test_links_in_a_circle_come_to_an_end(tmp_path, monkeypatch):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "a"))
    assert len(list(sandbox._executable([]))) == 3 * 40


def test_folders_that_show_more_than_modules(tmp_path):
    home = tmp_path / "home" / "me"
    (home / "env").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path)
    assert not holds(str(home / "env"), str(home))
    for path in (home, home.parent, tmp_path, tmp_path / "link", Path("/")):
        assert holds(str(path), str(home))
    assert not holds(str(tmp_path / "home" / "m"), str(home))


@given(
    st.lists(st.lists(st.sampled_from(["a", "b", "ab"]), min_size=1, max_size=3).map("/".join), max_size=8)
)
def test_of_folders_within_each_other_the_outermost_stay(names):
    paths = [f"/{name}" for name in names]
    found = outermost([*paths, "relative", ""])
    assert set(found) <= set(paths)
    for path in paths:
        assert sum(Path(path).is_relative_to(outer) for outer in found) == 1


# ---------------------------------------------------------------------- choice of the mechanism


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Put a program named bwrap first on the path: it runs its command, unless ``unless`` ends it first."""
    folder = tmp_path / "path"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def make(unless=""):
        path = folder / "bwrap"
        path.write_text(
            f'#!/bin/sh\n{unless}\nwhile [ "$1" != "--" ]; do shift; done\nshift\n"$@"\nexit $?\n'
        )
        path.chmod(0o755)
        return str(path)

    return make


REFUSES = "echo 'warning: something' >&2; echo 'bwrap: setting up uid map: Permission denied' >&2; exit 1"
TOO_OLD = 'case "$*" in *--disable-userns*) echo "bwrap: Unknown option --disable-userns" >&2; exit 1;; esac'


def test_bubblewrap_is_taken_where_it_works(fake):
    path = fake()
    for mode in ("auto", "bubblewrap"):
        found = choose(mode, device="cpu")
        assert (found.kind, found.command[0], found.warning) == ("bubblewrap", path, "")
        assert "--disable-userns" in found.command


def test_an_older_one_is_taken_as_it_is(fake):
    fake(TOO_OLD)
    found = choose("bubblewrap", device="cpu")
    assert found.kind == "bubblewrap"
    assert "--disable-userns" not in found.command
    assert "--unshare-user" in found.command


def test_where_it_does_not_work_the_operator_is_told_why(fake):
    fake(REFUSES)
    found = choose("auto", device="cpu")
    assert (found.kind, found.command) == ("none", ())
    assert "bwrap: setting up uid map: Permission denied" in found.warning
    with pytest.raises(ConfigError, match="bwrap: setting up uid map: Permission denied"):
        choose("bubblewrap", device="cpu")


def test_where_it_is_not_installed_the_operator_is_told_so(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "it is not installed" in choose("auto", device="cpu").warning
    with pytest.raises(ConfigError, match="it is not installed"):
        choose("bubblewrap", device="cpu")


def test_who_wants_none_gets_none_and_no_warning(fake):
    fake()
    assert choose("none", device="cpu") == Sandbox()
    assert choose("none", device="cpu").warning == ""


def test_a_box_without_what_workers_import_is_none(fake, monkeypatch):
    fake()
    monkeypatch.setattr(sandbox, "_NEEDED", ("json", "no_such_module"))
    assert "its Python finds no no_such_module there" in choose("auto", device="cpu").warning


def test_probing_tells_what_went_wrong(tmp_path, monkeypatch):
    assert probe(()) == ""
    assert probe(["/bin/false"]) == "it ended with exit code 1"
    assert probe([str(tmp_path / "none")]) == os.strerror(2)
    monkeypatch.setattr(sandbox, "PROBE_TIMEOUT_S", 0.1)
    assert "within 0.1 s" in probe(["/bin/sh", "-c", "sleep 60"])


def test_a_server_that_insists_on_bubblewrap_does_not_start_without(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="bubblewrap"):
        Server(ServerConfig(stores={"default": "memory://boxed"}, port=0, sandbox="bubblewrap"))


@pytest.mark.parametrize(
    ("code", "boxed", "said"),
    [
        (0, False, "ended with exit code 0"),
        (3, True, "ended with exit code 3"),
        (-9, False, "was ended by SIGKILL"),
        (-9, True, "was ended by SIGKILL"),
        (137, True, "was ended by SIGKILL"),
        (139, True, "was ended by SIGSEGV"),
        (137, False, "ended with exit code 137"),
        (128, True, "ended with exit code 128"),
        (255, True, "ended with exit code 255"),
        (-63, False, "was ended by signal 63"),
    ],
)
def test_how_a_worker_ended_is_told_through_bubblewrap(code, boxed, said):
    assert how_it_ended(code, boxed=boxed) == said


# -------------------------------------------------------------------------- a sandboxed worker


@pytest.mark.slow
def test_a_worker_has_no_rights_on_any_of_its_threads():
    with worker() as (handle, hello):
        assert hello.sandbox == "none"
        pid = inner(handle.pid)
        give_back(handle)
        for task in Path(f"/proc/{pid}/task").iterdir():
            thread = f"{pid}/task/{task.name}"
            for name in ("CapEff", "CapPrm", "CapInh", "CapAmb"):
                assert int(status(thread, name), 16) == 0
            assert status(thread, "NoNewPrivs") == "1"
        if os.geteuid() == 0:
            assert int(status(pid, "CapBnd"), 16) == 0


@pytest.mark.full
@pytest.mark.slow
def test_a_worker_behind_another_process_is_fed_and_its_end_is_told(fake):
    """Check that descriptors and the exit status pass through the process between."""
    fake()
    with worker(Enclosure(sandbox=choose("bubblewrap", device="cpu"))) as (handle, hello):
        assert (hello.sandbox, hello.network) == ("bubblewrap", False)
        pid = inner(handle.pid)
        assert pid != handle.pid
        assert give_back(handle) == SMALL
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ChannelClosed):
            give_back(handle)
        wait_for(lambda: handle.ending() != "broke off")
        assert handle.ending() == "was ended by SIGKILL"


@pytest.mark.slow
@pytest.mark.full
def test_a_server_behind_bubblewrap_answers_and_leaves_nothing(world, fake):
    path = fake()
    with running(world.store.uri, sandbox="bubblewrap") as server:
        (outer,) = server.wait_ready().workers()
        assert path in psutil.Process(outer).cmdline()
        pid = inner(outer)
        (got,) = run(server, world.request((0, 1, 2, 3)))
        same(got, world.here((0, 1, 2, 3), 0))
        assert server.stop() == 0
        wait_for(lambda: not alive(pid))


@pytest.fixture(scope="module")
def boxed():
    """Return a worker under bubblewrap itself, where bubblewrap is installed and works."""
    found = choose("auto", device="cpu")
    if found.kind != "bubblewrap":
        pytest.skip(found.warning)
    return Enclosure(sandbox=found, memory_bytes=1 << 30, groups=ControlGroups.find())


@pytest.mark.slow
def test_bubblewrap_shows_a_worker_nothing_of_this_machine(boxed, tmp_path):
    (tmp_path / "secret").write_text("x")
    with worker(boxed) as (handle, hello):
        assert (hello.sandbox, hello.network) == ("bubblewrap", False)
        pid = inner(handle.pid)
        for kind in ("net", "pid", "ipc", "uts", "mnt"):
            assert os.readlink(f"/proc/{pid}/ns/{kind}") != os.readlink(f"/proc/self/ns/{kind}")
        for path in (tmp_path / "secret", Path("/etc/passwd"), Path("/var"), Path("/run")):
            assert path.exists()
            assert not os.path.lexists(f"/proc/{pid}/root{path}")
        assert os.path.exists(f"/proc/{pid}/root{sys.prefix}")
        assert writable(pid) <= {"/tmp", "/dev", "/proc"}
        assert int(status(pid, "CapEff"), 16) == int(status(pid, "CapBnd"), 16) == 0


def writable(pid):
    """Return the paths that a process could write, except those in /proc and /dev."""
    found = set()
    for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines():
        place, options = line.split()[4:6]
        if "rw" in options.split(",") and not place.startswith(("/proc/", "/dev/")):
            found.add(place)
    return found


@pytest.mark.slow
def test_bubblewrap_changes_no_bit(boxed):
    answers, prints = [], []
    for enclosure in (boxed, Enclosure()):
        with worker(enclosure) as (handle, hello):
            answers.append(payload(handle.run(large(300))))
            prints.append(hello.fingerprint)
    assert answers[0] == answers[1]
    assert prints[0] == prints[1]


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("outside", [True, pytest.param(False, marks=pytest.mark.full)])
def test_bubblewrap_ends_with_its_worker_and_its_worker_with_it(boxed, outside):
    with worker(boxed) as (handle, _):
        pid = inner(handle.pid)
        os.kill(handle.pid if outside else pid, signal.SIGKILL)
        wait_for(lambda: not alive(pid) and not alive(handle.pid))
        wait_for(lambda: handle.ending() != "broke off")
        assert handle.ending() == "was ended by SIGKILL"


@pytest.mark.full
@pytest.mark.slow
def test_bubblewrap_does_not_keep_a_worker_out_of_its_group(boxed):
    if boxed.groups is None:
        pytest.skip("this process may make no control groups with a memory limit")
    with worker(boxed) as (handle, _):
        path = handle._group._path
        assert str(inner(handle.pid)) in (path / "cgroup.procs").read_text().split()
    wait_for(lambda: not (boxed.groups.close() or path.exists()))
