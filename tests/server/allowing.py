"""Write a package whose allowed modules hold other modules' code in every possible way.

Foreign code writes its name into a file when it runs or is imported; the tests read that file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ALLOW = ("shop.data", "shop.named:bell", "shop.named:Shelf.shell")


def _words(text: str) -> list[str]:
    return text.split()


DIARY = '''
import os

def note(name):
    """Write down that foreign code runs."""
    with open(os.environ["DIARY"], "a") as diary:
        diary.write(name + "\\\\n")
    return [name]
'''

ADMIN = '''
"""
    Not allowed: everything in here notes that it ran.
    """

import contextlib, functools, os, subprocess, types, weakref
from unittest.mock import Mock

from shop.diary import note

COMMAND = "echo command >> $DIARY"


def shell(*args, **kwargs):
    return note("shell")


def forged_shell(*args, **kwargs):
    return note("forged_shell")


forged_shell.__module__, forged_shell.__name__ = "shop.data", "make"


class Admin:
    def __init__(self, *args, **kwargs):
        note("Admin")

    def __getitem__(self, index):
        return index

    def run(self=None, *args, **kwargs):
        return note("Admin.run")

    @classmethod
    def made(cls, *args, **kwargs):
        return note("Admin.made")

    @staticmethod
    def plain(*args, **kwargs):
        return note("Admin.plain")


class Quiet:
    """Made without a note."""

    def __getitem__(self, index):
        return index

    def __call__(self, *args, **kwargs):
        return note("Quiet.__call__")

    def run(self=None, *args, **kwargs):
        return note("Quiet.run")


class Meta(type):
    def __call__(cls, *args, **kwargs):
        return note("Meta.__call__")

    def made(cls, *args, **kwargs):
        return note("Meta.made")

    def __getattr__(cls, name):
        note("Meta.__getattr__")
        return shell


class Metaclassed(metaclass=Meta):
    pass


class New:
    def __new__(cls, *args, **kwargs):
        return note("New.__new__")


class Lying(Admin):
    """Says that it is another module's."""


class Fallback(Admin):
    """Says that it is the one that the other module has, too."""


Fallback.__module__ = "shop.data"
Lying.__module__, Lying.__qualname__, Lying.__name__ = "shop.data", "lying", "lying"


class Nested:
    class Inner(Admin):
        pass


class Described:
    def __get__(self, instance, owner):
        note("Described.__get__")
        return shell


class Pretender:
    """
    Says that it is a class of the allowed module, where it is asked.
    """

    __module__ = "shop.data"
    __qualname__ = __name__ = "pretender"

    @property
    def __class__(self):
        note("Pretender.__class__")
        return type

    def __call__(self, *args, **kwargs):
        return note("Pretender.__call__")

    def __getattr__(self, name):
        note("Pretender.__getattr__")
        return shell


class Lazy(types.ModuleType):
    def __getattr__(self, name):
        note("Lazy.__getattr__")
        return shell

    def __call__(self, *args, **kwargs):
        return note("Lazy.__call__")


def forged(function):
    """
    Make a function that says to be another one.
    """

    def inner(*args, **kwargs):
        return note("forged")

    return functools.wraps(function)(inner)


def claimed():
    note("claimed")


claimed.__module__ = "shop.data"

tool = Quiet()
tool_of_data = Quiet()
tool_of_data.__module__ = "shop.data"
tool_of_data.__qualname__ = "tool_of_data"
partial_command = functools.partial(os.system, COMMAND)
partial_shell = functools.partial(shell)
partial_run = functools.partial(subprocess.run, COMMAND, shell=True)
partial_of_partial = functools.partial(functools.partial(shell), 1)
method_bound = tool.run
method_of_class = Admin.made
method_with_class = types.MethodType(shell, Admin)
cached = functools.lru_cache(shell)
cached_partial = functools.cache(partial_shell)
dispatched = functools.singledispatch(shell)
in_context = contextlib.contextmanager(shell)
static = staticmethod(shell)
mock = Mock(side_effect=shell)
weak = weakref.ref(Admin)
alias_of_list = list[int]
lazy_module = Lazy("shop.lazy")
pretender = Pretender()
described = Described()
own_shape = types.SimpleNamespace(run=shell)
maker = lambda *args, **kwargs: note("lambda")
partial_method = functools.partialmethod(shell)
system = os.system
popen = os.popen
module = os
namespace = types.SimpleNamespace(run=shell)
built = type("built", (Admin,), {"__module__": "shop.data"})


def later():
    """
    Forge functions of the allowed module, once it is there.
    """
    from shop import data

    global forged_make, forged_method, forged_cached, forged_code, child, child_made, of_base
    forged_make = forged(data.make)
    forged_method = forged(data.Birds.load)
    forged_cached = functools.lru_cache(forged_make)
    forged_code = types.FunctionType(shell.__code__, vars(data))
    child = type("child", (data.Birds,), {"__init__": shell, "__module__": "shop.data"})
    child_made = child.made
    of_base = data.Callable(os.system)
    global overridden
    overridden = forged(data.overridden)
'''

KINDS = _words(
    """
    shell forged_shell Admin Quiet Metaclassed New Lying Nested Pretender claimed tool tool_of_data
    partial_command partial_shell partial_run partial_of_partial method_bound method_of_class
    method_with_class cached cached_partial dispatched in_context static mock weak alias_of_list
    lazy_module pretender described maker partial_method system popen namespace built own_shape
    module forged_make forged_method forged_cached forged_code child child_made of_base overridden Fallback
    """
)
"""Objects of the module that is not allowed."""

PARTS = ("run", "made", "plain", "Inner", "Inner.made", "system", "func", "keys")
"""Attributes that the tests also ask of these objects."""

DEFINED = '''
"""
    Allowed: what is defined in here, and nothing that has come in.
    """

import contextlib, dataclasses, functools

import torch
import shop.admin
import shop.admin as admin
from shop.diary import note


def make(count=3):
    return Birds(count)


class Birds:
    kind = "bird"

    def __init__(self, count=3):
        self.count = count

    def __getitem__(self, index):
        return index

    @classmethod
    def made(cls, count=3):
        return cls(count)

    @staticmethod
    def load(count=3):
        return Birds(count)

    @staticmethod
    @functools.lru_cache
    def cached(count=3):
        return Birds(count)

    class Small:
        def __getitem__(self, index):
            return -index

        @classmethod
        def made(cls):
            return cls()


class Callable:
    def __init__(self, function=None):
        self.function = function

    def __call__(self, *args, **kwargs):
        return self.function(shop.admin.COMMAND)

    def __getitem__(self, index):
        return index


class Owls(Birds):
    """
    Inherits how it is made, from a class of this module.
    """


class Singleton(type):
    def __call__(cls, *args, **kwargs):
        return super().__call__(*args, **kwargs)


class Eagles(Birds, metaclass=Singleton):
    pass


@dataclasses.dataclass(slots=True)
class Slotted:
    """Another class than the statement has made, under its name."""

    count: int = 3

    def __getitem__(self, index):
        return index


class Sea(torch.utils.data.Dataset[int]):
    def __init__(self, count=3):
        self.count = count

    def __getitem__(self, index):
        return index


class Adopted(list):
    """
    Inherits how it is made from another module's class.
    """

    def __getitem__(self, index):
        return index


def passing(function):
    @functools.wraps(function)
    def inner(*args, **kwargs):
        return function(*args, **kwargs)

    return inner


@passing
def decorated(count=3):
    return Birds(count)


@functools.cache
def kept(count=3):
    return Birds(count)


@admin.passing
def instrumented(count=3):
    return Birds(count)


nameless = lambda count=3: Birds(count)
same_birds = Birds
same_made = Birds.made


def collate(samples):
    return list(samples)


@functools.lru_cache
def _unused():
    pass


def overridden(count=3):
    """Another module has a faster one, which is imported below."""


class Fallback(Birds):
    """So it is with this one."""


shop.admin.later()
'''

PASSING = '''

def passing(function):
    """A decorator that changes nothing."""

    @functools.wraps(function)
    def inner(*args, **kwargs):
        return function(*args, **kwargs)

    return inner
'''

LEGITIMATE = _words(
    """
    make Birds Birds.made Birds.load Birds.cached Birds.Small Birds.Small.made Owls Owls.made
    Owls.load Eagles Eagles.made Adopted Slotted Sea decorated kept instrumented nameless same_birds
    same_birds.made same_made beneath_alias
    """
)
"""Names of its own that the allowed module opens."""

WAYS = {
    "imported_{}": "from shop.admin import {} as imported_{}",
    "{}": "from shop.admin import {}",
    "alias_{}": "alias_{0} = shop.admin.{0}",
    "global_{}": "globals()['global_{0}'] = shop.admin.{0}",
    "Held.{}": None,
    "Held.Inner.{}": None,
    "Held.static_{}": None,
    "Held.of_class_{}": None,
    "HeldOwn.{}": None,
    "admin.{}": None,
    "shop.admin.{}": None,
    "sub:{}": None,
}
"""Ways in which such an object enters an allowed module: its name there, and the line for it."""


def write(folder: Path) -> None:
    """Write the package."""
    package = folder / "shop"
    (package / "data").mkdir(parents=True)
    lines = [line.format(kind, kind) for line in WAYS.values() if line for kind in KINDS]
    held = "\n".join(f"{{0}}{kind} = shop.admin.{kind}" for kind in KINDS)
    wrapped = "\n".join(
        f"    static_{kind} = staticmethod(shop.admin.{kind})\n"
        f"    of_class_{kind} = classmethod(shop.admin.{kind})"
        for kind in KINDS
    )
    classes = (
        f"class Held:\n{held.format('    ').replace('{0}', '    ')}\n{wrapped}\n    class Inner:\n"
        f"{held.replace('{0}', '        ')}\n"
        "class HeldOwn(Held, shop.admin.Admin):\n    pass\n"
    )
    files = {
        "__init__.py": "from shop.diary import note\n",
        "diary.py": DIARY.replace("\\\\n", "\\n"),
        "admin.py": ADMIN + PASSING,
        "data/__init__.py": DEFINED
        + "\n".join(lines)
        + "\n"
        + classes
        + "from shop.data.sub import beneath_alias\n"
        "def __getattr__(name):\n"
        "    if name.startswith('__'):\n        raise AttributeError(name)\n"
        "    return shop.admin.shell\n",
        "data/sub.py": "import shop.admin\n"
        + "\n".join(f"from shop.admin import {kind}" for kind in KINDS)
        + "\nfrom shop.data import Birds as Parrots\n\n"
        "def beneath_alias():\n    return Parrots()\n\n\nclass Wrens(Parrots):\n    pass\n",
        "database.py": "from shop.diary import note\nnote('imported shop.database')\ndef make(): note('x')\n",
        "data_.py": "from shop.diary import note\nnote('imported shop.data_')\ndef make(): note('x')\n",
        "bomb.py": "from shop.diary import note\nnote('imported shop.bomb')\nclass Data: pass\n",
        "named.py": "from functools import partial\n"
        "from shop.admin import shell\nfrom shop.data import Birds\n"
        "bell = partial(Birds, 7)\nbook = partial(shell)\n\n\n"
        "class Shelf:\n    shell = partial(Birds, 8)\n    other = shell\n\n\ndef own(): return shell()\n",
    }
    for name, text in files.items():
        (package / name).write_text(text)


def foreign() -> Iterator[str]:
    """Yield the names of all foreign code in an allowed module and in its objects."""
    for way in WAYS:
        for kind in KINDS:
            module, _, path = way.format(kind).rpartition(":")
            name = f"shop.data{'.' if module else ''}{module}:{path}"
            yield name
            if way in ("{}", "Held.{}", "sub:{}"):
                yield from (f"{name}.{part}" for part in PARTS)


OUTSIDE = _words(
    """
    shop:data.make shop.admin:shell shop.admin:Admin shop.database:make shop.data_:make
    shop.bomb:Data shop.named:own shop.named:book shop.named:Shelf shop.named:Shelf.other
    shop.named:bell.func shop.dat:make shop.data.bomb:Data shop.data.admin:shell shop.data.os:system
    shop.data:__class__ shop.data:__dict__.get shop.data:make.__globals__.get
    shop.data:make.__code__ shop.data:Birds.__init__ shop.data:Birds.__class__
    shop.data:Birds.__subclasses__ shop.data:Birds.mro shop.data:Birds.Small.mro
    shop.data:__getattr__ shop.data:__loader__.load_module shop.data:__builtins__.exec
    shop.data:_unused shop.data.__init__:shell shop.data.__main__:make __main__:make builtins:exec
    builtins:eval os:system subprocess:run importlib:import_module shop.data.sub.shop:admin
    shop.data:shop.bomb.Data shop.data:make.shell shop.data:make.run shop.data:anything
    shop.data:Birds.kind.upper shop.data:Birds.anything shop.data:Eagles.mro
    shop.data:Eagles.register shop.data:contextlib.suppress shop.data:functools.partial
    shop.data:note
    """
)
"""Names that lead outside the allowed modules."""
