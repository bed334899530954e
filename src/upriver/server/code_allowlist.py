"""Decide which code of this machine clients may run, by name and by the place of its definition.

The operator names packages, modules (``my_package.data``, with all modules beneath) and single callables
(``my_package.data:birds``). A requested name is compared with these before anything is imported. Then the
name is looked up without running code. It must lead to a class or function that the source of an allowed
module defines. Any other object (imported, an instance, a `functools.partial`) is allowed only by its full
name.
"""

from __future__ import annotations

import functools
import re
import symtable
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Literal

from upriver.errors import ConfigError, Forbidden
from upriver.protocol import BY_DEFAULT, CodeRef
from upriver.text import printable

_PART = "[A-Za-z][A-Za-z0-9_]*"
_PATH = rf"{_PART}(?:\.{_PART})*"
_NAME = re.compile(rf"{_PATH}(?::{_PATH})?", re.ASCII)

_CACHED = type(functools.lru_cache(lambda: None))
"""Type of functions cached by `functools.lru_cache`; nothing can override how its attributes are read."""


def require_allow(allow: Sequence[str]) -> None:
    """Raise `ConfigError` unless the operator's allowlist is a sequence of names."""
    if isinstance(allow, str):
        raise ConfigError(f"allow is a list of names, got the text {allow!r}")
    for name in allow:
        if not isinstance(name, str) or _NAME.fullmatch(name) is None:
            raise ConfigError(
                "allow names packages, modules or package.module:callable, no part with an underscore first; "
                f"got {printable(repr(name), 80)}"
            )


def check_here(allow: Sequence[str]) -> None:
    """Check that this machine has the modules of an allowlist, without importing them.

    Raises:
        ConfigError: If a module is missing; the message names it. A module that its package creates on import
            is not found, either: allow the package instead.
    """
    begins = [str(Path.cwd()), *sys.path]  # the processes that run the code search here first
    for name in allow:
        module = name.partition(":")[0]
        if missing := _missing(module, begins):
            raise ConfigError(
                f"allow names {name!r}, and there is no module {missing!r} here; a module is looked for in "
                "the folder that the worker was started in, and among the packages that are installed"
            )


def _missing(module: str, begins: Sequence[str]) -> str:
    """Return the first package or module on a module's path that is not found; empty if all are."""
    parts = module.split(".")
    spec = PathFinder.find_spec(parts[0], begins) or find_spec(parts[0])
    for number in range(1, len(parts)):
        if spec is None:
            return ".".join(parts[:number])
        spec = _beneath(".".join(parts[: number + 1]), spec.submodule_search_locations or ())
    return module if spec is None else ""


def _beneath(module: str, places: Iterable[str]) -> ModuleSpec | None:
    """Return the spec of a package's module found in these folders, without importing the package."""
    where = list(places)
    # Use the last name alone: with the full name, namespace packages look for imported parents.
    found = PathFinder.find_spec(module.rpartition(".")[2], where)
    for finder in sys.meta_path:
        if found is None and finder is not PathFinder:
            with suppress(Exception):  # other import systems may raise anything
                found = finder.find_spec(module, where)
    return found


def check_code(code: CodeRef, allow: Sequence[str]) -> None:
    """Check that a request's dataset and collation are allowed.

    Raises:
        Forbidden: If one is not; the message says which names are allowed.
    """
    collate = None if code.collate is None else code.collate.name
    for name in (code.name, *([] if collate in (None, BY_DEFAULT) else [str(collate)])):
        _check_name(name, allow)


def look_up(module: ModuleType, name: str, allow: Sequence[str]) -> list[Any]:
    """Return the object at each part of a name behind its colon, the callable last.

    Only a name that is allowed in full is looked up as Python does. For others no ``__getattr__``, descriptor
    or metaclass runs, and the list ends early if only those could tell.

    Args:
        name: ``package.module:callable``.

    Raises:
        AttributeError: If an attribute does not exist.
    """
    steps, owner = list[Any](), module
    for part in name.partition(":")[2].split("."):
        if name in allow:
            owner = getattr(owner, part)
        elif _is_a(owner, type) or _is_a(owner, ModuleType):
            owner = _attribute(owner, part)
        else:
            break
        steps.append(owner)
    return steps


def check_found(name: str, steps: Sequence[Any], allow: Sequence[str]) -> None:
    """Check that an allowed name leads to code that may run.

    Args:
        steps: Result of `look_up`.

    Raises:
        Forbidden: If the name goes through a module that was imported there, or leads to anything but a class
            or function that an allowed module defines.
    """
    module = next((step for step in steps if _is_a(step, ModuleType)), None)
    if module is not None:
        other = _said(_namespace(module).get("__name__"))
        raise Forbidden(f"{name} goes through module {other}, which is to be named itself")
    if name in allow:
        return
    foreign = [step for step in steps if not _is_own(step, allow)]
    if len(steps) <= name.partition(":")[2].count("."):  # an object is on the way, or replaces the module
        foreign = [*foreign, *steps[-1:], None]
    if foreign:
        origin = _origin(foreign[0]) if steps else "is looked for in an object in place of its module"
        raise Forbidden(
            f"{name} {origin}; an allowed module opens the classes and functions that its source defines, "
            f"and anything else must be named in full: --allow {name}"
        )


def _check_name(name: str, allow: Sequence[str]) -> None:
    if not allow:
        raise Forbidden(
            f"{name} is not allowed here: this server runs no users' code; "
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


def _covered(module: str, allow: Sequence[str]) -> bool:
    return any(":" not in each and f"{module}.".startswith(f"{each}.") for each in allow)


# ----------------------------------------------------------- objects, inspected without running their code


def _is_a(value: object, kind: type) -> bool:
    """Return whether an object is of a kind; `isinstance` would read the object's ``__class__``."""
    return issubclass(type(value), kind)


def _namespace(owner: Any) -> Mapping[str, Any]:
    kind: Any = type if _is_a(owner, type) else ModuleType
    found: Mapping[str, Any] = kind.__dict__["__dict__"].__get__(owner)
    return found


def qualname(kind: type) -> str:
    """Return the qualified name of a class, without using its metaclass."""
    return str(type.__dict__["__qualname__"].__get__(kind))


def _bases(kind: type) -> tuple[type, ...]:
    found: tuple[type, ...] = type.__dict__["__mro__"].__get__(kind)
    return found


def _attribute(owner: Any, part: str) -> Any:
    """Return an attribute of a class or module, with methods of classes bound as Python binds them."""
    places = _bases(owner) if _is_a(owner, type) else (owner,)
    for place in places:
        if part in (names := _namespace(place)):
            found = names[part]
            break
    else:
        what = f"type object {qualname(owner)!r}" if _is_a(owner, type) else "module"
        raise AttributeError(f"{what} has no attribute {part!r} of its own")
    if _is_a(owner, type) and type(found) in (staticmethod, classmethod) and callable(found.__func__):
        return MethodType(found.__func__, owner) if type(found) is classmethod else found.__func__
    return found


# -------------------------------------------------------------------------------- where something is defined


def _is_own(found: Any, allow: Sequence[str]) -> bool:
    """Return whether the source of an allowed module defines a class, a function or a class method.

    An object's own claims (``__module__``, ``__wrapped__``) only tell where to look. A claim forged by
    `functools.wraps` or by hand does not lead back to the object.
    """
    if type(found) is MethodType:
        owner = found.__self__
        return _is_a(owner, type) and _is_own(owner, allow) and _is_own(found.__func__, allow)
    if _is_a(found, type):
        home, path = _namespace(found).get("__module__"), qualname(found)
        return (
            type(home) is str
            and _covered(home, allow)
            and _at(home, path) is found
            and _binds(home, path, "class")
        )
    home = _home(found)
    if home is not None and _covered(home, allow):
        return True
    for inner in _wrapped(found):  # a function defined there may be decorated
        home = _home(inner)
        if home is not None and _covered(home, allow):
            path = inner.__code__.co_qualname
            return _at(home, path) is found and _binds(home, path, "function")
    return False


def _home(function: Any) -> str | None:
    """Return the module that holds both a function's source and its globals, or None."""
    if type(function) is not FunctionType:
        return None
    name = dict.get(function.__globals__, "__name__")
    module = sys.modules.get(name) if type(name) is str else None
    if not _is_a(module, ModuleType) or _namespace(module) is not function.__globals__:
        return None
    return name if dict.get(function.__globals__, "__file__") == function.__code__.co_filename else None


def _wrapped(found: Any) -> Iterator[Any]:
    """Yield the functions that a decorated function names as wrapped, from the outermost to the innermost."""
    seen = set[int]()
    while type(found) in (FunctionType, _CACHED) and id(found) not in seen:
        seen.add(id(found))
        found = found.__dict__.get("__wrapped__")
        yield found


def _at(home: str, path: str) -> Any:
    """Return the object at a path in a loaded module, or None if it does not exist."""
    found: Any = sys.modules.get(home)
    for part in path.split("."):
        if not _is_a(found, type) and not _is_a(found, ModuleType):
            return None
        try:
            found = _attribute(found, part)
        except AttributeError:
            return None
    return found.__func__ if type(found) is MethodType else found


def _binds(home: str, path: str, kind: Literal["class", "function"]) -> bool:
    """Return whether a ``class`` or ``def`` in a module's source binds a name, and no import does."""
    tables = [table] if (table := _symbols(home)) is not None else []
    parts = path.split(".")
    for part, body in zip(parts, ["class"] * (len(parts) - 1) + [kind], strict=True):
        found = [table.lookup(part) for table in tables if part in table.get_identifiers()]
        if any(symbol.is_imported() for symbol in found):
            return False
        tables = [inner for symbol in found for inner in _bodies(symbol, body)]
    return bool(tables)


def _bodies(symbol: symtable.Symbol, kind: str) -> Iterator[symtable.SymbolTable]:
    for table in symbol.get_namespaces():
        if table.get_type() == kind:
            yield table
        elif table.get_type() not in ("class", "function"):  # parameters of a generic one lie between
            yield from (inner for inner in table.get_children() if inner.get_type() == kind)


def _symbols(home: str) -> symtable.SymbolTable | None:
    """Return the symbols of a module's source, or None without source."""
    with suppress(Exception):  # other import systems may raise anything
        loader = _namespace(sys.modules[home])["__loader__"]
        source = loader.get_source(home)
        return None if source is None else symtable.symtable(source, home, "exec")
    return None


def _origin(found: Any) -> str:
    """Return a phrase for an object's origin, read without running the object's code."""
    if _is_a(found, type):
        return f"is a class that says to come from {_said(_namespace(found).get('__module__'))}"
    if type(found) is MethodType:
        return f"is a method, which {_origin(found.__func__)}"
    if type(found) is FunctionType:
        return f"comes from {_said(dict.get(found.__globals__, '__name__'))}"
    if type(found) is BuiltinFunctionType:
        return f"comes from {_said(found.__module__)}"
    return f"is an object of type {qualname(type(found))}"


def _said(module: object) -> str:
    return printable(module, 80) if type(module) is str else "somewhere else"
