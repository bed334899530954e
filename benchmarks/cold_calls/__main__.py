"""Count the instructions, not the seconds, of a model's call after its weights have arrived.

The claim: a call of a model that was called while it arrived takes, within 1 %, as many instructions as a
call of a plain one, and has the same bits. `cold_start` times the same call. There other work on the
machine decides about a percent; here it has no effect.

Valgrind runs a process that loads the model by `upriver.coldstart` and calls it while it arrives. The process
then calls this model and two plain ones in turns: one that was made in that process, and one whose weights
were copied, to show how far plain ones differ. One thread computes. The store is on the same host, behind
loopback.

Run ``python -m benchmarks.cold_calls``; it writes ``results/cold_calls.md``. It needs Valgrind, under which a
model takes two to thirty minutes, a core for each. Counts are stored next to the report as they arrive:
``--models gpt2`` counts one model anew.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from benchmarks.cold_start.bed import Local, paths
from benchmarks.cold_start.forked import BATCH, child, publish, spec_of
from benchmarks.cold_start.found import MOST_AFTER
from benchmarks.cold_start.models import MODELS, answer, made_up
from benchmarks.cold_start.settings import OURS
from benchmarks.cold_start.ways import loader_of
from benchmarks.harness.children import Failed, module_command
from benchmarks.harness.code_version import commit
from benchmarks.harness.measuring import Spread, machine, versions
from benchmarks.harness.records import Output, command_line, exit_on_faults
from benchmarks.harness.reports import table

if TYPE_CHECKING:
    from torch import nn

CHOSEN = ("gpt2", "resnet50", "bert", "regnet", "vgg19", "wav2vec2", "whisper", "mobilenet", "squeezenet")
ARRIVED, PLAIN, COPIED = "arrived", "plain", "copied"
NETWORKS = (ARRIVED, PLAIN, COPIED)
CALLS, WARM_CALLS = 3, 2
REQUESTS = 4
LIMIT_S = 3600.0
KERNELS = {"ONEDNN_MAX_CPU_ISA": "AVX", "MKL_CBWR": "COMPATIBLE", "ATEN_CPU_CAPABILITY": "default"}
"""No fused multiply-adds, which Valgrind emulates: with them a convolution takes 70 times as long."""

Counts = dict[str, list[int]]
"""Instructions of each call, by the called model."""


@dataclass(frozen=True)
class Counted:
    """The result of a process.

    Attributes:
        counts: Instructions of each call, by the called model; empty after a failure.
        equal: Whether all answers had the same bits.
        where: The code version and the machine.
        failed: The reason for a failure.
    """

    counts: Counts
    equal: bool
    where: str
    failed: str = ""

    def ratio(self, who: str) -> float:
        """Return how many times the plain model's instructions a call takes, by the medians."""
        return Spread.of(self.counts[who]).median / Spread.of(self.counts[PLAIN]).median


# ------------------------------------------------------------------------------------------ in the process


def order(number: int) -> tuple[str, ...]:
    """Return the order of the calls in a turn."""
    first = number % len(NETWORKS)
    return NETWORKS[first:] + NETWORKS[:first]


def called(spec: Mapping[str, Any], *, begin: Callable[[], object]) -> bool:
    """Load the model, then call in turns. Return whether all answers are the same.

    Each call lies between two requests to Valgrind.

    Args:
        spec: The specification of `forked.run`, and the number of ``calls``.
        begin: Makes Valgrind begin to count.
    """
    import torch

    torch.set_num_threads(1)
    model = MODELS[spec["model"]]
    model.prepare()
    loader, inputs = loader_of(spec, model.build), model.inputs(BATCH)
    arrived = loader()
    early = answer(arrived, inputs)
    loader.finish()
    plain = made_up(model)
    networks: Mapping[str, nn.Module] = {ARRIVED: arrived, PLAIN: plain, COPIED: copy.deepcopy(plain)}
    right = answer(plain, inputs)
    equal = torch.equal(early, right)
    for network in (*networks.values(),) * WARM_CALLS:  # kernels are chosen and cached
        equal &= torch.equal(answer(network, inputs), right)
    gc.collect()
    gc.disable()  # a collection would fall into an arbitrary call
    begin()
    for number in range(spec["calls"]):
        for name in order(number):
            network = networks[name]
            torch._C._valgrind_toggle()
            found = answer(network, inputs)
            torch._C._valgrind_toggle_and_dump_stats()
            equal &= torch.equal(found, right)
    return equal


def follow() -> None:
    """Make the Valgrind that runs this process begin to count."""
    told = ["callgrind_control", "--instr=on", str(os.getpid())]
    subprocess.run(told, check=True, stdout=subprocess.DEVNULL)


# ------------------------------------------------------------------------------------------- beside it


def counted(spec: Mapping[str, Any]) -> tuple[Counts, bool]:
    """Return the instructions of each call under Valgrind, and whether all answers had the same bits.

    Raises:
        Failed: If the process fails, or too few calls were counted.
    """
    with tempfile.TemporaryDirectory(prefix="upriver-calls-") as folder:
        out, log = Path(folder) / "out", Path(folder) / "log"
        argv = ["valgrind", "--tool=callgrind", "--instr-atstart=no", "--collect-atstart=no"]
        argv += [f"--callgrind-out-file={out}", f"--log-file={log}"]
        argv += [*map(str, module_command("cold_calls", "--spec", json.dumps(spec)))]
        env = {**os.environ, **paths(), "UPRIVER_CACHE": spec["cache"], "PYTHONHASHSEED": "0"}
        env |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        try:
            done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        except FileNotFoundError:
            raise Failed("valgrind is not installed") from None
        except subprocess.TimeoutExpired:
            raise Failed(f"no end within {LIMIT_S:.0f} s") from None
        if done.returncode:
            said = (done.stderr or log.read_text(encoding="utf-8")).strip().splitlines()
            raise Failed(said[-1] if said else f"it ended with {done.returncode}")
        return in_turns(dumped(out), spec["calls"]), json.loads(done.stdout.splitlines()[-1])


def dumped(out: Path) -> list[int]:
    """Return the totals that Callgrind wrote at each request, in order."""
    parts = sorted(out.parent.glob(f"{out.name}.*"), key=lambda path: int(path.suffix[1:]))
    texts = [path.read_text(encoding="utf-8") for path in parts]
    asked = [text for text in texts if "Client Request" in text]
    return [int(total[1]) for text in asked if (total := re.search(r"^totals: (\d+)", text, re.MULTILINE))]


def in_turns(totals: Sequence[int], calls: int) -> Counts:
    """Group totals by the called model.

    Raises:
        Failed: If the number of totals differs from the number of calls.
    """
    names = [name for number in range(calls) for name in order(number)]
    if len(totals) != len(names):
        raise Failed(f"{len(totals)} of {len(names)} calls were counted")
    found: Counts = {name: [] for name in NETWORKS}
    for name, total in zip(names, totals, strict=True):
        found[name].append(total)
    return found


def measure(models: Sequence[str], *, calls: int, runs: Path) -> None:
    """Count each model in its own process, one process per core. Counts do not depend on other processes.

    Args:
        models: Names of `MODELS`.
        calls: Number of counted calls of each network.
        runs: File with earlier results. New results are added as they arrive.
    """
    console, found = Console(stderr=True), kept(runs)
    where = f"Upriver at {commit()}; {machine()}; {versions('torch', 'transformers', 'torchvision')}."
    for model in models:
        MODELS[model].prepare()
    with Local() as place, tempfile.TemporaryDirectory() as scratch:
        tasks = {}
        for model in models:
            spec = spec_of(model, place, scratch, [OURS])
            child(publish, spec)
            tasks[model] = spec | {"run": OURS, "knob": REQUESTS, "calls": calls}
        with (
            ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool,
            console.status("under Valgrind") as status,
        ):
            under_way = {pool.submit(counted, task): model for model, task in tasks.items()}
            for number, future in enumerate(as_completed(under_way), 1):
                model = under_way[future]
                try:
                    counts, equal = future.result()
                except Failed as error:
                    found[model] = Counted({}, False, where, str(error))
                    console.print(f"{model}: {error}", style="red", markup=False)
                else:
                    found[model] = Counted(counts, equal, where)
                    console.print(f"{model}: {found[model].ratio(ARRIVED):.5f}", markup=False)
                keep(found, runs)
                status.update(f"under Valgrind: {number} of {len(models)} models are done")


def kept(runs: Path) -> dict[str, Counted]:
    """Return the earlier counts."""
    if not runs.exists():
        return {}
    return {name: Counted(**each) for name, each in json.loads(runs.read_text(encoding="utf-8")).items()}


def keep(found: Mapping[str, Counted], runs: Path) -> None:
    """Write all counts in the order of `CHOSEN`, whichever model finished first."""
    places = {name: place for place, name in enumerate(CHOSEN)}
    ordered = sorted(found, key=lambda name: places.get(name, len(places)))
    runs.write_text(
        json.dumps({name: asdict(found[name]) for name in ordered}, indent=1) + "\n", encoding="utf-8"
    )


def text(found: Mapping[str, Counted]) -> str:
    """Return the report."""
    _, claim, how, *_ = __doc__.split("\n\n")
    rows, calls = [], set()
    near = right = 0
    for model, each in found.items():
        if each.failed:
            continue
        near += abs(each.ratio(ARRIVED) - 1) <= MOST_AFTER
        right += each.equal
        calls |= {len(each.counts[name]) for name in NETWORKS}
        millions = (Spread.of(1e-6 * count for count in each.counts[name]).text(1) for name in NETWORKS)
        ratios = (f"{each.ratio(name):.5f}" for name in (ARRIVED, COPIED))
        rows.append([MODELS[model].title, *millions, *ratios])
    header = ["model", *(f"{name}, millions" for name in NETWORKS), "arrived / plain", "copied / plain"]
    failed = [
        f"- failed: {MODELS[model].title}: {each.failed}" for model, each in found.items() if each.failed
    ]
    met = "met" if near == right == len(found) else "missed"
    return "\n".join(
        [
            "# What a call costs once a model has arrived, in instructions",
            "",
            claim.replace("The claim: a", "**Claim.** A"),
            "",
            how,
            "",
            f"**{met.capitalize()}**: within {MOST_AFTER:.0%} for {near} of {len(found)} models; the same "
            f"bits in all calls for {right} of {len(found)}.",
            "",
            table(header, rows),
            "",
            *failed,
            *([""] if failed else []),
            f"Instructions of a call: median (least to most) of {', '.join(map(str, sorted(calls)))} calls, "
            f"batch {BATCH}, after {WARM_CALLS} that do not count. All with kernels that use no fused "
            "multiply-adds, which Valgrind emulates one by one: what is asked of kernels is the same. Where "
            "memory lies, and what that costs, does not show in instructions, but in the times of "
            "`cold_start.md`.",
            "",
            *sorted({each.where for each in found.values()}),
            "",
        ]
    )


def main() -> None:
    """Measure and report."""
    parser = command_line(__doc__)
    parser.add_argument("--report", action="store_true", help="only write the report from what is there")
    parser.add_argument("--models", default=",".join(CHOSEN))
    parser.add_argument("--calls", type=int, default=CALLS, help="of each network that count")
    parser.add_argument("--spec", type=json.loads, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    os.environ.update(KERNELS)  # read by the first operator; also for processes that make weights
    if chosen.spec:
        print(json.dumps(called(chosen.spec, begin=follow)))
        return
    output = Output.of(chosen, "cold_calls")
    if chosen.quick:
        model = "squeezenet"
        equal = uncounted(model)
        said = (
            f"{MODELS[model].title}, not counted: the same bits in all calls: {'yes' if equal else 'NO'}.\n"
        )
        output.write(said)
        exit_on_faults([] if equal else [f"{model}: answers with other bits"])
        return
    models = chosen.models.split(",")
    if unknown := set(models) - set(MODELS):
        parser.error(f"no model {', '.join(sorted(unknown))}; there are {', '.join(MODELS)}")
    runs = output.path(".json")
    if not chosen.report:
        measure(models, calls=chosen.calls, runs=runs)
    found = kept(runs)
    output.write(text(found))
    wrong = [name for name, each in found.items() if each.counts and not each.equal]
    failed = [f"{name}: {each.failed}" for name, each in found.items() if each.failed]
    exit_on_faults([*failed, *(f"{name}: answers with other bits" for name in wrong)])


def uncounted(model: str) -> bool:
    """Do all but the counting, which takes Valgrind minutes. Return whether all answers are the same."""
    MODELS[model].prepare()
    with Local() as place, tempfile.TemporaryDirectory() as scratch:
        spec = spec_of(model, place, scratch, [OURS])
        child(publish, spec)
        return called(spec | {"run": OURS, "knob": REQUESTS, "calls": 1}, begin=lambda: None)


if __name__ == "__main__":
    main()
