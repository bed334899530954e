"""Check that indexing finds every sample, names what it cannot use, and reads little."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save

from tests.pipeline.making import encoded, npy, pixels, samples, shard, tone, wav, write
from upriver.errors import BadSample, ConfigError, DatasetError, ObjectChanged, StoreError
from upriver.pipeline import (
    Dataset,
    DecodeWav,
    FixLength,
    InputStage,
    LoadTensor,
    Resample,
    imagenet_eval,
    index,
    stored_tensor,
)
from upriver.store import Store

STAGES = imagenet_eval(16, 20)
JPEG = encoded(pixels(20, 20))


def stored(
    uri: str, path: str = "", stages: tuple[InputStage, ...] = STAGES, **options: Any
) -> list[tuple[str, int, bytes]]:
    """Return the name, target and bytes of every sample, read through the index."""
    dataset = index(uri, path, stages=stages, **options)
    refs = dataset.locate(range(len(dataset)))
    blobs = [dataset.store.get_range(ref.object, ref.start, ref.stop, etag=ref.etag) for ref in refs]
    return list(zip(dataset.names(range(len(dataset))), dataset.targets.tolist(), blobs, strict=True))


def expected(members: list[tuple[str, bytes]]) -> list[tuple[str, int, bytes]]:
    content = dict(members)
    keys = dict.fromkeys(
        name.rpartition("/")[0] + "/" + name.rpartition("/")[2].split(".")[0] for name in content
    )
    found = []
    for key in (key.lstrip("/") for key in keys):
        (media,) = (name for name in content if name.startswith(f"{key}.") and not name.endswith(".cls"))
        found.append((key, int(content[f"{key}.cls"]), content[media]))
    return found


LONG = "a_very_long_directory_name/" * 8 + "sample"


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize(
    "members",
    [
        samples(5),
        [("a/x.jpg", JPEG), ("a/x.cls", b"1"), ("b/x.JPEG", JPEG), ("b/x.cls", b" 0\n")],
        [
            ("x.png", encoded(pixels(9, 9), "PNG")),
            ("x.cls", b"2"),
            ("y.webp", encoded(pixels(9, 9), "WEBP")),
            ("y.cls", b"0"),
        ],
    ],
    ids=["plain", "directories", "png and webp"],
)
def test_shards_of_every_tar_format(tmp_path: Path, members: list[tuple[str, bytes]], form: int) -> None:
    uri = write(tmp_path, {"a.tar": shard(members, form)})
    assert stored(uri) == expected(members)


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_and_foreign_names(tmp_path: Path, form: int) -> None:
    members = [(f"{LONG}.cls", b"0"), (f"{LONG}.jpg", JPEG), ("ünï/日本.jpg", JPEG), ("ünï/日本.cls", b"1")]
    uri = write(tmp_path, {"a.tar": shard(members, form)})
    assert stored(uri) == [(LONG, 0, JPEG), ("ünï/日本", 1, JPEG)]


@pytest.mark.parametrize("form", ["ustar", "gnu", "posix"])
def test_shards_of_the_tar_command(tmp_path: Path, form: str) -> None:
    files = {name: data for name, data in samples(4)} | {f"{LONG[:80]}.jpg": JPEG, f"{LONG[:80]}.cls": b"0"}
    write(tmp_path / "in", files)
    names = sorted(files)
    (tmp_path / "out").mkdir()
    command = [
        "tar",
        f"--format={form}",
        "-C",
        str(tmp_path / "in"),
        "-cf",
        str(tmp_path / "out/a.tar"),
        *names,
    ]
    subprocess.run(command, check=True)
    assert stored((tmp_path / "out").as_uri()) == expected([(name, files[name]) for name in names])


def test_directories_and_hidden_files_are_left_out(tmp_path: Path) -> None:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        folder = tarfile.TarInfo("d")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        for name, body in (
            ("d/._x.jpg", b"mac"),
            ("__meta__.json", b"{}"),
            ("d/x.cls", b"0"),
            ("d/x.jpg", JPEG),
            ("d/x.json", b"{}"),
        ):
            entry = tarfile.TarInfo(name)
            entry.size = len(body)
            archive.addfile(entry, io.BytesIO(body))
    assert stored(write(tmp_path, {"a.tar": data.getvalue()})) == [("d/x", 0, JPEG)]


def test_many_shards_come_in_the_order_of_their_names(tmp_path: Path) -> None:
    shards = {f"train/{n:02d}.tar": shard(samples(3, first=3 * n)) for n in range(12)}
    uri = write(tmp_path, shards | {"other/x.tar": shard(samples(1))})
    assert stored(uri, "train") == expected(samples(36))
    assert stored(uri, "train/") == expected(samples(36))
    assert stored(uri, "train/03.tar") == expected(samples(3, first=9))


def test_class_names_beside_the_shards(tmp_path: Path) -> None:
    uri = write(tmp_path, {"t/a.tar": shard(samples(4)), "t/classes.txt": b"cat\ndog\nfish\nunused\n"})
    assert index(uri, "t", stages=STAGES).classes == ("cat", "dog", "fish", "unused")
    (tmp_path / "t/classes.txt").write_bytes(b"cat\ndog\n")
    with pytest.raises(
        DatasetError, match=r"'t/a\.tar', sample '000002': class 2, but 't/classes\.txt' names 2"
    ):
        index(uri, "t", stages=STAGES)
    (tmp_path / "t/classes.txt").write_bytes(b"\xff")
    with pytest.raises(DatasetError, match=r"'t/classes\.txt' is not UTF-8"):
        index(uri, "t", stages=STAGES)


def test_class_folders(tmp_path: Path) -> None:
    files = {
        "train/dog/2.jpg": JPEG,
        "train/dog/1.PNG": encoded(pixels(8, 8), "PNG"),
        "train/cat/deep/er/1.jpeg": JPEG,
        "train/.cache/x.jpg": JPEG,
        "train/README.md": b"no sample",
        "elsewhere/bird/1.jpg": JPEG,
    }
    uri = write(tmp_path, files)
    dataset = index(uri, "train", stages=STAGES)
    assert dataset.classes == ("cat", "dog")
    assert stored(uri, "train") == [
        ("cat/deep/er/1.jpeg", 0, JPEG),
        ("dog/1.PNG", 1, files["train/dog/1.PNG"]),
        ("dog/2.jpg", 1, JPEG),
    ]
    assert dataset.layout == "folders"


def test_a_folder_is_indexed_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = index(write(tmp_path / "photos", {"cat/1.jpg": JPEG}), stages=STAGES).digest
    monkeypatch.chdir(tmp_path)
    for place in ("./photos", Path("photos"), tmp_path / "photos"):
        assert index(place, stages=STAGES).digest == digest
    with pytest.raises(StoreError, match=r"/phtos'.* does not exist"):
        index("./phtos", stages=STAGES)


def test_ready_tensors(tmp_path: Path) -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    files: dict[str, tuple[bytes, InputStage]] = {
        "npy": (npy(array), LoadTensor("npy")),
        "safetensors": (save({"x": torch.tensor(array)}), LoadTensor("safetensors")),
    }
    for form, (data, stage) in files.items():
        uri = write(tmp_path / form, {"t.tar": shard([(f"a.{form}", data), ("a.cls", b"0")])})
        write(tmp_path / form, {f"folders/zero/a.{form}": data})
        for path in ("t.tar", "folders"):
            dataset = index(uri, path, stages=[stage])
            assert dataset.format == form
            ((_, _, blob),) = stored(uri, path, stages=(stage,))
            got = dataset.chain.run(stored_tensor(blob), sample=0, epoch=0, seed=0, start=-1, stop=0)
            assert torch.equal(got, torch.tensor(array))


@pytest.mark.parametrize("path", ["t.tar", "folders"])
def test_safetensors_of_several_tensors_are_refused(tmp_path: Path, path: str) -> None:
    stages = [LoadTensor("safetensors")]

    def indexed(tensors: dict[str, torch.Tensor]) -> Dataset:
        data = save(tensors)
        files = {
            "t.tar": shard([("a.safetensors", data), ("a.cls", b"0")]),
            "folders/zero/a.safetensors": data,
        }
        return index(write(tmp_path, files), path, stages=stages)

    several = {name: torch.zeros(2) for name in ("image", "label")}
    name, place = ("a", "t.tar") if path == "t.tar" else ("zero/a.safetensors", "folders/zero/a.safetensors")
    with pytest.raises(DatasetError) as refused:
        indexed(several)
    assert str(refused.value) == (
        f"sample '{name}' in '{place}' must hold one tensor, or one named 'tensor'; "
        "it holds 2 ('image', 'label')"
    )
    with pytest.raises(DatasetError, match=r"it holds 70 \('00', '01', '02', '03', '04', …\)"):
        indexed({f"{number:02}": torch.zeros(1) for number in range(70)})
    assert torch.equal(indexed({**several, "tensor": torch.ones(3)})[0][0], torch.ones(3))


def test_safetensors_that_cannot_be_read_are_bad_samples_later(tmp_path: Path) -> None:
    dataset = index(write(tmp_path, {"zero/a.safetensors": b"none"}), stages=[LoadTensor("safetensors")])
    with pytest.raises(
        BadSample, match=r"sample 0 in object 'zero/a\.safetensors': not a \.safetensors file"
    ):
        dataset[0]


# ---------------------------------------------------------------------------------------------- audio


def test_audio(tmp_path: Path) -> None:
    data = {f"{n}.wav": wav(tone(50 + n)) for n in range(3)}
    shards = shard([each for name in data for each in ((f"{name[0]}.cls", b"1"), (name, data[name]))])
    uri = write(tmp_path, {"a.tar": shards} | {f"words/yes/{name}": each for name, each in data.items()})
    for path, layout in (("a.tar", "webdataset"), ("words", "folders")):
        dataset = index(uri, path, stages=[DecodeWav(16000), FixLength(60)])
        assert (dataset.format, dataset.layout, len(dataset)) == ("wav", layout, 3)
        found = stored(uri, path, stages=(DecodeWav(16000),))
        assert [blob for _, _, blob in found] == list(data.values())
        dataset.publish()
        assert Dataset.open(dataset.store, dataset.digest).chain == dataset.chain


@pytest.mark.parametrize("path", ["a.tar", "words"])
def test_of_audio_the_rate_is_looked_at(tmp_path: Path, path: str) -> None:
    data = wav(tone(50), rate=44100)
    uri = write(tmp_path, {"a.tar": shard([("1.cls", b"0"), ("1.wav", data)]), "words/yes/1.wav": data})
    with pytest.raises(ConfigError, match=r"it must be decode_wav, with sample_rate 44100$"):
        index(uri, path, stages=STAGES)
    with pytest.raises(
        ConfigError, match=r"has 44100 samples a second, and decode_wav\.sample_rate is 16000"
    ):
        index(uri, path, stages=[DecodeWav(16000)])
    index(uri, path, stages=[DecodeWav(44100), Resample(44100, 16000)])


@pytest.mark.parametrize("data", [b"RIFF", b"no audio at all" * 100])
def test_audio_that_cannot_be_read_is_a_bad_sample_later(tmp_path: Path, data: bytes) -> None:
    uri = write(tmp_path, {"yes/1.wav": data})
    assert index(uri, stages=[DecodeWav(16000)]).format == "wav"
    with pytest.raises(ConfigError, match=r"it must be decode_wav$"):
        index(uri, stages=STAGES)


def test_of_a_long_sound_little_is_read(tmp_path: Path) -> None:
    store = CountingStore.at(write(tmp_path, {"yes/1.wav": wav(tone(100_000))}))
    index(store, stages=[DecodeWav(16000)])
    assert sum(stop - start for _, start, stop in store.gets) <= 4096


# ---------------------------------------------------------------------------------------- faulty data


def cut(data: bytes, at: int) -> bytes:
    return data[:at]


@pytest.mark.parametrize(
    ("members", "problem"),
    [
        ([("x.jpg", JPEG)], r"sample 'x': no \.cls member"),
        ([("x.cls", b"0")], r"sample 'x': must have one of jpg, .*; it has none"),
        ([("x.cls", b"0"), ("x.v2.jpg", JPEG)], r"it has \.v2\.jpg"),
        ([("x.cls", b"0"), ("x.jpg", JPEG), ("x.png", JPEG)], r"it has \.jpg, \.png"),
        ([("x.cls", b"0"), ("x.jpg", JPEG), ("x.jpg", JPEG)], r"it has \.jpg, \.jpg"),
        ([("x.cls", b"0"), ("x.jpg", JPEG), ("x.cls", b"0")], r"sample 'x': two \.cls members"),
        ([*samples(1), *samples(1)], r"sample '000000': "),
        ([*samples(2), *samples(1)], r"sample '000000' is there twice"),
        ([("x.cls", b"cat"), ("x.jpg", JPEG)], r"\.cls must hold a whole number >= 0, got b'cat'"),
        ([("x.cls", b"-1"), ("x.jpg", JPEG)], r"\.cls must hold a whole number >= 0, got b'-1'"),
        ([("x.cls", b""), ("x.jpg", JPEG)], r"\.cls must hold"),
        ([("x.cls", b"1" * 65), ("x.jpg", JPEG)], r"\.cls must hold"),
        ([("x.cls", b"1" * 17), ("x.jpg", JPEG)], r"sample 'x': class 11111111111111111; classes lie in"),
        (
            [("x.cls", b"0"), ("x.jpg", JPEG), ("y.cls", b"0"), ("y.npy", b"x")],
            r"formats are mixed: .*\(x\).*image.*\(y\).*npy",
        ),
    ],
)
def test_a_sample_that_is_not_one_names_its_shard(
    tmp_path: Path, members: list[tuple[str, bytes]], problem: str
) -> None:
    uri = write(tmp_path, {"s/bad.tar": shard(members)})
    with pytest.raises(DatasetError, match=rf"'s/bad\.tar'.*{problem}|{problem}") as caught:
        index(uri, stages=STAGES)
    assert "s/bad.tar" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda data: data[:700], "truncated|not a whole tar"),
        (lambda data: data[: len(data.rstrip(bytes(1))) - 100], "truncated|not a whole tar"),
        (lambda data: data[: -(-len(data.rstrip(bytes(1))) // 512) * 512], "no end mark"),
        (lambda data: data.replace(b"000002.cls", b"000009.cls"), "no end mark"),
        (lambda data: b"", "not a whole tar"),
        (lambda data: b"nonsense" * 1000, "not a whole tar"),
        (lambda data: bytes(10240), "hold none"),
    ],
    ids=["in a member", "in the last", "at a member", "damaged header", "empty", "no tar", "no members"],
)
def test_a_shard_that_is_not_whole_is_refused(
    tmp_path: Path, change: Callable[[bytes], bytes], problem: str
) -> None:
    uri = write(tmp_path, {"good.tar": shard([]), "bad.tar": change(shard(samples(4)))})
    with pytest.raises(DatasetError, match=problem) as caught:
        index(uri, stages=STAGES)
    assert "bad.tar" in str(caught.value) or "hold none" in str(caught.value)


def header(name: bytes, size: bytes, kind: bytes = b"0") -> bytes:
    block = bytearray(name.ljust(100, b"\0") + b"0000644\0" + b"0000000\0" * 2 + size.ljust(12, b"\0"))
    block += b"00000000000\0" + b" " * 8 + kind + bytes(100) + b"ustar\x0000"
    block = block.ljust(512, b"\0")
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


@pytest.mark.parametrize(
    "data",
    [
        header(b"x.jpg", b"\xff" * 12),  # a negative size, as base 256
        header(b"x.jpg", b"\xff" * 10 + b"\xfe\x00"),
        header(b"pax", b"\xff" * 12, b"x"),
        header(b"pax", b"77777777777\0", b"x"),
        header(b"name", b"77777777777\0", b"L"),
        header(b"x.jpg", b"77777777777\0"),
        header(b".hidden", b"0" * 11 + b"\0") * 9 + header(b".hidden", b"\xff" * 10 + b"\xf0\x00"),
    ],
    ids=["size -1", "size -512", "pax -1", "pax 8 GiB", "long name 8 GiB", "member 8 GiB", "circle"],
)
def test_a_header_that_lies_ends_at_once(tmp_path: Path, data: bytes) -> None:
    uri = write(tmp_path, {"bad.tar": data + bytes(10240)})
    with pytest.raises(DatasetError, match=r"bad\.tar"):
        index(uri, stages=STAGES)


def test_an_extended_header_has_a_cap(tmp_path: Path) -> None:
    data = header(b"pax", b"%011o\0" % 2**21, b"x") + bytes(2**22)
    with pytest.raises(DatasetError, match=r"'bad\.tar' is not a whole tar file: a header of 2097152 bytes"):
        index(write(tmp_path, {"bad.tar": data}), stages=STAGES)


def test_sparse_members_are_refused(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    with open(tmp_path / "in/x.jpg", "wb") as file:
        file.write(b"a")
        file.seek(2**20)
        file.write(b"b")
    (tmp_path / "out").mkdir()
    for form in ("gnu", "posix"):
        target = str(tmp_path / "out/a.tar")
        subprocess.run(
            ["tar", "-S", f"--format={form}", "-C", str(tmp_path / "in"), "-cf", target, "x.jpg"], check=True
        )
        with pytest.raises(DatasetError, match=r"'a\.tar': sparse member"):
            index((tmp_path / "out").as_uri(), stages=STAGES)


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({}, "no samples in store 'default'"),
        ({"README": b"x"}, "no samples in store"),
        ({"a.tar.gz": b"x"}, r"'a\.tar\.gz' is compressed"),
        ({"x.jpg": JPEG}, r"'x\.jpg' lies in no class folder"),
        ({"c/x.jpg": JPEG, "c/y.tif": b""}, r"'c/y\.tif': \.tif is not supported; allowed: jpg"),
        ({"c/x.jpg": JPEG, "c/y.npy": b"x"}, "formats are mixed"),
        (
            {"c/x.jpg": JPEG, "a.tar": shard(samples(1))},
            r"holds shards \('a\.tar'\) and single samples \('c/x\.jpg'\)",
        ),
    ],
)
def test_what_cannot_be_indexed_is_said(tmp_path: Path, files: dict[str, bytes], problem: str) -> None:
    with pytest.raises(DatasetError, match=problem):
        index(write(tmp_path, files) if files else tmp_path.as_uri(), stages=STAGES)


def test_a_path_with_nothing_under_it(tmp_path: Path) -> None:
    uri = write(tmp_path, {"a/x.tar": shard(samples(1))})
    for layout in ("auto", "webdataset", "folders"):
        with pytest.raises(DatasetError, match="no samples in 'b' in store 'default'"):
            index(uri, "b", stages=STAGES, layout=layout)


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("trian", "there is no 'trian', and in 'URI' there are 'train'"),
        ("xyz", "there is no 'xyz', and in 'URI' there are 'photos', 'train', 'val'"),
        ("photos/twain", "there is no 'photos/twain', and in 'photos' there are 'train'"),
        ("photo/train", "there is no 'photo', and in 'URI' there are 'photos'"),
        ("val/train", "there is no 'val/train', and in 'val' there are no folders"),
    ],
)
def test_index_a_folder_that_is_not_there_names_those_that_are(tmp_path: Path, path: str, says: str) -> None:
    uri = write(tmp_path, {"train/c/x.jpg": JPEG, "photos/train/c/x.jpg": JPEG, "val/x.txt": b"x"})
    with pytest.raises(DatasetError) as caught:
        index(uri, path, stages=STAGES)
    assert str(caught.value).endswith(says.replace("URI", Store.open(uri).uri))


def test_index_a_folder_that_is_there_and_empty_is_not_called_missing(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    with pytest.raises(DatasetError) as caught:
        index(tmp_path.as_uri(), "train", stages=STAGES)
    assert "there is no" not in str(caught.value)


@pytest.mark.parametrize(
    ("folders", "path", "warned"),
    [
        (["photos/train/cat", "photos/val/cat"], "photos", "'photos/train'"),
        (["Train/cat", "heldout/cat"], "", "'Train'"),
        (["train/cat", "other/cat"], "", ""),
        (["train/cat", "train/dog"], "train", ""),
    ],
)
def test_index_classes_with_names_of_splits_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, folders: list[str], path: str, warned: str
) -> None:
    uri = write(tmp_path, {f"{folder}/x.jpg": JPEG for folder in folders})
    index(uri, path, stages=STAGES)
    said = [record.getMessage() for record in caplog.records]
    assert [warned in each and "names of splits" in each for each in said] == [True] * bool(warned)


def test_the_layout_asked_for_is_the_one_used(tmp_path: Path) -> None:
    uri = write(tmp_path, {"c/x.jpg": JPEG, "a.tar": shard(samples(2))})
    assert len(index(uri, stages=STAGES, layout="webdataset")) == 2
    assert len(index(uri, stages=STAGES, layout="folders")) == 1
    with pytest.raises(ConfigError, match="layout must be auto, webdataset or folders, got 'lmdb'"):
        index(uri, stages=STAGES, layout="lmdb")  # type: ignore[arg-type]


def test_stages_must_read_what_is_stored(tmp_path: Path) -> None:
    uri = write(tmp_path, {"a.tar": shard(samples(1))})
    with pytest.raises(ConfigError, match=r"stored as image; the first stage \(load_tensor\) reads npy"):
        index(uri, stages=[LoadTensor("npy")])


def test_a_sample_larger_than_the_cap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("upriver.pipeline.manifest.MAX_SAMPLE_BYTES", 100)
    with pytest.raises(DatasetError, match=r"'000000' in 'a\.tar' has \d+ bytes; at most 100 are allowed"):
        index(write(tmp_path, {"a.tar": shard(samples(1))}), stages=STAGES)


# ------------------------------------------------------------------------------------------ bytes read


class CountingStore(Store):
    """A real store that counts its ranged GETs."""

    gets: list[tuple[str, int, int]]

    @classmethod
    def at(cls, uri: str) -> CountingStore:
        store = cls.open(uri)
        store.__class__ = cls
        store.gets = []
        return store

    def get_range(self, path: str, start: int, stop: int, *, etag: str | None = None) -> bytes:
        self.gets.append((path, start, stop))
        return super().get_range(path, start, stop, etag=etag)


def test_only_headers_are_read_of_large_samples(tmp_path: Path) -> None:
    members = [
        (f"{n}.{kind}", data) for n in range(20) for kind, data in (("cls", b"0"), ("jpg", bytes(300_000)))
    ]
    store = CountingStore.at(write(tmp_path, {"a.tar": shard(members)}))
    assert len(index(store, stages=STAGES)) == 20
    read = sum(stop - start for _, start, stop in store.gets)
    assert len(store.gets) <= 22
    assert read <= 22 * 16 * 1024


def test_small_samples_are_read_in_few_gets(tmp_path: Path) -> None:
    members = [
        (f"{n}.{kind}", data) for n in range(3000) for kind, data in (("cls", b"0"), ("jpg", bytes(500)))
    ]
    data = shard(members)
    store = CountingStore.at(write(tmp_path, {"a.tar": data}))
    assert len(index(store, stages=STAGES)) == 3000
    assert len(store.gets) <= 12
    assert sum(stop - start for _, start, stop in store.gets) <= 1.01 * len(data) + 16 * 1024 * 12


def test_folders_are_not_read_at_all(tmp_path: Path) -> None:
    store = CountingStore.at(write(tmp_path, {f"c/{n}.jpg": JPEG for n in range(5)}))
    index(store, stages=STAGES)
    assert store.gets == []


def test_progress_goes_up_to_all_bytes(tmp_path: Path) -> None:
    shards = {f"{n}.tar": shard(samples(4)) for n in range(3)}
    uri, seen = write(tmp_path, shards), []
    index(uri, stages=STAGES, on_progress=lambda done, total: seen.append((done, total)))
    total = sum(map(len, shards.values()))
    assert {each[1] for each in seen} == {total}
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (total, total)
    assert len(seen) > 10


def test_a_shard_that_changes_meanwhile_is_noticed(tmp_path: Path) -> None:
    """The first GET of a shard swaps the shard for another one."""
    members = [
        (f"{n}.{kind}", data) for n in range(4) for kind, data in (("cls", b"0"), ("jpg", bytes(300_000)))
    ]
    store = CountingStore.at(write(tmp_path, {"a.tar": shard(members)}))

    class Swapping(CountingStore):
        def get_range(self, path: str, start: int, stop: int, *, etag: str | None = None) -> bytes:
            data = super().get_range(path, start, stop, etag=etag)
            if len(self.gets) == 1:
                self.put("a.tar", shard(members[:4]))
            return data

    store.__class__ = Swapping
    with pytest.raises(ObjectChanged, match=r"a\.tar"):
        index(store, stages=STAGES)


# ------------------------------------------------------------------------------------ odd arguments


@pytest.mark.parametrize(
    ("arguments", "options", "named"),
    [
        ((3,), {}, "store must be"),
        ((None,), {}, "store must be"),
        (("memory://odd", 3), {}, "path must be a str"),
        (("memory://odd", None), {}, "path must be a str"),
        (("memory://odd",), {"stages": None}, "stages must be a list"),
        (("memory://odd",), {"stages": "eval"}, "stages must be a list"),
        (("memory://odd",), {"stages": (3,)}, "input stage"),
        (("memory://odd",), {"prefix": ".."}, r"has the segment '\.\.'"),
        (("memory://odd",), {"prefix": "/abs"}, "'/abs'"),
        (("memory://odd",), {"prefix": ""}, "is empty"),
        (("memory://odd",), {"prefix": None}, "prefix must be a str"),
        (("memory://odd",), {"on_progress": 3}, "on_progress"),
    ],
)
def test_arguments_are_checked_before_anything_is_read(
    arguments: tuple[Any, ...], options: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        index(*arguments, **{"stages": STAGES, **options})


@pytest.mark.parametrize("name", [b"cat/\xff\xfe.jpg", b"c\xe4t/1.jpg", b"\xff.tar"])
def test_a_name_that_is_not_utf8_is_named(tmp_path: Path, name: bytes) -> None:
    path = os.path.join(os.fsencode(tmp_path), name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(JPEG)
    with pytest.raises(DatasetError, match="name is not UTF-8") as caught:
        index(tmp_path.as_uri(), stages=STAGES)
    assert repr(os.fsdecode(name)) in str(caught.value)
    str(caught.value).encode()  # a terminal can show it


def test_another_file_with_such_a_name_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "1.jpg").write_bytes(JPEG)
    with open(os.path.join(os.fsencode(tmp_path), b"\xff.txt"), "wb"):
        pass
    assert [name for name, _, _ in stored(tmp_path.as_uri())] == ["cat/1.jpg"]


@pytest.mark.parametrize(
    ("name", "named"),
    [("1.npy", "load_tensor with format 'npy'"), ("1.jpg", "decode"), ("1.wav", "decode_wav")],
)
def test_the_error_of_a_first_stage_says_which_it_must_be(tmp_path: Path, name: str, named: str) -> None:
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / name).write_bytes(b"x")
    stages = (LoadTensor("npy"),) if name == "1.jpg" else STAGES
    with pytest.raises(ConfigError, match=f"it must be {named}"):
        index(tmp_path.as_uri(), stages=stages)
