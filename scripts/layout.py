"""Refuse crowded folders, shared class names, long signatures, stray tests, and docstrings without a verb.

Usage: python scripts/layout.py ROOT TESTS [--apart]. With ``--apart`` each folder of the root has its own
names.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

MOST_MODULES = 20
"""Modules of one folder, without its ``__init__``."""

MOST_ARGUMENTS = 17
"""Arguments of one function, ``self`` and ``cls`` included. A command's arguments are its command line."""

OWN_TESTS = {"benchmarks", "docs"}
"""Folders of tests that belong to no folder of the package."""

FRAGMENTS = {
    "What",
    "Whether",
    "Of",
    "Where",
    "How",
    "Who",
    "Which",
    "Whose",
    "Whom",
    "When",
    "Why",
    "Errors",
    "So",
    "Such",
}
"""Words that open no sentence about a function."""


def crowded(root: Path) -> Iterator[str]:
    """Name folders with more than `MOST_MODULES` modules."""
    for folder in sorted({path.parent for path in root.rglob("*.py")}):
        modules = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
        if len(modules) > MOST_MODULES:
            yield f"{folder}: {len(modules)} modules; at most {MOST_MODULES}"


def twice(root: Path, trees: Mapping[Path, ast.Module], *, apart: bool) -> Iterator[str]:
    """Name public classes that two modules define, of the whole tree or of one of its folders."""
    places = defaultdict(list)
    for path, tree in trees.items():
        house = path.relative_to(root).parts[0] if apart else ""
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[house, node.name].append(f"{path}:{node.lineno}")
    for (_, name), found in sorted(places.items()):
        if len(found) > 1:
            yield f"class {name} is defined by {' and '.join(found)}"


def long_signatures(root: Path, trees: Mapping[Path, ast.Module]) -> Iterator[str]:
    """Name functions with more than `MOST_ARGUMENTS`, except for commands."""
    for path, tree in trees.items():
        if root / "cli" in path.parents:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                count = len([*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs])
                if count > MOST_ARGUMENTS:
                    where = f"{path}:{node.lineno}: {node.name}"
                    yield f"{where} takes {count} arguments; at most {MOST_ARGUMENTS}"


def astray(root: Path, tests: Path) -> Iterator[str]:
    """Name folders of tests for which the package has no folder."""
    for folder in sorted({path.parent.relative_to(tests) for path in tests.rglob("test_*.py")}):
        if folder.parts and folder.parts[0] not in OWN_TESTS and not (root / folder).is_dir():
            yield f"{tests / folder}: there is no {root / folder}"


def fragments(trees: Mapping[Path, ast.Module]) -> Iterator[str]:
    """Name docstrings that open with a word of `FRAGMENTS`."""
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
                words = (ast.get_docstring(node) or "").split()
                if words and words[0].strip("`.,:") in FRAGMENTS:
                    yield f"{path}:{getattr(node, 'lineno', 1)}: docstring opens with {words[0]!r}"


def main(root: Path, tests: Path, *, apart: bool) -> int:
    """Print each problem; return 1 if there is any."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(root.rglob("*.py"))}
    found = [
        *crowded(root),
        *twice(root, trees, apart=apart),
        *long_signatures(root, trees),
        *astray(root, tests),
        *fragments(trees),
    ]
    print(
        "\n".join(found) or f"{root} and {tests} are laid out alike, and no two public classes share a name"
    )
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), apart="--apart" in sys.argv))
