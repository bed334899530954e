"""Test that workers run only code that an allowed module defines."""

from __future__ import annotations

import os
import py_compile
import sys
import unicodedata
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples, some
from tests.server import allowing
from upriver.errors import CodeFailed, Forbidden, UpriverError
from upriver.protocol import CodeRef
from upriver.server.code_allowlist import check_code
from upriver.server.execution.user_code import UserCode
from upriver.server.ipc.messages import RunCode
from upriver.types import START

FOREIGN = [*allowing.foreign(), *allowing.OUTSIDE]
LEGITIMATE = [
    *(f"shop.data:{path}" for path in allowing.LEGITIMATE),
    "shop.data.sub:Wrens",
    "shop.data.sub:Parrots",
    "shop.data.sub:beneath_alias",
    "shop.named:bell",
    "shop.named:Shelf.shell",
]


class Shop:
    """Resolve names as a worker's process does, and keep a diary of the foreign code that has run."""

    def __init__(self, diary: Path) -> None:
        self._diary, self.code = diary, UserCode(allowing.ALLOW)

    def ran(self) -> list[str]:
        """Return the code that has run since the last call."""
        lines = self._diary.read_text().split() if self._diary.exists() else []
        self._diary.write_text("")
        return lines

    def ask(self, name: str, *, collate: bool = False, arguments: bytes = b"{}") -> Any:
        """Make samples as a request of that name would.

        Raises:
            UpriverError: As the client is told.
        """
        wanted: dict[str, Any] = {"name": name}
        if collate:
            wanted = {"name": "shop.data:Birds", "collate": {"name": name, "batches": [0]}}
        try:
            code = msgspec.json.decode(msgspec.json.encode(wanted), type=CodeRef)
        except msgspec.MsgspecError as error:
            raise UpriverError(str(error)) from None
        check_code(code, allowing.ALLOW)
        run = RunCode(
            name=code.name,
            arguments=arguments,
            start=START,
            ids=(1,),
            slot=0,
            collate="" if code.collate is None else code.collate.name,
        )
        return self.code.make(run, None)


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    folder = tmp_path_factory.mktemp("shop")
    allowing.write(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setenv("DIARY", str(folder / "diary"))
        found = Shop(folder / "diary")
        found.ask("shop.data:make")
        found.ran()  # code that the import runs is the module's own affair
        yield found


def refused(shop: Shop, name: str, **how: Any) -> bool:
    """Return whether the client is told that the code is forbidden or does not exist."""
    try:
        shop.ask(name, **how)
    except Forbidden:
        return True
    except CodeFailed as error:
        return any(said in str(error) for said in ("there is no ", "must be callable", "cannot be imported"))
    except UpriverError as error:
        return "matching regex" in str(error)  # no valid name in the protocol
    return False


@pytest.mark.parametrize("share", some(1, range(4)))
def test_foreign_code_is_refused_however_it_is_named_and_never_runs(shop: Shop, share: int) -> None:
    assert len(FOREIGN) == len(set(FOREIGN)) >= 1700
    ran, passed = set[str](), set[str]()
    for name in FOREIGN[share::4]:
        hows: list[dict[str, Any]] = [{}]
        if name.count(".") < 4:
            hows.append({"collate": True})
        if name.endswith("system"):
            hows.append({"arguments": b'{"command": "echo command >> $DIARY"}'})
        for how in hows:
            passed |= set() if refused(shop, name, **how) else {name}
            ran |= {name} if shop.ran() else set()
    assert (len(ran), len(passed)) == (0, 0), (sorted(ran)[:9], sorted(passed)[:9])
    assert not {"shop.database", "shop.data_", "shop.bomb"} & sys.modules.keys()


def test_what_an_allowed_module_defines_runs(shop: Shop) -> None:
    for name in LEGITIMATE:
        assert shop.ask(name) == [-1 if "Small" in name else 1], name
    for name in ("shop.data:collate", "shop.data:Adopted"):
        assert list(shop.ask(name, collate=True)) == [1], name
    assert shop.ran() == []


NEAR = [
    "shop",
    "data",
    "named",
    "sub",
    "admin",
    "bomb",
    "database",
    "bell",
    "make",
    "Birds",
    "shell",
    "system",
]
NEAR += [
    "__class__",
    "__init__",
    "__globals__",
    "\uff44ata",
    "d\u0430ta",
    "mak\u0435",
    "\u017fhop",
    "shop ",
    "",
]


@settings(max_examples=examples(300), deadline=None)
@given(
    module=st.lists(st.sampled_from(NEAR), min_size=1, max_size=4),
    path=st.lists(st.sampled_from(NEAR), min_size=1, max_size=4),
    between=st.sampled_from([":", ":", ":", ".", "::", "/", "\0", ":\n", "\uff1a"]),
    collate=st.booleans(),
)
def test_no_name_leads_past_what_is_allowed(
    shop: Shop, module: list[str], path: list[str], between: str, collate: bool
) -> None:
    name = f"{'.'.join(module)}{between}{'.'.join(path)}"
    if name not in LEGITIMATE:
        assert refused(shop, name, collate=collate)
    assert shop.ran() == []
    assert not {"shop.database", "shop.data_", "shop.bomb"} & sys.modules.keys()


def test_a_name_that_python_would_take_for_another_one_is_none(shop: Shop) -> None:
    for name in ("shop.data:\uff4dake", "shop.\uff44ata:make", "shop.data:Bird\u017f"):
        assert unicodedata.normalize("NFKC", name) in LEGITIMATE
        with pytest.raises(UpriverError, match="matching regex"):
            shop.ask(name)


MODULE = """
class Data:
    def __getitem__(self, index):
        return index


def make():
    return Data()
"""


def run_of(name: str) -> RunCode:
    return RunCode(name=name, arguments=b"{}", start=START, ids=(1,), slot=0)


def test_a_module_in_an_archive_opens_what_it_defines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(tmp_path / "code.zip", "w") as archive:
        archive.writestr("archived_data.py", f"from os import system\n{MODULE}")
    monkeypatch.syspath_prepend(str(tmp_path / "code.zip"))
    code = UserCode(["archived_data"])
    assert [code.make(run_of(f"archived_data:{name}"), None) for name in ("Data", "make")] == [[1], [1]]
    with pytest.raises(Forbidden, match="comes from posix"):
        code.make(run_of("archived_data:system"), None)


def test_a_module_without_source_opens_only_what_is_named_in_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "compiled_data.py"
    source.write_text(MODULE)
    py_compile.compile(str(source), str(tmp_path / "compiled_data.pyc"))
    source.unlink()
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("compiled_data:Data", "compiled_data:make"):
        with pytest.raises(Forbidden, match=f"named in full: --allow {name}"):
            UserCode(["compiled_data"]).make(run_of(name), None)
        assert UserCode([name]).make(run_of(name), None) == [1]


def test_an_object_in_place_of_a_module_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "standing_in.py").write_text(
        "import os, sys\nclass Lazy:\n    def __getattr__(self, name):\n"
        "        if not name.startswith('__'):\n            os.environ['ASKED'] = name\n"
        "        raise AttributeError(name)\n"
        "sys.modules[__name__] = Lazy()\n"
    )
    monkeypatch.setenv("ASKED", "nobody")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(Forbidden, match="in place of its module"):
        UserCode(["standing_in"]).make(run_of("standing_in:make"), None)
    assert os.environ["ASKED"] == "nobody"
    with pytest.raises(CodeFailed, match="there is no standing_in:make"):
        UserCode(["standing_in:make"]).make(run_of("standing_in:make"), None)
    assert os.environ["ASKED"] == "make"
