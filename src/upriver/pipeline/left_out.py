"""Decide which stored files are no samples by convention, and count all others that an index leaves out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from upriver.errors import DatasetError

OnLeftOut = Literal["error", "report"]
"""Action when something that may be a sample is left out of an index."""

FORMAT_OF = {
    **dict.fromkeys(("jpg", "jpeg", "jpe", "jfif"), "image"),
    **dict.fromkeys(("png", "webp", "bmp", "ppm", "pgm", "pbm", "pnm"), "image"),
    **dict.fromkeys(("wav", "wave"), "wav"),
    "npy": "npy",
    "safetensors": "safetensors",
}
"""Stored format by extension."""

MAX_EXAMPLES = 5
"""Number of names kept for each reason."""

REASONS: dict[str, str] = {
    "format": "of a format that is not read",
    "compressed": "compressed shards",
    "hidden": "hidden by a dot",
    "name": "with a name that an index cannot hold",
    "no_class_folder": "in no class folder",
    "empty_class": "class folders without a sample",
    "link": "links that lead to no file of their store or shard",
    "unreadable": "without permission to read them",
    "size": "larger than a sample may be",
    "empty": "without a byte",
    "sparse": "sparse members",
    "special": "neither files nor links",
    "no_media": "keys without a member that is read",
    "no_class": "keys without a class",
}
"""Words for each reason."""

_CLUTTER = frozenset(
    (
        *(".ds_store", ".localized", ".appledouble", ".spotlight-v100", ".fseventsd", ".trashes"),
        *("thumbs.db", "ehthumbs.db", "desktop.ini", "$recycle.bin", "system volume information"),
        *("__macosx", "__pycache__", ".ipynb_checkpoints", ".cache", ".git", ".svn", ".dvc", ".snapshot"),
        *(".thumbnails", ".huggingface", ".upriver", "@eadir", "lost+found"),
    )
)
"""Files and folders that systems and tools leave among data, in lower case."""

_COMPANION_EXTENSIONS = frozenset(
    (
        *("txt", "md", "rst", "html", "htm", "log", "cff", "bib"),
        *("json", "jsonl", "ndjson", "csv", "tsv", "xml", "yaml", "yml", "toml", "ini", "cfg", "conf"),
        *("idx", "index", "md5", "sha1", "sha256", "sha512", "crc32c", "sig", "asc", "torrent"),
        *("py", "sh", "ipynb", "dvc", "lock", "xmp", "aae"),
    )
)
"""Extensions of texts, tables, checksums, scripts and photograph edits, which describe samples."""

_DOCUMENT_EXTENSIONS = frozenset(("pdf", "doc", "docx", "odt", "rtf", "tex"))
"""Extensions of a README or license, besides those of companions."""

_COMPANION_NAMES = frozenset(
    (
        *("readme", "license", "licence", "copying", "notice", "changelog", "changes", "authors", "citation"),
        *("version", "makefile", "dockerfile", "manifest", "checksums", "md5sums", "sha256sums"),
        *("classes.txt", "_success"),
    )
)
"""Names, without extension, of files that describe a dataset."""

COMPRESSED_SHARDS = tuple(
    f".{name}"
    for name in (
        *(f"tar.{kind}" for kind in ("gz", "bz2", "xz", "zst", "lz4", "lz", "lzma", "br", "z")),
        *("tgz", "tbz", "tbz2", "txz", "tlz", "tzst"),
    )
)
ARCHIVES = frozenset(("zip", "7z", "rar", "gz", "bz2", "xz", "zst", "lz4", "tfrecord", "mds", "lmdb"))
"""Extensions of files that hold many samples, and are not read."""


class LeftOut(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Objects that an index leaves out for one reason.

    Attributes:
        count: Number of objects, or of members or keys of shards.
        examples: First names, at most five.
    """

    count: int
    examples: tuple[str, ...]


class Tally:
    """Count of left-out objects, by reason."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._examples: dict[str, list[str]] = {}
        self._first = ""

    def __bool__(self) -> bool:
        return bool(self._counts)

    def add(self, reason: str, name: str, detail: str) -> None:
        """Count an object.

        Args:
            reason: One of `REASONS`.
            detail: Sentence that describes the problem.
        """
        self._first = self._first or detail
        self._counts[reason] = self._counts.get(reason, 0) + 1
        examples = self._examples.setdefault(reason, [])
        if len(examples) < MAX_EXAMPLES:
            examples.append(name.encode(errors="backslashreplace").decode())

    def merge(self, other: Tally) -> None:
        """Add the counts of another tally."""
        self._first = self._first or other._first
        for reason, count in other._counts.items():
            self._counts[reason] = self._counts.get(reason, 0) + count
            examples = self._examples.setdefault(reason, [])
            examples += other._examples[reason][: MAX_EXAMPLES - len(examples)]

    def report(self) -> dict[str, LeftOut]:
        """Return the counts, in the order of `REASONS`."""
        return {
            reason: LeftOut(count=self._counts[reason], examples=tuple(self._examples[reason]))
            for reason in REASONS
            if reason in self._counts
        }

    def check(self, where: str) -> None:
        """Refuse to leave anything out.

        Raises:
            DatasetError: If something was counted; the message names the first and counts all by reason.
        """
        if not self:
            return
        total = sum(self._counts.values())
        others = f". In all {total} are left out of {where}: {describe(self.report())}" if total > 1 else ""
        raise DatasetError(
            f"{self._first}{others}. Remove or convert it, or index with on_left_out='report' "
            "(--on-left-out report), which counts what is left out and goes on"
        )


def describe(left_out: Mapping[str, LeftOut]) -> str:
    """Return reasons, counts and examples in one line."""
    return "; ".join(
        f"{each.count} {REASONS.get(reason, reason)} ({', '.join(map(repr, each.examples))}"
        + (", ...)" if each.count > len(each.examples) else ")")
        for reason, each in left_out.items()
    )


def is_clutter(name: str) -> bool:
    """Return whether a file, by its path below the dataset, was left there by a system or tool."""
    parts = name.lower().split("/")
    if not _CLUTTER.isdisjoint(parts) or parts[-1].endswith(":zone.identifier"):
        return True
    return is_hidden(name) and any(part.startswith(("._", ".trash", ".nfs")) for part in parts)


def is_hidden(name: str) -> bool:
    """Return whether the path, below the dataset or a shard's root, has a segment that begins with a dot."""
    if not name.startswith(".") and "/." not in name:
        return False
    return any(part.startswith(".") and part != ".." for part in name.split("/"))


def is_companion(name: str) -> bool:
    """Return whether a file, by its name, describes samples and is none itself."""
    base = name.rpartition("/")[2].lower()
    stem, _, extension = base.rpartition(".")
    return bool(stem and extension in _COMPANION_EXTENSIONS) or is_description(name)


def is_description(name: str) -> bool:
    """Return whether a file, by its name, describes the whole dataset, as a README does."""
    base = name.rpartition("/")[2].lower()
    stem, _, rest = base.partition(".")
    extension = rest.rpartition(".")[2]
    is_text = not rest or extension in _COMPANION_EXTENSIONS or extension in _DOCUMENT_EXTENSIONS
    return base in _COMPANION_NAMES or (stem in _COMPANION_NAMES and is_text)


def is_compressed_shard(name: str) -> bool:
    """Return whether a file, by its name, is a compressed shard."""
    return name.lower().endswith(COMPRESSED_SHARDS)
