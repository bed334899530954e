"""Compute the code version of a record of `cold_start`. A change of it repeats the record.

Every record depends on the models and on the code that runs processes. A peer's record also depends on its
own way and on the packages that the way needs. With a model that upriver constructs, it depends on that
construction too. So a peer's record outlasts every other change of upriver. Ours depend on all of upriver.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Collection, Mapping
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType

from benchmarks.cold_start.settings import PLAIN, WAYS, way_of
from benchmarks.cold_start.ways import LOADERS
from benchmarks.harness.children import ROOT
from benchmarks.harness.code_version import essence

EVERYBODYS = ("torch", "torchvision", "transformers")
"""Packages that make models, in our environment and, lent, in the peers' environment."""

PACKAGE = ("coldstart", "program", "store")
CONSTRUCTION: Mapping[str, tuple[str, ...]] = {
    "model/construction": (),
    "model/deferred_fills": (),
    "model/deferred_init": (),
    "model/weight_barrier": ("Gate",),  # the others use some of its functions
}
"""Parts of upriver that determine our times. Modules of the first part construct models for all ways; their
listed functions and classes take no part in that."""

OURS_ALONE = ("parts", "after")
"""Functions of `job` that no peer's run uses."""


class Versions:
    """Versions of the code and packages that records depend on.

    Args:
        root: Root of the code, with its ``src`` and ``benchmarks``.
        packages: Versions of the packages in the peers' environment.
    """

    def __init__(self, root: Path = ROOT, packages: Mapping[str, str] = MappingProxyType({})) -> None:
        self._benchmarks, self._package = root / "benchmarks" / "cold_start", root / "src" / "upriver"
        self._children = root / "benchmarks" / "harness" / "children.py"
        self._packages = packages
        self._known: dict[tuple[str, str], str] = {}

    def packages(self, run: str) -> dict[str, str]:
        """Return the packages of a run's way in the peers' environment."""
        return {name: self._packages.get(name, "") for name in WAYS[way_of(run)].needs}

    def of(self, do: str, run: str) -> str:
        """Return the version of a record.

        Args:
            do: One of ``job.DOES``.
            run: As `settings.Setting.runs` names it.
        """
        if (do, run) not in self._known:
            self._known[do, run] = self._of(do, run)
        return self._known[do, run]

    def _of(self, do: str, run: str) -> str:
        way = WAYS[way_of(run)]
        own = {each.__name__ for each in LOADERS[way_of(run)].__mro__}  # type: ignore[attr-defined]
        others = {each.__name__ for loader in LOADERS.values() for each in loader.__mro__} - own  # type: ignore[attr-defined]
        digest = sha256(repr((self._everybodys, self.packages(run))).encode())
        for name in ("bed", "models"):
            digest.update(_code(self._benchmarks / f"{name}.py"))
        digest.update(_code(self._children))
        digest.update(_code(self._benchmarks / "ways.py", without=others))
        digest.update(_code(self._benchmarks / "job.py", without=set(OURS_ALONE) - {do}))
        if not way.needs:
            digest.update(self._ours)
        elif not run.endswith(PLAIN):
            for name, without in CONSTRUCTION.items():
                digest.update(_code(self._package / "coldstart" / f"{name}.py", without=without))
        return digest.hexdigest()[:12]

    @cached_property
    def _everybodys(self) -> dict[str, str]:
        return {name: importlib.metadata.version(name) for name in EVERYBODYS}

    @cached_property
    def _ours(self) -> bytes:
        return b"".join(
            _code(path) for part in PACKAGE for path in sorted((self._package / part).rglob("*.py"))
        )


def _code(path: Path, *, without: Collection[str] = ()) -> bytes:
    """Return a module's code, with its name, without some of its functions and classes."""
    return "\n".join((path.name, essence(path.read_bytes(), without=without))).encode()
