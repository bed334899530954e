"""Check that an index counts the links, special files and unreadable files that a folder lists."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.examples import some
from tests.pipeline.indexing.test_builder import JPEG, STAGES, stored
from tests.pipeline.making import shard, write
from tests.pipeline.test_left_out import left_out, sample
from upriver.cli import main
from upriver.errors import DatasetError, StoreError
from upriver.pipeline import index
from upriver.pipeline.manifest import MAX_SAMPLE_BYTES

CLASSES = {"cat/1.jpg": JPEG, "dog/1.jpg": JPEG}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return the root of a store of two classes, next to a folder outside the store."""
    write(tmp_path / "away", {"1.jpg": JPEG, "a.tar": shard(sample("x"))})
    write(tmp_path / "root", CLASSES)
    return tmp_path / "root"


def link(place: Path, target: str) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(target)


AWAY = {
    "a file": "ROOT/../away/1.jpg",
    "a folder": "ROOT/../away",
    "nowhere": "nothing",
    "nowhere away": "/nothing/1.jpg",
    "through a file": "ROOT/cat/1.jpg/x",
    "itself": "SELF",
}


def targets(place: Path, root: Path, *names: str) -> Iterator[str]:
    """Yield link targets that give no sample of the store."""
    for name in names or AWAY:
        yield AWAY[name].replace("ROOT", str(root)).replace("SELF", str(place))


@pytest.mark.parametrize("where", AWAY)
@pytest.mark.parametrize(
    "name", some(2, ["cat/2.jpg", "b.tar", "cat/2.tif", "cat/two", "cat/more/2.jpg", "2.jpg"])
)
def test_link_that_gives_no_sample_is_counted_and_named_with_its_target(
    root: Path, name: str, where: str
) -> None:
    (target,) = targets(root / name, root, where)
    link(root / name, target)
    report = left_out(root.as_uri())
    assert report.pop("link") == (1, (name,))
    # A link to a folder counts as a class folder where it lies among class folders.
    is_class = "/" not in name and where == "a folder"
    assert report == ({"empty_class": (1, (name,))} if is_class else {})
    dataset = index(root.as_uri(), stages=STAGES, on_left_out="report")
    assert dataset.names([0, 1]) == ["cat/1.jpg", "dog/1.jpg"]
    with pytest.raises(DatasetError, match=f"{name}' is a symbolic link to '{target}', which leads "):
        index(root.as_uri(), stages=STAGES)


@pytest.mark.parametrize("name", ["README", "cat/README.md", "cat/1.txt", ".new", "cat/.#1.jpg", "meta.bin"])
def test_link_that_no_sample_has_the_name_of_is_let_be(root: Path, name: str) -> None:
    for target in targets(root / name, root, "a file", "nowhere", "itself"):
        if not name.rpartition("/")[2].startswith(".#") or target == "nothing":
            link(root / name, target)
            assert index(root.as_uri(), stages=STAGES).left_out == {}
            (root / name).unlink()


@pytest.mark.parametrize("name", [".cache", ".new", "cat/.git", "__MACOSX"])
def test_hidden_link_to_a_folder_is_let_be(root: Path, name: str) -> None:
    link(root / name, str(root.parent / "away"))
    assert index(root.as_uri(), stages=STAGES).left_out == {}


def test_hidden_link_to_a_file_is_hidden(root: Path) -> None:
    link(root / "cat/.2.jpg", str(root.parent / "away/1.jpg"))
    assert left_out(root.as_uri()) == {"hidden": (1, ("cat/.2.jpg",))}


def test_class_behind_a_link_out_of_the_store_keeps_the_numbers_of_others(root: Path) -> None:
    link(root / "bird", str(root.parent / "away"))
    assert left_out(root.as_uri()) == {"empty_class": (1, ("bird",)), "link": (1, ("bird",))}
    dataset = index(root.as_uri(), stages=STAGES, on_left_out="report")
    assert (dataset.classes, dataset.targets.tolist()) == (("bird", "cat", "dog"), [1, 2])


def test_class_of_links_and_texts_stays_a_class(root: Path) -> None:
    write(root, {"cow/1.xml": b"a cow"})
    link(root / "cow/1.jpg", "nothing")
    assert left_out(root.as_uri()) == {"empty_class": (1, ("cow",)), "link": (1, ("cow/1.jpg",))}
    assert index(root.as_uri(), stages=STAGES, on_left_out="report").classes == ("cat", "cow", "dog")


def test_link_that_may_have_led_to_a_class_is_counted(root: Path) -> None:
    link(root / "bird", "/nothing/bird")
    assert left_out(root.as_uri()) == {"link": (1, ("bird",))}


def test_link_to_a_folder_above_is_no_class_and_no_error(root: Path) -> None:
    link(root / "train/up", "..")  # would be a class with everything above
    write(root, {"train/cat/1.jpg": JPEG})
    assert index(root.as_uri(), "train", stages=STAGES).classes == ("cat",)


def warned(caplog: pytest.LogCaptureFixture, root: Path, path: str = "", **options: Any) -> list[str]:
    """Return the warnings of an index."""
    caplog.clear()
    index(root.as_uri(), path, stages=STAGES, **options)
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize(
    ("place", "target", "said"),
    [
        ("dog/loop", "../cat", "'dog/loop' ('dog/loop/1.jpg' is 'cat/1.jpg')"),
        ("dog/2.jpg", "../cat/1.jpg", "'dog/2.jpg' ('dog/2.jpg' is 'cat/1.jpg')"),
        ("bird", "cat", "'bird' ('cat/1.jpg' is 'bird/1.jpg')"),
        ("puppy", "dog", "'puppy' ('puppy/1.jpg' is 'dog/1.jpg')"),
        ("dog/both/more", "../../cat", "'dog/both/more' ('dog/both/more/1.jpg' is 'cat/1.jpg')"),
    ],
)
def test_link_that_gives_a_sample_a_second_name_is_kept_and_warned_of(
    root: Path, caplog: pytest.LogCaptureFixture, place: str, target: str, said: str
) -> None:
    assert warned(caplog, root) == []
    link(root / place, target)
    [message] = warned(caplog, root)
    assert message.startswith(
        f"1 objects are indexed under a second name, through symbolic links: {said}; each is a separate"
    )
    assert len(index(root.as_uri(), stages=STAGES)) == 3


def test_links_that_give_samples_second_names_are_warned_of_in_one_line(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(7):
        link(root / f"dog/twin{number}.jpg", "../cat/1.jpg")
    [message] = warned(caplog, root)
    assert message.startswith("7 objects are indexed under") and message.count(" is 'cat/1.jpg'") == 5
    assert "('dog/twin4.jpg' is 'cat/1.jpg'); ...; each is" in message


def test_links_that_give_samples_their_only_name_are_not_warned_of(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    link(root / "train/dog", "../dog")
    link(root / "train/cat/1.jpg", "../../cat/1.jpg")
    link(root / "train/owl", "../../away")
    assert warned(caplog, root, "train", on_left_out="report") == []
    assert len(index(root.as_uri(), "train", stages=STAGES, on_left_out="report")) == 2


def test_hard_links_are_not_warned_of(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    (root / "dog/2.jpg").hardlink_to(root / "cat/1.jpg")
    assert warned(caplog, root) == []


def test_link_to_a_shard_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, {"a.tar": shard([*sample("x"), *sample("y")])})
    link(tmp_path / "b.tar", "a.tar")
    [message] = warned(caplog, tmp_path)
    assert message.startswith("1 objects are indexed") and "'b.tar' ('b.tar' is 'a.tar')" in message


def test_links_by_shards_are_counted_where_they_may_be_shards(tmp_path: Path) -> None:
    root = tmp_path / "root"
    write(tmp_path / "away", {"1.tar": shard(sample("y"))})
    write(root, {"a.tar": shard(sample("x"))})
    for name in ("b.tar", "c.tar.gz", "d.zip", "e", "f.jpg", "README", "g.txt", "h.bin", ".i"):
        link(root / name, "nothing")
    link(root / "j", str(tmp_path / "away"))
    os.mkfifo(root / "k.tar")
    assert left_out(root.as_uri()) == {
        "link": (6, ("b.tar", "c.tar.gz", "d.zip", "e", "f.jpg")),
        "special": (1, ("k.tar",)),
    }
    explicit = index(root.as_uri(), stages=STAGES, layout="webdataset", on_left_out="report")
    assert explicit.left_out["link"].count == 5  # single samples are not checked


def test_class_names_behind_a_link_out_of_the_store_are_missed(tmp_path: Path) -> None:
    write(tmp_path, {"classes.txt": b"cat\n", "root/a.tar": shard(sample("x"))})
    link(tmp_path / "root/classes.txt", "../classes.txt")
    uri = (tmp_path / "root").as_uri()
    assert left_out(uri) == {"link": (1, ("classes.txt",))}
    with pytest.raises(StoreError, match=r"'classes\.txt' is behind a symbolic link that leads out"):
        index(uri, "a.tar", stages=STAGES)


def test_links_of_a_store_that_is_opened_above_them_are_samples(root: Path) -> None:
    link(root / "cat/2.jpg", "../../away/1.jpg")
    with pytest.raises(DatasetError, match="open the store at a folder that holds both"):
        index(root.as_uri(), stages=STAGES)
    assert len(stored(root.parent.as_uri(), "root")) == 3


def test_path_that_is_a_link_out_of_the_store_is_refused(root: Path) -> None:
    link(root / "train", "../away")
    with pytest.raises(StoreError, match="'train' is behind a symbolic link that leads out"):
        index(root.as_uri(), "train", stages=STAGES, on_left_out="report")


def test_store_that_is_opened_at_a_link_is_what_it_leads_to(root: Path) -> None:
    link(root.parent / "alias", "root")
    link(root / "cat/2.jpg", str(root.parent / "alias/dog/1.jpg"))
    assert len(stored((root.parent / "alias").as_uri())) == 3


@pytest.mark.parametrize("kind", ["fifo", "socket"])
def test_special_file_is_counted_where_a_sample_may_be(
    root: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)  # the name of a socket holds 107 bytes
    for name in ("cat/2.jpg", "cat/two", "2.jpg", "cat/1.txt", "control", "cat/.x"):
        if kind == "fifo":
            os.mkfifo(name)
        else:
            with socket.socket(socket.AF_UNIX) as opened:
                opened.bind(name)
    assert left_out(root.as_uri()) == {"special": (3, ("2.jpg", "cat/2.jpg", "cat/two"))}


def test_links_below_upriver_own_folder_are_let_be(root: Path) -> None:
    link(root / "own/x.jpg", "nothing")
    assert index(root.as_uri(), stages=STAGES, prefix="own").left_out == {}


def test_command_reports_links(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    link(root / "cat/2.jpg", "nothing")
    assert main(["index", root.as_uri()]) == 2
    assert "'cat/2.jpg' is a symbolic link to 'nothing', which leads nowhere" in capsys.readouterr().err
    assert main(["index", root.as_uri(), "--on-left-out", "report"]) == 0
    assert "left out: 1 links that lead to no file of their store" in capsys.readouterr().err


@pytest.fixture
def of_another_user() -> Iterator[Path]:
    """Run the test as a user without privileges who owns the folder; root may read everything."""
    place, me = Path(tempfile.mkdtemp()), os.geteuid()
    if me == 0:
        os.chown(place, 65534, 65534)
        os.seteuid(65534)
    yield place
    os.seteuid(me)
    for folder, below, _ in os.walk(place):
        for name in below:
            os.chmod(os.path.join(folder, name), 0o700)
    shutil.rmtree(place)


def test_what_may_not_be_read_is_counted(of_another_user: Path) -> None:
    root = of_another_user
    names = ("cat/2.jpg", "cat/1.txt", "cat/p/1.jpg", "cat/q/1.jpg", "owl/1.jpg", ".x/1.jpg")
    uri = write(root, {**CLASSES, **dict.fromkeys(names, JPEG)})
    link(root / "cat/l.jpg", "p/1.jpg")
    for name, mode in {"cat/2.jpg": 0, "cat/1.txt": 0, "cat/p": 0, "cat/q": 0o644, "owl": 0, ".x": 0}.items():
        (root / name).chmod(mode)
    assert left_out(uri) == {
        "empty_class": (1, ("owl",)),
        "unreadable": (5, ("cat/2.jpg", "cat/l.jpg", "cat/p", "cat/q/1.jpg", "owl")),
    }
    with pytest.raises(DatasetError, match=r"'cat/2\.jpg' is a file that may not be read"):
        index(uri, stages=STAGES)
    assert index(uri, stages=STAGES, on_left_out="report").classes == ("cat", "dog", "owl")


def test_folders_deeper_than_names_may_be_are_counted(tmp_path: Path) -> None:
    """The limit keeps a listing from recursing further than Python allows."""
    uri = write(tmp_path, CLASSES)
    (tmp_path / "cat" / "/".join("x" * 600)).mkdir(parents=True)
    ((reason, (count, (example,))),) = left_out(uri).items()
    assert (reason, count, len(example)) == ("name", 1, 1025)


def test_sample_larger_than_allowed_is_counted(tmp_path: Path) -> None:
    uri = write(tmp_path, {**CLASSES, "cat/2.jpg": JPEG})
    os.truncate(tmp_path / "cat/2.jpg", MAX_SAMPLE_BYTES + 1)
    assert left_out(uri) == {"size": (1, ("cat/2.jpg",))}
    with pytest.raises(DatasetError, match=f"{MAX_SAMPLE_BYTES + 1} bytes; at most {MAX_SAMPLE_BYTES}"):
        index(uri, stages=STAGES)


# ------------------------------------------------------------------------------------- names of folders


@pytest.mark.parametrize("path", ["./train", "train/", "train//", "train/.", "././train/./", "./train//"])
def test_path_is_taken_as_a_shell_takes_it(tmp_path: Path, path: str) -> None:
    uri = write(tmp_path, {"train/cat/1.jpg": JPEG})
    assert stored(uri, path) == [("cat/1.jpg", 0, JPEG)]
    assert stored((tmp_path / "train").as_uri(), ".") == [("cat/1.jpg", 0, JPEG)]


def test_class_folder_whose_name_is_not_utf8_keeps_its_number(tmp_path: Path) -> None:
    uri = write(tmp_path, {**CLASSES, "caf\udce9/1.jpg": JPEG})
    assert left_out(uri) == {"empty_class": (1, ("caf\\udce9",)), "name": (1, ("caf\\udce9/1.jpg",))}
    dataset = index(uri, stages=STAGES, on_left_out="report")
    assert (dataset.classes, dataset.targets.tolist()) == (("caf\\udce9", "cat", "dog"), [1, 2])
    dataset.publish()


@pytest.mark.parametrize(
    ("files", "report"),
    [
        ({"cow/keep": b""}, {"empty_class": (1, ("cow",))}),
        ({"cow/labels.csv": b""}, {"empty_class": (1, ("cow",))}),
        ({"cat/1.txt": b"a cat", "cow/1.txt": b"a cow"}, {"empty_class": (1, ("cow",))}),
        ({"cow/1.txt": b"a cow"}, {}),
        ({"cow/README.jpg": JPEG}, {}),
        (
            {"cow/1.tif": b"II*\0", "cow/1.xml": b"x"},
            {"empty_class": (1, ("cow",)), "format": (1, ("cow/1.tif",))},
        ),
        (
            {"cow/.1.jpg": JPEG, "cow/1.xml": b"x"},
            {"empty_class": (1, ("cow",)), "hidden": (1, ("cow/.1.jpg",))},
        ),
        (
            {"cow/1\n.jpg": JPEG, "cow/1.xml": b"x"},
            {"empty_class": (1, ("cow",)), "name": (1, ("cow/1\n.jpg",))},
        ),
        ({"cat/2.jpg#1": b"half"}, {"format": (1, ("cat/2.jpg#1",))}),
        ({"cat/notice.tif": b"II*\0"}, {"format": (1, ("cat/notice.tif",))}),
        ({"cat/version.bin": b"x"}, {"format": (1, ("cat/version.bin",))}),
        ({"cat/LICENSE.pdf": b"%PDF", "cat/README.zh.md": b"x", "cat/CHANGES": b"x"}, {}),
        ({"meta.jpg#1": b"half", "x.bin#2": b"half"}, {}),
    ],
)
def test_class_folder_counts_by_what_it_holds(
    tmp_path: Path, files: dict[str, bytes], report: dict[str, Any]
) -> None:
    uri = write(tmp_path, {**CLASSES, **files})
    if report:
        assert left_out(uri) == report
    dataset = index(uri, stages=STAGES, on_left_out="report")
    has_cow = "empty_class" in report or "cow/README.jpg" in files
    assert dataset.classes == (("cat", "cow", "dog") if has_cow else ("cat", "dog"))
    assert bool(dataset.left_out) == bool(report)


def test_empty_class_of_the_name_of_a_prefix_elsewhere_is_counted(tmp_path: Path) -> None:
    uri = write(tmp_path, {"train/cat/1.jpg": JPEG})
    (tmp_path / "train/own").mkdir()
    assert left_out(uri, "train", prefix="own") == {"empty_class": (1, ("train/own",))}
