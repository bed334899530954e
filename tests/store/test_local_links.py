"""Test symbolic links in a file store: a link that stays inside is a file, one that leads out is nothing."""

import asyncio
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from upriver.errors import ObjectNotFound, StoreError
from upriver.store import Store
from upriver.store.local import inside


@pytest.fixture
def root(tmp_path):
    """Make a store's root with one object, next to a folder outside the store."""
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "secret").write_bytes(b"secret")
    root = tmp_path / "root"
    (root / "real" / "deep").mkdir(parents=True)
    (root / "real" / "deep" / "a").write_bytes(b"inside")
    return root


def link(place, target):
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(target)


def file_link(root):
    link(root / "x", root.parent / "private" / "secret")
    return "x"


def relative_file_link(root):
    link(root / "real" / "x", "../../private/secret")
    return "real/x"


def directory_link(root):
    link(root / "x", root.parent / "private")
    return "x/secret"


def link_in_the_middle(root):
    link(root / "real" / "x", root.parent)
    return "real/x/private/secret"


def link_to_a_link(root):
    link(root / "real" / "x", "deep/y")
    link(root / "real" / "deep" / "y", root.parent / "private")
    return "real/x/secret"


def link_to_the_folder_around(root):
    link(root / "x", root.parent)
    return "x/private/secret"


def to_the_root_of_all(root):
    link(root / "x", "/")
    return "x" + str(root.parent / "private" / "secret")


WAYS_OUT = [
    file_link,
    relative_file_link,
    directory_link,
    link_in_the_middle,
    link_to_a_link,
    link_to_the_folder_around,
    to_the_root_of_all,
]


@pytest.mark.parametrize("make", WAYS_OUT, ids=lambda make: make.__name__)
def test_what_lies_outside_is_no_object(root, make):
    name = make(root)
    assert (root / name).read_bytes() == b"secret"  # for code that follows links
    store = Store.open(root.as_uri())
    uses = (
        store.get,
        store.head,
        store.delete,
        lambda name: store.put(name, b"other"),
        lambda name: store.get_range(name, 0, 1),
        lambda name: store.read_into(name, 0, memoryview(bytearray(1))),
        lambda name: asyncio.run(store.get_async(name)),
        lambda name: asyncio.run(store.get_range_async(name, 0, 1)),
        lambda name: asyncio.run(store.read_into_async(name, 0, memoryview(bytearray(1)))),
        lambda name: asyncio.run(store.head_async(name)),
        lambda name: asyncio.run(store.put_async(name, b"other")),
    )
    for use in uses:
        with pytest.raises(ObjectNotFound, match="symbolic link that leads out of the store's root") as found:
            use(name)
        assert "private" not in str(found.value).replace(name, "")  # nor does the error say where it leads
    assert not store.exists(name)
    assert (root / name).read_bytes() == b"secret"
    assert store.get("real/deep/a") == b"inside"


@pytest.mark.parametrize("make", WAYS_OUT, ids=lambda make: make.__name__)
def test_a_listing_does_not_go_there_and_says_so(root, make):
    """Leaving samples out silently would be worse than an error."""
    make(root)
    with pytest.raises(StoreError, match="leads out"):
        list(Store.open(root.as_uri()).list())


def test_a_way_out_and_back_in_stays_inside(root):
    link(root / "x", root.parent / "root" / "real")
    assert Store.open(root.as_uri()).get("x/deep/a") == b"inside"


@pytest.mark.parametrize("target", ["real/deep/a", "./real/../real/deep/a"])
def test_links_that_stay_inside_are_files(root, target):
    link(root / "x", target)
    link(root / "y", "x")
    store = Store.open(root.as_uri())
    assert [store.get(name) for name in ("x", "y")] == [b"inside"] * 2
    assert sorted(info.path for info in store.list()) == ["real/deep/a", "x", "y"]


def test_a_link_to_nothing_is_nothing(root):
    link(root / "x", "real/none")
    link(root / "y", root.parent / "none")
    store = Store.open(root.as_uri())
    for name in ("x", "y"):
        with pytest.raises(ObjectNotFound):
            store.get(name)


def test_links_in_a_circle_are_an_error(root):
    link(root / "x", "y")
    link(root / "y", "x")
    with pytest.raises(StoreError):
        Store.open(root.as_uri()).get("x")


def folders(root, *names):
    """Make folders that hold an object each."""
    for name in names:
        (root / name).mkdir(parents=True)
        (root / name / "x").write_bytes(name.encode())


def mutual(root):
    folders(root, "a", "b")
    link(root / "a" / "l", "../b")
    link(root / "b" / "l", "../a")
    return "", ["a/x", "b/x"]


def up_beyond_the_folder_that_is_listed(root):
    folders(root, "ds/a", "ds/b", "other/c")
    link(root / "ds" / "up", "..")
    return "ds", ["ds/a/x", "ds/b/x"]


def another_name_for_a_class(root):
    folders(root, "ds/a")
    link(root / "ds" / "b", "a")
    return "ds", ["ds/a/x", "ds/b/x"]


def another_name_for_a_class_with_a_link_up(root):
    folders(root, "ds/a/deep")
    link(root / "ds" / "b", "a")
    link(root / "ds" / "a" / "deep" / "up", "..")
    return "ds", ["ds/a/deep/x", "ds/b/deep/x"]


def classes_that_lie_elsewhere(root):
    folders(root, "pool/a", "pool/b")
    for name in ("a", "b"):
        link(root / "train" / name, f"../pool/{name}")
    return "train", ["train/a/x", "train/b/x"]


def classes_behind_two_links(root):
    folders(root, "pool/a", "v2/b")
    link(root / "v2" / "a", "../pool/a")
    link(root / "train", "v2")
    link(root / "val", "v2")
    return "", ["pool/a/x", "train/a/x", "train/b/x", "v2/a/x", "v2/b/x", "val/a/x", "val/b/x"]


def a_class_elsewhere_that_links_back(root):
    folders(root, "pool/a")
    link(root / "train" / "a", "../pool/a")
    link(root / "pool" / "a" / "all", "../../train")
    return "train", ["train/a/x"]


def a_circle_elsewhere_behind_two_names(root):
    folders(root, "pool/p", "pool/q")
    link(root / "pool" / "p" / "q", "../q")
    link(root / "pool" / "q" / "p", "../p")
    link(root / "ds" / "a", "../pool/p")
    link(root / "ds" / "b", "../pool/p")
    return "ds", ["ds/a/q/x", "ds/a/x", "ds/b/q/x", "ds/b/x"]


def one_name_within_a_circle_of_the_listed(root):
    folders(root, "ds/a/deep", "ds/b")
    link(root / "ds" / "b" / "deep", "../a/deep")
    link(root / "ds" / "a" / "deep" / "b", "../../b")
    return "ds", ["ds/a/deep/x", "ds/b/x"]


def itself(root):
    folders(root, "a")
    link(root / "a" / "l", ".")
    return "", ["a/x"]


def a_crowd(root):
    """Make twelve folders that all link to each other: 12! paths lead through them."""
    names = [f"d{number:02}" for number in range(12)]
    folders(root, *names)
    for one in names:
        for other in names:
            if other != one:
                link(root / one / f"to_{other}", f"../{other}")
    return "", [f"{name}/x" for name in names]


def a_crowd_elsewhere(root):
    _, names = a_crowd(root / "pool")
    link(root / "ds" / "all", "../pool/d00")
    return "ds", ["ds/all/x", *(f"ds/all/to_{name}" for name in names[1:])]


@pytest.mark.parametrize(
    "make",
    [
        mutual,
        up_beyond_the_folder_that_is_listed,
        another_name_for_a_class,
        another_name_for_a_class_with_a_link_up,
        classes_that_lie_elsewhere,
        classes_behind_two_links,
        a_class_elsewhere_that_links_back,
        a_circle_elsewhere_behind_two_names,
        one_name_within_a_circle_of_the_listed,
        itself,
        a_crowd,
    ],
    ids=lambda make: make.__name__,
)
def test_list_of_linked_folders_gives_each_object_once_a_name(tmp_path, make):
    prefix, names = make(tmp_path)
    found = [info.path for info in Store.open(tmp_path.as_uri()).list(prefix)]
    assert sorted(found) == sorted(names)


def test_list_of_a_circle_elsewhere_gives_each_of_its_objects_once(tmp_path):
    prefix, names = a_crowd_elsewhere(tmp_path)
    store = Store.open(tmp_path.as_uri())
    found = [info.path for info in store.list(prefix)]
    contents = [store.get(name) for name in found]
    assert len(found) == len(names) == len(set(contents))


def test_a_neighbour_whose_name_begins_like_the_root_is_outside(root):
    (root.parent / "root-of-others").mkdir()
    (root.parent / "root-of-others" / "a").write_bytes(b"theirs")
    link(root / "x", "../root-of-others")
    with pytest.raises(ObjectNotFound):
        Store.open(root.as_uri()).get("x/a")


def test_a_link_that_was_swapped_since_it_was_listed_is_looked_at_again(root):
    """The swap happens between listing and reading; only the kernel could check and open in one step."""
    link(root / "x", "real/deep/a")
    store = Store.open(root.as_uri())
    assert "x" in {info.path for info in store.list()}
    (root / "x").unlink()
    link(root / "x", "../private/secret")
    with pytest.raises(ObjectNotFound):
        store.get("x")


SEGMENTS = st.sampled_from(["real", "deep", "a", "b", "in", "out", "up", "far"])


@settings(deadline=None)
@given(st.lists(SEGMENTS, min_size=1, max_size=6))
def test_no_name_leads_out_of_a_maze(tmp_path_factory, segments):
    maze = _maze(tmp_path_factory)
    name = "/".join(segments)
    try:
        found = inside(maze, name)
    except ObjectNotFound:
        real = os.path.realpath(maze / name)
        assert os.path.commonpath([real, maze]) != str(maze)
        return
    assert found == maze or maze in found.parents
    assert not found.is_file() or found.read_bytes() == b"inside"


def _maze(factory):
    """Make folders and links of which some lead up, some out and some in again; once per session."""
    global _made
    if _made is None:
        top = factory.mktemp("maze").resolve()
        root = top / "root"
        (root / "real" / "deep").mkdir(parents=True)
        for place in (root / "a", root / "real" / "a", root / "real" / "deep" / "a"):
            place.write_bytes(b"inside")
        (top / "a").write_bytes(b"secret")
        (top / "real").mkdir()
        (top / "real" / "a").write_bytes(b"secret")
        for folder in (root, root / "real", root / "real" / "deep"):
            (folder / "in").symlink_to(root / "real")
            (folder / "out").symlink_to(top)
            (folder / "up").symlink_to("..")
            (folder / "far").symlink_to("../..")
        _made = root
    return _made


_made: Path | None = None
