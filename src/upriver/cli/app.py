"""Register all commands, and turn their errors into exit codes.

Heavy imports (torch above all) happen inside the commands, so that ``--help`` and a mistyped option answer at
once.
"""

from __future__ import annotations

import contextlib
import errno
import json
import signal
import sys
import traceback
from collections.abc import Sequence

import typer
from typer.exceptions import TyperException

from upriver import __version__
from upriver.cli import (
    INTERRUPTED,
    calibrate,
    cuts,
    demo,
    diff,
    features,
    gc,
    index,
    infer,
    push,
    token,
    worker,
)
from upriver.cli.coldstart import command
from upriver.cli.common import ReaderGone, checked_stdout
from upriver.cli.plan import command as plan
from upriver.cli.serve import command as serve
from upriver.cli.serve import options
from upriver.cli.train import command as train
from upriver.errors import StoreError, UpriverError

EXIT_ERROR, EXIT_BAD_INPUT = 1, 2
EXIT_READER_GONE = 128 + signal.SIGPIPE
"""Exit code that shells report for programs that SIGPIPE ends: they wrote to a pipe that nothing reads."""

app = typer.Typer(
    name="upriver",
    help="Decide where each part of a PyTorch job runs; the answer never changes, only where it is computed.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
app.command("demo")(demo.demo)
app.command("index")(index.index)
app.command("push")(push.push)
app.command("cuts")(cuts.cuts)
app.command("diff")(diff.diff)
app.command("calibrate")(calibrate.calibrate)
app.command("plan")(plan.plan)
app.command("infer")(infer.infer)
app.command("coldstart")(command.coldstart)
app.command("serve")(serve.serve)
app.command("gc")(gc.gc)
app.add_typer(features.app, name="features")
app.command("token")(token.token)
app.command("train")(train.train)
app.command("worker")(worker.worker)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", is_eager=True, callback=_show_version, help="Show it."),
) -> None:
    """Decide where each part of a PyTorch job runs; the answer never changes, only where it is computed."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Arguments without the program's name; None uses those of the process.

    Returns:
        0 on success, 2 for bad input or an expected error, 130 when interrupted, 141 when nothing reads
            stdout, 1 for anything else.
    """
    with checked_stdout():
        return _run(argv)


def _run(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    # SIGTERM should also stop the processes that a command started, as Ctrl-C does. For a server SIGTERM is
    # the normal end, and the server starts no process before it has handlers of its own.
    ending = options.leave if arguments[:1] in (["serve"], ["worker"]) else signal.default_int_handler
    before = signal.signal(signal.SIGTERM, ending)
    try:
        result = app(arguments, prog_name="upriver", standalone_mode=False)
        print(end="", flush=True)
        return result if isinstance(result, int) else 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except ReaderGone:
        return EXIT_READER_GONE
    except Exception as error:
        return _report(error, debug="--debug" in arguments, as_json="--json" in arguments)
    finally:
        signal.signal(signal.SIGTERM, before)


def _report(error: Exception, *, debug: bool, as_json: bool) -> int:
    """Print an error in one line, and return the exit code."""
    status, code, message = _described(error)
    message = " ".join(message.split())
    hint = " (an error we did not expect; --debug shows where)" if status == EXIT_ERROR and not debug else ""
    with contextlib.suppress(OSError):  # the full disk may be stderr's, too
        if debug:
            traceback.print_exception(error)
        print(f"error: {message}{hint}", file=sys.stderr)
    if as_json:
        with contextlib.suppress(StoreError, ReaderGone):  # one of these may be the error itself
            print(json.dumps({"error": {"code": code, "message": message}}), flush=True)
    return status


def _described(error: Exception) -> tuple[int, str, str]:
    """Return the exit status, machine-readable code and message of an error."""
    if isinstance(error, TyperException):
        message = getattr(error, "format_message", lambda: str(error))()
        return EXIT_BAD_INPUT, "bad_command", message
    if isinstance(error, UpriverError):
        return EXIT_BAD_INPUT, error.code, str(error)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return EXIT_BAD_INPUT, StoreError.code, f"cannot write {error.filename or 'a file'}: {error.strerror}"
    return EXIT_ERROR, "unexpected", f"{type(error).__name__}: {error}"
