"""Import modules under the names that they had in 0.1, with a warning; 0.3 will have the new names alone."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "upriver.client": "upriver.rpc",
    "upriver.client.embedded": "upriver.rpc.local_server",
    "upriver.client.transport": "upriver.rpc.client",
    "upriver.coldstart.execution": "upriver.coldstart.roofline",
    "upriver.coldstart.links": "upriver.coldstart.link_cache",
    "upriver.pipeline.tensorfile": "upriver.pipeline.formats.tensorfile",
    "upriver.pipeline.wavfile": "upriver.pipeline.formats.wavfile",
    "upriver.profile.latency_files": "upriver.profile.latency.serialization",
    "upriver.program.remember": "upriver.program.split.proof_cache",
}
"""Inner modules that scripts are known to import."""


class MovedModules(MetaPathFinder, Loader):
    """Find a module of `MOVED`. The last finder of ``sys.meta_path``, so it costs other imports nothing."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for an old name, and None for any other."""
        return ModuleSpec(fullname, self) if fullname in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        """Put the module of the new name in the place of the old one, and warn."""
        old, new = module.__name__, MOVED[module.__name__]
        warnings.warn(f"{old} is {new} now; 0.3 will not have the old name", DeprecationWarning, stacklevel=2)
        sys.modules[old] = importlib.import_module(new)
