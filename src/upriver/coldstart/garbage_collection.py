"""Tell which stored programs are in use, and remove those that are not.

Under each folder of programs stand small objects that say what goes on:

- ``used/DIGEST``: written when a program or a weights file is used; the store's time of it is the last use.
- ``uploads/BYTES-TOKEN``: an upload that is being written, and how many bytes it may add.
- ``collecting.json``: digests that are about to be removed.

A remover first writes down what it is about to remove, and then looks at each object's last use before it
removes that. An upload first notes a use, and then looks what is about to be removed. So one of the two sees
the other, whatever the order, in any store in which a GET or HEAD sees what was written before. A use of
weights is noted before that of the program, and looked at after it: no program stays without its weights.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from secrets import token_hex

import msgspec

from upriver.errors import ConfigError, ObjectNotFound, Overloaded, ProgramError, StoreError
from upriver.program.graph.artifact_store import (
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
"""A use is noted again after so long."""

LEAST_AGE_S = 4 * TOUCH_S
"""Nothing goes that was used in so many seconds: four notes, for a store that refuses some and clocks that
differ."""

FRESH_S = 3600.0
"""An upload or a removal that is older was broken off: writing a program takes minutes."""

_RENEW_S = FRESH_S / 4
"""A list of what is about to be removed is written anew after so long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Removed:
    """Describe a program, or weights, that went or would go.

    Attributes:
        path: Of the graph, or the weights file.
        digest: Of the program, or the weights.
        nbytes: Of all its objects.
        used_s: When it was used last, in seconds since 1970.
    """

    path: str
    digest: str
    nbytes: int
    used_s: float


@dataclass(kw_only=True, slots=True)
class ProgramFolder:
    """List what lies under one folder of programs.

    Attributes:
        programs: By digest, the objects of each.
        weights: Likewise.
        uploads: Notes of uploads that are being written, or were broken off.
        rests: Files of a file store that uploads left when they were cut off, or are still writing.
        used: By digest, when it was used last.
    """

    programs: dict[str, list[ObjectInfo]] = field(default_factory=dict)
    weights: dict[str, list[ObjectInfo]] = field(default_factory=dict)
    uploads: list[ObjectInfo] = field(default_factory=list)
    rests: list[ObjectInfo] = field(default_factory=list)
    used: dict[str, float] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all programs and weights, and of what is left of cut off ones."""
        whole = (info for each in (self.programs, self.weights) for infos in each.values() for info in infos)
        return sum(info.size for info in (*whole, *self.rests))

    def last_use(self, digest: str, infos: Sequence[ObjectInfo]) -> float:
        """Return when a program or weights file was used, or written, last."""
        return max([self.used.get(digest, 0.0), *(info.modified_s for info in infos)])


def folders(store: Store, prefix: str, *, tenants: Collection[str] = (), shared: bool = False) -> list[str]:
    """Return the folders of programs in a store.

    Args:
        store: The store.
        prefix: Where upriver keeps its own objects.
        tenants: Those whose folders are wanted; all of them if empty.
        shared: Whether the folder is wanted, too, of what was pushed, and taken by servers without tenants.

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
    """List a folder of programs.

    Args:
        store: The store.
        prefix: The folder.
        used: Whether to list when they were used, too.

    Raises:
        StoreError: If the store cannot be listed.
    """
    found = ProgramFolder(uploads=list(store.list(f"{prefix}/uploads")))
    unreachable: list[Unreachable] = []
    for kind, into in (("programs", found.programs), ("weights", found.weights)):
        for info in store.list(f"{prefix}/{kind}", on_unreachable=unreachable.append):
            digest = info.path.removeprefix(f"{prefix}/{kind}/").partition("/")[0].partition(".")[0]
            into.setdefault(digest, []).append(info)
    for entry in unreachable:
        if entry.reason == "upload":
            with suppress(ObjectNotFound):  # it has its own name by now
                found.rests.append(store.head(entry.path))
    if used:
        notes = store.list(f"{prefix}/used")
        found.used = {info.path.rpartition("/")[2]: info.modified_s for info in notes}
    return found


# ------------------------------------------------------------------------------------------- using


def note_use(store: Store, prefix: str, digests: Collection[str]) -> None:
    """Say that programs and weights are used, weights first.

    Raises:
        StoreError: If the store cannot be written.
    """
    for digest in digests:
        store.put(_used_path(prefix, digest), b"used\n")


def check_staying(store: Store, prefix: str, digests: Collection[str]) -> None:
    """Insist that nobody is about to remove these; to be called after `note_use`, before relying on them.

    Raises:
        Overloaded: If somebody is.
        StoreError: If the store cannot be read.
    """
    with suppress(ObjectNotFound):
        if not _going(store, prefix).isdisjoint(digests):
            raise Overloaded("unused programs are being removed from the store", retry_after_s=5.0)


def _going(store: Store, prefix: str) -> set[str]:
    """Return what somebody is about to remove.

    Raises:
        ObjectNotFound: If nobody is.
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
    """Note an upload in the store, and have it checked against what is stored there.

    Two who upload at once see each other, in other processes too, so that together they cannot go beyond what
    either may; close to that both may be refused.

    Args:
        store: The store.
        prefix: The folder of programs.
        objects: Path of each object that is about to be written, and its bytes.
        check: Called with the bytes that are stored, that others are writing, and that these objects add.
            What it raises ends the upload.

    Returns:
        The note, for `end_upload`.

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
    """Check an upload as `begin_upload` does, before it has come; nothing is noted.

    Args:
        store: The store.
        prefix: The folder of programs.
        path: The graph's; a program that is there adds nothing.
        nbytes: Of the upload.
        check: As for `begin_upload`.

    Raises:
        StoreError: If the store cannot be listed.
    """
    found = survey(store, prefix, used=False)
    is_there = any(info.path == path for infos in found.programs.values() for info in infos)
    check(found.nbytes, _coming(found), 0 if is_there else nbytes)


def end_upload(store: Store, note: str) -> None:
    """Take a note back; one that stays counts for an hour.

    Nothing is raised: a store that does not let it be deleted has what was uploaded all the same.
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
    sizes = {
        info.path: info.size
        for each in (found.programs, found.weights)
        for infos in each.values()
        for info in infos
    }
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
    """Decide what goes.

    Args:
        programs: By digest, when each was used last.
        weights: Likewise.
        needs: By program, the weights that its graph names; a graph that names none is damaged.
        before_s: What was used at this time or later stays.
        only: Where some are named, nothing goes but these programs, and programs of these weights, and their
            weights.

    Returns:
        Programs and weights that go. Weights stay as long as a program that stays names them.
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
    """Check what `collect` is asked for.

    Raises:
        ConfigError: If the time is shorter than `LEAST_AGE_S`.
        ProgramError: If what is named is no digest.
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
    """Remove programs and weights that were not used for long; those that are used meanwhile stay.

    Args:
        store: The store.
        prefix: The folder of programs.
        older_than_s: Seconds since the last use, `LEAST_AGE_S` at least.
        only: Digests of programs or weights; nothing else goes then.
        dry_run: Tell what would go, and remove nothing.
        on_progress: Called with what is done and what there is to do.

    Returns:
        What was removed, programs first.

    Raises:
        StoreError: If the store cannot be listed, read or written. What was removed until then is whole: a
            graph goes before its weights.
    """
    before_s = time.time() - older_than_s
    place = survey(store, prefix)
    found = {
        kind: {digest: infos for digest, infos in each.items() if is_digest(digest)}
        for kind, each in (("programs", place.programs), ("weights", place.weights))
    }
    last = {
        kind: {digest: place.last_use(digest, infos) for digest, infos in each.items()}
        for kind, each in found.items()
    }
    needs = _needs(store, prefix, found["programs"], on_progress)
    gone = unused(last["programs"], last["weights"], needs, before_s=before_s, only=only)
    going = [
        (
            Removed(
                path=(graph_path if kind == "programs" else weights_path)(prefix, digest),
                digest=digest,
                nbytes=sum(info.size for info in found[kind][digest]),
                used_s=last[kind][digest],
            ),
            found[kind][digest],
        )
        for kind, digests in zip(found, gone, strict=True)
        for digest in sorted(digests)
    ]
    if dry_run:
        return [removed for removed, _ in going]
    done = _remove(store, prefix, going, before_s, on_progress)
    for info in (*place.uploads, *place.rests):
        if info.modified_s < before_s:
            _delete(store, info.path)
    for digest, used_s in place.used.items():
        if used_s < before_s and digest not in found["programs"] and digest not in found["weights"]:
            _delete(store, f"{prefix}/used/{digest}")
    return done


def why_kept(store: Store, prefix: str, digest: str, *, looked_at: Sequence[str], older_than_s: float) -> str:
    """Say why `collect` removed nothing of a digest, and what to ask for instead.

    Args:
        store: The store.
        prefix: Where upriver keeps its own objects.
        digest: Of a program, or weights.
        looked_at: The folders that `collect` was called for.
        older_than_s: As for `collect`.

    Raises:
        StoreError: If the store cannot be listed or read.
    """
    every = folders(store, prefix, shared=True)
    holding = [folder for folder in every if _holds(store, folder, digest)]
    seen = [folder for folder in holding if folder in looked_at]
    if seen:
        return _why_kept_there(store, seen[0], digest, older_than_s)
    if not holding:
        return f"no program and no weights under {prefix!r} in store {store.name!r} have digest {digest}"
    missed = holding[-1]
    how = "--shared" if missed == prefix else f"--tenant {missed.rpartition('/')[2]}"
    return f"{digest} lies under {missed!r}, which was not looked at; add {how}"


def _holds(store: Store, folder: str, digest: str) -> bool:
    return any(store.exists(path(folder, digest)) for path in (graph_path, weights_path))


def _why_kept_there(store: Store, folder: str, digest: str, older_than_s: float) -> str:
    place = survey(store, folder)
    shown = f"{digest} under {folder!r} stays"
    infos = [*place.programs.get(digest, ()), *place.weights.get(digest, ())]
    unused_s = time.time() - place.last_use(digest, infos)
    if unused_s <= older_than_s:
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


def _remove(
    store: Store,
    prefix: str,
    going: Sequence[tuple[Removed, Sequence[ObjectInfo]]],
    before_s: float,
    on_progress: Callable[[int, int], None],
) -> list[Removed]:
    """Remove what is still unused, one after the other, and say so in the store as long as it goes on."""
    with suppress(ObjectNotFound):
        if _going(store, prefix):
            raise StoreError(
                f"another removal goes on in store {store.name!r}, or was broken off in the last hour: "
                f"wait, or delete {_plan_path(prefix)!r}"
            )
    plan = msgspec.json.encode([removed.digest for removed, _ in going])
    done: list[Removed] = []
    written = -math.inf
    try:
        for number, (removed, infos) in enumerate(going):
            if time.monotonic() - written > _RENEW_S:
                store.put(_plan_path(prefix), plan)
                written = time.monotonic()
            if not _used_since(store, prefix, removed.digest, before_s):
                # The graph, or the manifest, first: without it nobody takes what is left for whole.
                for info in sorted(infos, key=lambda info: not info.path.endswith(".json")):
                    _delete(store, info.path)
                _delete(store, _used_path(prefix, removed.digest))
                done.append(removed)
            on_progress(number + 1, len(going))
    finally:
        if going:
            _delete(store, _plan_path(prefix))
    return done


def _delete(store: Store, path: str) -> None:
    with suppress(ObjectNotFound):
        store.delete(path)


def _used_since(store: Store, prefix: str, digest: str, before_s: float) -> bool:
    with suppress(ObjectNotFound):
        return store.head(_used_path(prefix, digest)).modified_s >= before_s
    return False
