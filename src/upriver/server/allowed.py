"""Which code of this machine's own clients may have run: by name, before anything is imported.

The operator names packages, modules (``my_package.data``, with what lies beneath) and single callables
(``my_package.data:birds``). What a package allows is its own: a callable that it has imported from another
one (``from subprocess import run``) needs to be named by itself.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from upriver.errors import ConfigError, Forbidden
from upriver.protocol import BY_DEFAULT, CodeRef
from upriver.text import printable

_PART = "[A-Za-z][A-Za-z0-9_]*"
_PATH = rf"{_PART}(?:\.{_PART})*"
_NAME = re.compile(rf"{_PATH}(?::{_PATH})?", re.ASCII)


def require_allow(allow: Sequence[str]) -> None:
    """Check what an operator allows, once, at the border.

    Raises:
        ConfigError: If it is no sequence of names.
    """
    if isinstance(allow, str):
        raise ConfigError(f"allow is a list of names, got the text {allow!r}")
    for name in allow:
        if not isinstance(name, str) or _NAME.fullmatch(name) is None:
            raise ConfigError(
                "allow names packages, modules or package.module:callable, no part with an underscore first; "
                f"got {printable(repr(name), 80)}"
            )


def not_here(allow: Sequence[str]) -> list[str]:
    """Those names whose package, or module, this machine does not have; nothing is imported to see that."""
    packages = {name: name.partition(":")[0].partition(".")[0] for name in allow}
    begins = [str(Path.cwd())]  # where the processes that run it look first
    return [
        name for name, top in packages.items() if not (PathFinder.find_spec(top, begins) or find_spec(top))
    ]


def check_code(code: CodeRef, allow: Sequence[str]) -> None:
    """Whether a dataset may be made, and collated as is asked for.

    Raises:
        Forbidden: If not; says what is allowed.
    """
    collate = None if code.collate is None else code.collate.name
    for name in (code.name, *([] if collate in (None, BY_DEFAULT) else [str(collate)])):
        _check_name(name, allow)


def check_found(name: str, steps: Sequence[object], allow: Sequence[str]) -> None:
    """Whether a name that is allowed leads to what may be run.

    Args:
        name: ``package.module:callable``.
        steps: What each part of the name behind the colon leads to, the callable last.
        allow: The operator's.

    Raises:
        Forbidden: If it goes through a module that was imported there, or another package's code was meant to
            be allowed along with that one.
    """
    module = next((step for step in steps if isinstance(step, ModuleType)), None)
    if module is not None:
        raise Forbidden(f"{name} goes through module {module.__name__}, which is to be named itself")
    found = steps[-1]
    if name in allow or not (inspect.isclass(found) or inspect.isroutine(found)):
        return
    home = getattr(found, "__module__", None) or "somewhere else"
    if _package(str(home)) != _package(name):
        raise Forbidden(f"{name} comes from {home}: it is allowed only where it is named in full")


def _check_name(name: str, allow: Sequence[str]) -> None:
    if not allow:
        raise Forbidden(
            f"{name} is not allowed here: this server runs no code of its own; "
            f"`upriver worker --allow {name}` does"
        )
    if any(part.startswith("_") for part in re.split(r"[.:]", name)):
        raise Forbidden(f"{name} is not allowed here: no part of a name may begin with an underscore")
    if not any(_covers(each, name) for each in allow):
        raise Forbidden(f"{name} is not allowed here; allowed are {', '.join(allow)}")


def _covers(allowed: str, name: str) -> bool:
    if ":" in allowed:
        return name == allowed
    return f"{name.partition(':')[0]}.".startswith(f"{allowed}.")


def _package(name: str) -> str:
    return re.split(r"[.:]", name)[0]
