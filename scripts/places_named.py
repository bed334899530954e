"""Refuse tensors of the default device or type. Users set both, but upriver's own tensors must not follow."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from torch.utils._device import _device_constructors

PLACED = {function.__name__ for function in _device_constructors()}
TYPED = {"empty", "empty_strided", "eye", "linspace", "logspace", "ones", "rand", "randn", "zeros"}
"""Functions that make real numbers by default."""


def problems(path: Path) -> Iterator[str]:
    """Yield the calls of ``torch.NAME(...)`` without a needed argument."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=name), keywords=keywords):
                given = {keyword.arg for keyword in keywords}
                if name in PLACED and not {"device", None} & given:
                    yield f"{path}:{node.lineno}: torch.{name} without device="
                if name in TYPED and not {"dtype", None} & given:
                    yield f"{path}:{node.lineno}: torch.{name} without dtype="


def main(roots: list[str]) -> int:
    """Print each problem. Return 1 if any exist."""
    files = sorted(path for root in roots for path in Path(root).rglob("*.py"))
    found = [problem for path in files for problem in problems(path)]
    print("\n".join(found) or f"{len(files)} files make no tensor of the default device or type")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
