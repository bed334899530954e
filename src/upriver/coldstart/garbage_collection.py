"""Track which stored programs, weights and kept features are in use, and remove the others.

Small objects in each folder of programs record the state:

- ``used/DIGEST``: written when a program, a weights file or a stretch's features are used. Its modification
  time is the last use.
- ``uploads/BYTES-TOKEN``: an upload in progress, and the most bytes that it may add.
- ``collecting.json``: digests that are about to be removed.

A remover writes its plan first, and checks each object's last use before it removes the object. An upload
notes a use first, and checks the plan afterwards. So one of the two sees the other, in any order, in any
store whose GET or HEAD sees earlier writes. A use of weights is noted before that of the program, and checked
after it. So no program stays without its weights.

Kept features are shards, ``features/STRETCH/rows-COUNT-TOKEN.safetensors``. Rows can be computed again at any
time, so their removal needs no plan: a server that uses a removed shard loses rows only.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from secrets import token_hex
from typing import Literal

import msgspec

from upriver.errors import ConfigError, ObjectNotFound, Overloaded, ProgramError, StoreError
from upriver.program.graph.artifact_paths import (
    DIGEST,
    check_digest,
    graph_path,
    is_digest,
    weights_digest_of,
    weights_path,
)
from upriver.program.graph.caps import DEFAULT_CAPS
from upriver.program.graph.fetch import get_at_most
from upriver.store import ObjectInfo, Store
from upriver.store.local import Unreachable
from upriver.text import seconds_text

TOUCH_S = 3600.0
"""Interval after which a use is noted again."""

LEAST_AGE_S = 4 * TOUCH_S
"""Age below which nothing is removed: four notes, for a store that refuses some and for clocks that
differ."""

FRESH_S = 3600.0
"""Age after which an upload or a removal counts as interrupted. Writing a program takes minutes."""

_RENEW_S = FRESH_S / 4
"""Interval at which a removal rewrites its plan."""

_SHARD = re.compile(rf"({DIGEST.pattern})/rows-[0-9]{{1,9}}-[0-9a-f]{{16}}\.safetensors")
"""Names of shards below ``features/``. Other names are left alone."""


Kind = Literal["program", "weights", "features"]
"""Kind of a `Removed`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Removed:
    """Program, weights file, or features of a stretch, that were or would be removed.

    Attributes:
        path: Path of the graph, of the weights file, or of the folder of features.
        nbytes: Bytes of all its objects.
        used_s: Time of its last use, in seconds since 1970.
    """

    kind: Kind
    path: str
    digest: str
    nbytes: int
    used_s: float


@dataclass(kw_only=True, slots=True)
class ProgramFolder:
    """Content of one folder of programs, weights and kept features.

    Attributes:
        features: Shards of kept rows, by digest of their stretch.
        uploads: Notes of uploads in progress, or interrupted ones.
        rests: Files of a file store that interrupted uploads left, or that uploads in progress are writing.
        used: Time of the last use, by digest.
    """

    programs: dict[str, list[ObjectInfo]] = field(default_factory=dict)
    weights: dict[str, list[ObjectInfo]] = field(default_factory=dict)
    features: dict[str, list[ObjectInfo]] = field(default_factory=dict)
    uploads: list[ObjectInfo] = field(default_factory=list)
    rests: list[ObjectInfo] = field(default_factory=list)
    used: dict[str, float] = field(default_factory=dict)

    @property
    def objects(self) -> list[ObjectInfo]:
        """All objects of programs, weights and kept features."""
        kinds = (self.programs, self.weights, self.features)
        return [info for each in kinds for infos in each.values() for info in infos]

    @property
    def nbytes(self) -> int:
        """Bytes of all programs, weights and kept features, and of unfinished files."""
        return sum(info.size for info in (*self.objects, *self.rests))

    def last_use(self, digest: str, infos: Sequence[ObjectInfo]) -> float:
        """Return the time at which objects of a digest were last used or written."""
        return max([self.used.get(digest, 0.0), *(info.modified_s for info in infos)])


def folders(store: Store, prefix: str, *, tenants: Collection[str] = (), shared: bool = False) -> list[str]:
    """Return the folders of programs in a store.

    Args:
        tenants: Tenants whose folders are wanted; all tenants if empty.
        shared: If true, include the shared folder, of programs that were pushed or that servers without
            tenants hold.

    Raises:
        ConfigError: If a tenant has no folder.
        StoreError: If the store cannot be listed.
    """
    there = store.folders(f"{prefix}/tenants")
    if missing := sorted(set(tenants) - set(there)):
        raise ConfigError(
            f"tenant {missing[0]!r} has stored nothing under {prefix!r} in store {store.name!r}"
        )
    own = [f"{prefix}/tenants/{name}" for name in there if not tenants or name in tenants]
    return [*own, *([prefix] if shared else [])]


def survey(store: Store, prefix: str, *, used: bool = True) -> ProgramFolder:
    """List a folder of programs, weights and kept features.

    Raises:
        StoreError: If the store cannot be listed.
    """
    found = ProgramFolder(uploads=list(store.list(f"{prefix}/uploads")))
    unreachable: list[Unreachable] = []
    for kind, into in (("programs", found.programs), ("weights", found.weights)):
        for info in store.list(f"{prefix}/{kind}", on_unreachable=unreachable.append):
            digest = info.path.removeprefix(f"{prefix}/{kind}/").partition("/")[0].partition(".")[0]
            into.setdefault(digest, []).append(info)
    for info in store.list(f"{prefix}/features", on_unreachable=unreachable.append):
        if shard := _SHARD.fullmatch(info.path.removeprefix(f"{prefix}/features/")):
            found.features.setdefault(shard[1], []).append(info)
    for entry in unreachable:
        if entry.reason == "upload":
            with suppress(ObjectNotFound):  # the upload has ended and the file has its final name
                found.rests.append(store.head(entry.path))
    if used:
        notes = store.list(f"{prefix}/used")
        found.used = {info.path.rpartition("/")[2]: info.modified_s for info in notes}
    return found


def features_path(prefix: str, stretch_digest: str) -> str:
    """Return the folder of a stretch's kept features."""
    return f"{prefix}/features/{check_digest(stretch_digest)}"


# ------------------------------------------------------------------------------------------- using


def note_use(store: Store, prefix: str, digests: Collection[str]) -> None:
    """Record the use of programs, weights or kept features; of a program, weights first.

    Raises:
        StoreError: If the store cannot be written.
    """
    for digest in digests:
        store.put(_used_path(prefix, digest), b"used\n")


def check_staying(store: Store, prefix: str, digests: Collection[str]) -> None:
    """Check that no removal plans these digests. Call this after `note_use` and before relying on them.

    Raises:
        Overloaded: If a removal plans one of them.
        StoreError: If the store cannot be read.
    """
    with suppress(ObjectNotFound):
        if not _going(store, prefix).isdisjoint(digests):
            raise Overloaded("unused programs are being removed from the store", retry_after_s=5.0)


def _going(store: Store, prefix: str) -> set[str]:
    """Return the digests that a removal plans.

    Raises:
        ObjectNotFound: If no removal runs.
    """
    path = _plan_path(prefix)
    if not _is_fresh(store.head(path)):
        return set()
    try:
        return msgspec.json.decode(store.get(path), type=set[str])
    except msgspec.DecodeError as error:
        raise StoreError(f"object {path!r} in store {store.name!r} is damaged: {error}") from None


def _plan_path(prefix: str) -> str:
    return f"{prefix}/collecting.json"


def _used_path(prefix: str, digest: str) -> str:
    return f"{prefix}/used/{check_digest(digest)}"


def _is_fresh(info: ObjectInfo) -> bool:
    return time.time() - info.modified_s < FRESH_S


# --------------------------------------------------------------------------------------- uploading


def begin_upload(
    store: Store, prefix: str, objects: Mapping[str, int], *, check: Callable[[int, int, int], None]
) -> str:
    """Note an upload in the store, and check it against the stored bytes.

    Concurrent uploads see each other, in other processes too. Together they cannot exceed a limit that holds
    for each. Close to that limit both may be refused.

    Args:
        check: Function of the stored bytes, the bytes of other uploads, and the bytes that these objects add.
            Its error ends the upload.

    Raises:
        StoreError: If the store cannot be listed or written.
    """
    note = f"{prefix}/uploads/{sum(objects.values())}-{token_hex(8)}"
    store.put(note, b"upload\n")
    try:
        found = survey(store, prefix, used=False)
        for info in found.uploads:
            if not _is_fresh(info):
                end_upload(store, info.path)
        check(found.nbytes, _coming(found, but=note), _added(found, objects))
    except BaseException:
        end_upload(store, note)
        raise
    return note


def check_upload(
    store: Store, prefix: str, path: str, nbytes: int, *, check: Callable[[int, int, int], None]
) -> None:
    """Check an upload as `begin_upload` does, before its bytes arrive, without a note.

    Args:
        path: Path of the graph. A stored program adds nothing.

    Raises:
        StoreError: If the store cannot be listed.
    """
    found = survey(store, prefix, used=False)
    is_there = any(info.path == path for info in found.objects)
    check(found.nbytes, _coming(found), 0 if is_there else nbytes)


def end_upload(store: Store, note: str) -> None:
    """Delete the note of an upload. A note that stays counts for an hour.

    Store errors are ignored: the uploaded objects exist even if the store refuses the deletion.
    """
    with suppress(StoreError):
        store.delete(note)


def _coming(found: ProgramFolder, *, but: str = "") -> int:
    sizes = [
        info.path.rpartition("/")[2].partition("-")[0]
        for info in found.uploads
        if info.path != but and _is_fresh(info)
    ]
    return sum(int(size) for size in sizes if size.isascii() and size.isdigit() and len(size) < 19)


def _added(found: ProgramFolder, objects: Mapping[str, int]) -> int:
    sizes = {info.path: info.size for info in found.objects}
    return sum(max(0, nbytes - sizes.get(path, 0)) for path, nbytes in objects.items())


# ---------------------------------------------------------------------------------------- removing


def unused(
    programs: Mapping[str, float],
    weights: Mapping[str, float],
    needs: Mapping[str, str],
    *,
    before_s: float,
    only: Collection[str] = (),
) -> tuple[set[str], set[str]]:
    """Decide which programs and weights to remove.

    Args:
        needs: Weights that each program's graph names. A graph that names none is damaged.
        before_s: Time of the oldest use that protects from removal.
        only: If not empty, remove only these programs, programs of these weights, and their weights.

    Returns:
        Digests of programs and of weights to remove. Weights stay as long as a remaining program names them.
    """

    def asked(digest: str) -> bool:
        return not only or digest in only

    gone = {
        digest
        for digest, used_s in programs.items()
        if used_s < before_s and (asked(digest) or asked(needs.get(digest, digest)))
    }
    kept = {needs[digest] for digest in programs.keys() - gone if digest in needs}
    let_go = {needs[digest] for digest in gone if digest in needs}
    return gone, {
        digest
        for digest, used_s in weights.items()
        if used_s < before_s and digest not in kept and (asked(digest) or digest in let_go)
    }


def check_asked(older_than_s: float, only: Collection[str]) -> None:
    """Check the arguments of `collect`.

    Raises:
        ConfigError: If the time is shorter than `LEAST_AGE_S`.
        ProgramError: If a name is no digest.
    """
    if not older_than_s >= LEAST_AGE_S:
        raise ConfigError(
            f"what was used in the last {LEAST_AGE_S / 3600:g} hours is never removed; got "
            f"{seconds_text(older_than_s)} s"
        )
    for digest in only:
        check_digest(digest)


def collect(
    store: Store,
    prefix: str,
    *,
    older_than_s: float,
    only: Collection[str] = (),
    dry_run: bool = False,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Removed]:
    """Remove programs, weights and kept features that were not used for long. Those used meanwhile stay.

    Features of a removed program stay until they are unused themselves.

    Args:
        only: Digests of programs, weights or stretches; if not empty, only these are removed.
        on_progress: Function of the number of finished steps and of all steps.

    Returns:
        The removed programs, then weights, then features.

    Raises:
        StoreError: If the store cannot be listed, read or written. Earlier removals are complete: a graph
            goes before its weights.
    """
    before_s = time.time() - older_than_s
    place = survey(store, prefix)
    programs, weights, features = [
        {digest: place.last_use(digest, infos) for digest, infos in each.items() if is_digest(digest)}
        for each in (place.programs, place.weights, place.features)
    ]
    needs = _needs(store, prefix, programs, on_progress)
    gone, let_go = unused(programs, weights, needs, before_s=before_s, only=only)
    planned = [
        *_objects_of(prefix, place, "program", gone),
        *_objects_of(prefix, place, "weights", let_go),
    ]
    idle = [
        digest for digest, used_s in features.items() if used_s < before_s and (not only or digest in only)
    ]
    unplanned = _objects_of(prefix, place, "features", idle)
    if dry_run:
        return [removed for removed, _ in (*planned, *unplanned)]
    steps = count(1)

    def on_step() -> None:
        on_progress(next(steps), len(planned) + len(unplanned))

    done = _remove_by_plan(store, prefix, planned, before_s, on_step)
    for removed, infos in unplanned:
        if _remove(store, prefix, removed, infos, before_s):
            done.append(removed)
        on_step()
    for info in (*place.uploads, *place.rests):
        if info.modified_s < before_s:
            _delete(store, info.path)
    for digest, last_s in place.used.items():
        kinds = (place.programs, place.weights, place.features)
        if last_s < before_s and not any(digest in each for each in kinds):
            _delete(store, f"{prefix}/used/{digest}")
    return done


_Going = list[tuple[Removed, list[ObjectInfo]]]
"""Unused digests, with their objects."""


def _objects_of(prefix: str, place: ProgramFolder, kind: Kind, digests: Collection[str]) -> _Going:
    """Return digests of one kind in order, with their objects."""
    kinds: dict[Kind, tuple[dict[str, list[ObjectInfo]], Callable[[str, str], str]]] = {
        "program": (place.programs, graph_path),
        "weights": (place.weights, weights_path),
        "features": (place.features, features_path),
    }
    objects, path_of = kinds[kind]
    return [
        (
            Removed(
                kind=kind,
                path=path_of(prefix, digest),
                digest=digest,
                nbytes=sum(info.size for info in objects[digest]),
                used_s=place.last_use(digest, objects[digest]),
            ),
            objects[digest],
        )
        for digest in sorted(digests)
    ]


def why_kept(store: Store, prefix: str, digest: str, *, looked_at: Sequence[str], older_than_s: float) -> str:
    """Explain why `collect` removed nothing of a digest, and name the option that would help.

    Raises:
        StoreError: If the store cannot be listed or read.
    """
    every = folders(store, prefix, shared=True)
    holding = [each for each in every if _holds(store, each, digest)]
    seen = [folder for folder in holding if folder in looked_at]
    if seen:
        return _why_kept_there(store, seen[0], digest, older_than_s)
    if not holding:
        return (
            f"no program, no weights and no features under {prefix!r} in store {store.name!r} have digest "
            f"{digest}"
        )
    missed = holding[-1]
    how = "--shared" if missed == prefix else f"--tenant {missed.rpartition('/')[2]}"
    return f"{digest} lies under {missed!r}, which was not looked at; add {how}"


def _holds(store: Store, folder: str, digest: str) -> bool:
    """Return True if a program, weights or kept features with this digest are in a folder."""
    if any(store.exists(path(folder, digest)) for path in (graph_path, weights_path)):
        return True
    shards = store.list(features_path(folder, digest), on_unreachable=lambda _: None)
    return any(_SHARD.fullmatch(info.path.removeprefix(f"{folder}/features/")) for info in shards)


def _why_kept_there(store: Store, folder: str, digest: str, older_than_s: float) -> str:
    place = survey(store, folder)
    shown = f"{digest} under {folder!r} stays"
    kinds = (place.programs, place.weights, place.features)
    unused_s = time.time() - place.last_use(digest, [info for each in kinds for info in each.get(digest, ())])
    if unused_s <= older_than_s or digest not in place.weights:  # a moment has passed since
        asked_h = older_than_s / 3600
        return f"{shown}: it was used {unused_s / 3600:.1f} h ago; --older-than asks for {asked_h:g} h"
    return f"{shown}: a program that was used since needs these weights"


def _needs(
    store: Store, prefix: str, programs: Collection[str], on_progress: Callable[[int, int], None]
) -> dict[str, str]:
    """Return the weights that each program's graph names."""
    needs: dict[str, str] = {}
    for number, digest in enumerate(programs):
        with suppress(ObjectNotFound, ProgramError):
            needs[digest] = weights_digest_of(
                get_at_most(store, graph_path(prefix, digest), DEFAULT_CAPS.graph_bytes)
            )
        on_progress(number + 1, len(programs))
    return needs


def _remove_by_plan(
    store: Store, prefix: str, going: _Going, before_s: float, on_step: Callable[[], None]
) -> list[Removed]:
    """Remove unused programs and weights one by one, with a plan in the store while the removal runs."""
    with suppress(ObjectNotFound):
        if _going(store, prefix):
            raise StoreError(
                f"another removal runs in store {store.name!r}, or was interrupted in the last hour: "
                f"wait, or delete {_plan_path(prefix)!r}"
            )
    plan = msgspec.json.encode([removed.digest for removed, _ in going])
    done: list[Removed] = []
    written = -math.inf
    try:
        for removed, infos in going:
            if time.monotonic() - written > _RENEW_S:
                store.put(_plan_path(prefix), plan)
                written = time.monotonic()
            if _remove(store, prefix, removed, infos, before_s):
                done.append(removed)
            on_step()
    finally:
        if going:
            _delete(store, _plan_path(prefix))
    return done


def _remove(
    store: Store, prefix: str, removed: Removed, infos: Sequence[ObjectInfo], before_s: float
) -> bool:
    """Remove the objects of a digest, unless it was used since; return whether they were removed."""
    if _used_since(store, prefix, removed.digest, before_s):
        return False
    # Remove the graph, or the manifest, first: without it no reader takes the rest for complete.
    for info in sorted(infos, key=lambda info: not info.path.endswith(".json")):
        _delete(store, info.path)
    _delete(store, _used_path(prefix, removed.digest))
    return True


def _delete(store: Store, path: str) -> None:
    with suppress(ObjectNotFound):
        store.delete(path)


def _used_since(store: Store, prefix: str, digest: str, before_s: float) -> bool:
    with suppress(ObjectNotFound):
        return store.head(_used_path(prefix, digest)).modified_s >= before_s
    return False
