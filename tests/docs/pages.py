"""Read the blocks of a Markdown page, and run them in order as a reader would.

A page runs in a folder of its own. `Page.localized` replaces its addresses, ports and data by those
here. CONTRIBUTING.md says how a block is marked that cannot run.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from markdown_it import MarkdownIt

PARSERS = {"json": json.loads, "toml": tomllib.loads, "yaml": yaml.safe_load}
SHOWN = {"text", "console"}
"""Languages of output, which is not run."""

NOT_RUN = re.compile(r"<!-- not run: (.*) -->")
SETUP = re.compile(r"<!-- setup\n(.*)-->", re.DOTALL)
NAMED = re.compile(r"# ([\w./-]+\.(?:json|py|toml|yaml))(?::.*)?\n")
"""First line of a block that is a file."""

HOST = r"(?:storage-node|edge-1|cpu-[12]|localhost|127\.0\.0\.1|0\.0\.0\.0)"
PORT = r"(700\d)"
WAIT_S = 120


class BadPage(Exception):
    """A page breaks the rules for snippets."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """One fenced block.

    Attributes:
        line: Line of the page before the first one of the block, from 1.
        why_not: Reason for not running it.
    """

    language: str
    text: str
    line: int
    why_not: str = ""


def blocks(text: str) -> Iterator[Block]:
    """Yield the blocks of a page in order.

    Raises:
        BadPage: If a comment about a block has no block below it, or no reason.
    """
    why_not = ""
    for token in MarkdownIt("commonmark").parse(text):
        line = token.map[0] + 1 if token.map else 0
        if token.type == "fence":
            yield Block(language=token.info.strip(), text=token.content, line=line, why_not=why_not)
            why_not = ""
            continue
        if why_not:
            raise BadPage(f"line {line}: no block follows '<!-- not run: {why_not} -->'")
        if token.type == "html_block" and (found := SETUP.search(token.content)):
            yield Block(language="python", text=found[1], line=line)
        elif token.type == "html_block" and (found := NOT_RUN.search(token.content)):
            why_not = found[1]
            if len(why_not.split()) < 3:
                raise BadPage(f"line {line}: {why_not!r} does not say why the block is not run")


@dataclass(kw_only=True)
class Page:
    """A page that is being run.

    Attributes:
        folder: Working folder, with the data of the snippets in ``data``.
        namespace: Names of its Python blocks.
    """

    path: Path
    folder: Path
    namespace: dict[str, Any]
    _ports: dict[str, int] = field(default_factory=dict)
    _shells: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def run(self) -> None:
        """Run every block.

        Raises:
            BadPage: If a block breaks the rules, or its shell fails.
        """
        for block in blocks(self.path.read_text(encoding="utf-8")):
            if not block.why_not:
                self._run(block)

    def close(self) -> None:
        """End what the shells have left running."""
        for value in self.namespace.values():
            if not isinstance(value, type) and callable(close := getattr(value, "close", None)):
                close()
        for shell in self._shells:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGTERM)
        for shell in self._shells:
            shell.wait(WAIT_S)

    def _run(self, block: Block) -> None:
        text = self.localized(block.text)
        named = NAMED.match(block.text)
        where = f"{self.path.name}, line {block.line}"
        if block.language in PARSERS:
            PARSERS[block.language](text)
        if named and block.language in {"python", *PARSERS}:
            file = self.folder / named[1]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        elif block.language == "python":
            exec(compile("\n" * block.line + text, str(self.path), "exec"), self.namespace)
        elif block.language == "sh":
            self._shell(text, where)
        elif block.language not in {*SHOWN, *PARSERS}:
            known = ", ".join(sorted({"python", "sh", *SHOWN, *PARSERS}))
            raise BadPage(f"{where}: the language of a block is one of {known}, got {block.language!r}")

    def localized(self, text: str) -> str:
        """Replace addresses by this machine's, data by the folder's, and weights that would be downloaded."""
        data = self.folder / "data"
        text = re.sub(rf"\b{HOST}:{PORT}\b", lambda found: f"127.0.0.1:{self._port(found[1])}", text)
        text = re.sub(rf"(--port |port = ){PORT}\b", lambda found: found[1] + str(self._port(found[2])), text)
        text = text.replace("0.0.0.0", "127.0.0.1").replace('weights="DEFAULT"', "weights=None")
        text = re.sub(r"(s3://bucket|file:///data)\b", data.as_uri(), text)
        return re.sub(r"(?<![\w./])/data\b", str(data), text)

    def _port(self, written: str) -> int:
        """Return the free port that stands for a port of the page."""
        if written not in self._ports:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                self._ports[written] = free.getsockname()[1]
        return self._ports[written]

    def _shell(self, text: str, where: str) -> None:
        """Run lines in bash. Servers stay in the background; each answers before the next line runs."""
        number = len(self._shells)
        done, log = (self.folder / f".shell-{number}.{name}" for name in ("done", "log"))
        lines = text.replace("\\\n", " ").splitlines()
        script = [WAITING, *map(self._in_background, lines), f": > {done}", "wait || true", "wait || true"]
        with log.open("wb") as said:
            shell = subprocess.Popen(
                ["bash", "-euo", "pipefail", "-c", "\n".join(script)],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._shells.append(shell)
        while shell.poll() is None and not done.exists():
            time.sleep(0.02)
        if not done.exists():
            raise BadPage(f"{where}: exit code {shell.returncode}\n{log.read_text(errors='replace')}")

    def _in_background(self, line: str) -> str:
        """Return a line that starts a server, so that it runs in the background until it answers."""
        found = re.match(r"\s*(upriver (?:serve|worker)\b[^&#]*)", line)
        if not found:
            return line
        command = found[1].strip()
        if "--port" not in command:
            command += f" --port {self._port('7000' if command.startswith('upriver serve') else '7001')}"
        return f'{command} > "$(log_of)" 2>&1 & answers'


WAITING = """
trap : TERM
servers=0
log_of() { echo ".server-$$-$servers.log"; }
answers() {
    local log
    log=$(log_of)
    until grep -qs '"listening"' "$log"; do
        kill -0 $! 2>/dev/null || { cat "$log"; exit 1; }
        sleep 0.05
    done
    servers=$((servers + 1))
}
"""
"""Functions of a shell: the file for the output of a server, and waiting until it answers."""


def environment(folder: Path) -> dict[str, str]:
    """Return the variables that a page's commands find."""
    return {
        "HOME": str(folder),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(folder),
    }
