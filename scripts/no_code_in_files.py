"""Fail when a source file uses a format that can carry code: pickle and its kin, torch.load, .pt2 archives.

A server reads untrusted data. Our own formats (a JSON graph of allow-listed operators, safetensors, .npy
without objects) hold data only, and this check keeps it so. It reads syntax trees, so comments and docstrings
may name forbidden formats.

One module is exempt from the rule on pickle. ``finetune/preparation/snapshot.py`` copies a model to a process
that this process starts, through anonymous memory that these two hold. No other user can write there, and
both processes run the code of the user already.

Usage: python scripts/no_code_in_files.py DIRECTORY...
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

FORBIDDEN_MODULES = frozenset(
    {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
)
ALLOWED_FROM = frozenset({("pickle", "Pickler")})
"""Names that only write: a digest of the output compares objects of this process."""

ALLOWED_IN = {"src/upriver/finetune/preparation/snapshot.py": frozenset({"pickle", "cloudpickle"})}
"""Modules that a file may import, by the end of its path."""

FORBIDDEN_CALLS = frozenset(
    {
        "torch.load",
        "torch.save",
        "torch.jit.load",
        "torch.package.PackageImporter",
        "torch.export.load",
        "eval",
        "exec",
    }
)
FORBIDDEN_ENDINGS = (".pt2", ".pkl", ".pickle")
FORBIDDEN_FROM = {tuple(name.rsplit(".", 1)) for name in FORBIDDEN_CALLS if "." in name}


def dotted(node: ast.expr) -> str:
    """Return ``a.b.c`` for an attribute chain, and an empty string otherwise."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def docstrings(tree: ast.Module) -> set[int]:
    """Return the identities of the constants that only document."""
    bodies = (node.body for node in ast.walk(tree) if isinstance(getattr(node, "body", None), list))
    return {
        id(statement.value)
        for body in bodies
        for statement in body
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    }


def imports(node: ast.AST, forbidden: frozenset[str]) -> Iterator[str]:
    """Yield the imports of forbidden modules, and of forbidden names, in an import statement."""
    if isinstance(node, ast.Import):
        yield from (f"import {a.name}" for a in node.names if a.name.split(".")[0] in forbidden)
    elif isinstance(node, ast.ImportFrom):
        module = node.module or ""
        for alias in node.names:
            if (module, alias.name) in ALLOWED_FROM:
                continue
            if module.split(".")[0] in forbidden or (module, alias.name) in FORBIDDEN_FROM:
                yield f"from {module} import {alias.name}"


def uses(node: ast.AST, documentation: set[int]) -> Iterator[str]:
    """Yield the forbidden uses of a call or a constant."""
    if isinstance(node, ast.Call):
        if dotted(node.func) in FORBIDDEN_CALLS:
            yield f"{dotted(node.func)}()"
        for keyword in node.keywords:
            if keyword.arg == "allow_pickle" and getattr(keyword.value, "value", True) is not False:
                yield "allow_pickle"
    elif id(node) not in documentation and isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield from (
            f"the file name {node.value!r}" for ending in FORBIDDEN_ENDINGS if node.value.endswith(ending)
        )


def findings(path: Path) -> Iterator[str]:
    """Yield one line for each forbidden use in a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    documentation = docstrings(tree)
    allowed = (names for end, names in ALLOWED_IN.items() if path.as_posix().endswith(end))
    forbidden = FORBIDDEN_MODULES.difference(*allowed)
    for node in ast.walk(tree):
        for what in (*imports(node, forbidden), *uses(node, documentation)):
            yield f"{path}:{getattr(node, 'lineno', 0)}: {what} is not allowed: it can run code from a file"


def main(directories: list[str]) -> int:
    """Print the findings. Return 1 if any exist."""
    files = [path for directory in directories for path in sorted(Path(directory).rglob("*.py"))]
    found = [line for path in files for line in findings(path)]
    print("\n".join(found) or f"{len(files)} files read no format that can carry code")
    return 1 if found or not files else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
