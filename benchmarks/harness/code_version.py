"""Identify code by its syntax trees: prose, comments and layout do not change a version."""

from __future__ import annotations

import ast
import functools
import hashlib
import subprocess
from collections.abc import Iterable
from pathlib import Path

from benchmarks.harness.children import ROOT

PACKAGE = ROOT / "src" / "upriver"
POLICIES = PACKAGE / "policies"


def essence(source: bytes | str, *, without: Iterable[str] = ()) -> str:
    """Return a module without docstrings, comments and layout, and without some functions and classes.

    Args:
        source: Text of the module.
        without: Names of functions and classes at its top that do not count.
    """
    tree, left_out = ast.parse(source), set(without)
    tree.body = [node for node in tree.body if getattr(node, "name", None) not in left_out]
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            node.body = [statement for statement in body if not _is_text(statement)]  # type: ignore[attr-defined]
    return ast.dump(tree)


def _is_text(statement: ast.stmt) -> bool:
    """Return whether a statement is a bare string, which documents a module, function, class or attribute."""
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def version_of(files: Iterable[Path]) -> str:
    """Return a version of the code of these files, taken in order."""
    digest = hashlib.sha256()
    for path in files:
        digest.update(_essence_of(path, path.stat().st_mtime_ns).encode() + b"\0")
    return digest.hexdigest()[:12]


@functools.cache
def _essence_of(path: Path, changed_ns: int) -> str:
    return essence(path.read_bytes())


def code() -> str:
    """Return the version of the package's code.

    Policies are left out: a benchmark run receives its choice, so its record stays valid when a policy
    changes.
    """
    return version_of(path for path in sorted(PACKAGE.rglob("*.py")) if POLICIES not in path.parents)


def policies() -> str:
    """Return the version of the policies' code."""
    return version_of(sorted(POLICIES.rglob("*.py")))


def commit() -> str:
    """Return the measured commit, and whether tracked files differ from it."""
    changed = git("status", "--porcelain", "--untracked-files=no", "--", "src", "benchmarks/*.py")
    return (git("rev-parse", "--short=12", "HEAD") or "unknown") + (", with local changes" if changed else "")


def git(*arguments: str) -> str:
    """Return what git prints about this source tree; an empty text if it fails."""
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""
