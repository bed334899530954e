"""How soon does a fresh process answer, whose model lies in an object store, and what does it take meanwhile?

The claim: from process start to the first right answer, and from the end of its imports,

- upriver is fastest, or within 3 % of whoever is, for seven models from 98 MB to 1 GB and batches of 1 to 32,
  on links of 0.1, 1 and (without a shape) about 10 Gbit/s: against downloading everything first, layer by
  layer, PISeL's groups, boto3 with safetensors or torch.load, runai-model-streamer, tensorizer and
  s3torchconnector, each at its best concurrency, with a model that is constructed as ever or by upriver;
- no model is too small to gain by it;
- it reaches 0.85 of the bound at 1 Gbit/s (`cold_bound` says of which);
- it takes at most 1.1 times the weights above what its imports take;
- once everything is there, a call costs what it costs in a plain model, within 1 %;
- every answer is ``torch.equal`` to that of the whole model.

Run ``python benchmarks/cold_start.py`` as root, once Swift is there (``scripts/swift install``); it may be
ended at any moment: each turn of all ways is a line of ``results/cold_start.jsonl``, and the next start goes
on from there. ``--only gpt2`` takes settings whose names begin so, ``--minutes 20`` ends it between two
turns, ``--repeats 3`` makes fewer of them, ``--list`` says how far all are, ``--write`` only writes
``results/cold_start.md`` and ``.png`` from what is there. All of it takes hours. ``--quick`` shows within two
minutes, without root and on this host alone, that it works.

Other systems live in an environment of their own, which ``UPRIVER_BENCHMARK_COLD_PEERS`` names; those that
are not installed are left out, and the report says so. The process has one core and a network namespace, the
store another one of each.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from _common import RESULTS
from _hosts import sigterm_raises
from _planned import Deadline, Records, TimeIsUp
from cold_bed import Jobs, Local, Namespaces, Peers
from cold_measure import Measures, missing, narrowed, version
from cold_report import Found, write, wrong
from cold_settings import QUICK, SETTINGS, Setting
from input_bed import Failed
from testbed import TestbedError


def run_all(
    settings: Sequence[Setting], records: Records, deadline: Deadline, peers: Peers, *, quick: bool
) -> list[str]:
    """Everything that is missing; why some of it could not be made.

    Raises:
        TimeIsUp: If the deadline comes first.
    """
    now, failed = version(), list[str]()
    wanted = [setting for setting in settings if missing(setting, records, now, sweeps=not quick)]
    if not wanted:
        return []
    deadline.check()
    console = Console(stderr=True, highlight=False)
    with ExitStack() as stack:
        stack.enter_context(sigterm_raises())
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="upriver-cold-scratch-")))
        status = stack.enter_context(console.status("starting"))
        place = stack.enter_context(Local() if quick else Namespaces())
        measures = Measures(Jobs(place, peers, scratch), records, wanted, status.update, sweeps=not quick)
        for setting in wanted:
            for key in missing(setting, records, now, sweeps=not quick):
                deadline.check()
                began = time.monotonic()
                try:
                    measures.make(setting, key)
                except (Failed, TestbedError) as error:  # other settings may work
                    failed.append(f"{key}: {error}")
                    break
                console.print(f"{key}: {time.monotonic() - began:.0f} s")
    return failed


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="TEXT", help="settings that begin with one"
    )
    parser.add_argument("--minutes", type=float, help="begin no further turn after so many")
    parser.add_argument("--repeats", type=int, help="turns of each setting, if it has more")
    parser.add_argument("--quick", action="store_true", help="one small setting that says nothing")
    parser.add_argument("--no-peers", action="store_true", help="leave other systems out")
    parser.add_argument("--list", action="store_true", help="only list the settings and how far they are")
    parser.add_argument("--write", action="store_true", help="only write the report from what is there")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where records and report lie")
    options = parser.parse_args(arguments)
    if options.repeats is not None and options.repeats < 1:
        parser.error(f"argument --repeats: must be at least 1, got {options.repeats}")
    return options


def main() -> None:
    """Run what is missing, then report what is there."""
    options = parsed()
    name, settings = ("cold_start_quick", QUICK) if options.quick else ("cold_start", SETTINGS)
    records = Records(options.out / f"{name}.jsonl")
    peers = Peers(without=options.no_peers or options.quick)
    wanted = [
        narrowed(setting, peers.ways(), options.repeats)
        for setting in settings
        if any(setting.key.startswith(part) for part in options.only)
    ]
    if options.list:
        now = version()
        for setting in wanted:
            left = missing(setting, records, now, sweeps=not options.quick)
            print(f"{setting.key}: {', '.join(left) or 'finished'}")
        return
    failed: list[str] = []
    if not options.write:
        try:
            failed = run_all(wanted, records, Deadline(options.minutes), peers, quick=options.quick)
        except (TestbedError, Failed) as error:  # there is no place to run it in
            sys.exit(f"error: {error}")
        except TimeIsUp:
            print("time is up; the next start goes on from here", file=sys.stderr)
    found = [Found(setting, records) for setting in settings]
    print(write(found, records, options.out, name, hint=peers.hint()))
    failed += wrong(found)
    if failed:
        sys.exit("\n".join(f"error: {why}" for why in failed))


if __name__ == "__main__":
    main()
