"""``upriver plan``: show each policy's choice, from files alone or from a model measured here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from upriver.cli.common import DebugOption, JsonOption, emit
from upriver.cli.options import (
    AutocastOption,
    InputShapeOption,
    check_micro_batch,
    parse_bandwidth,
    parse_shape,
    parse_sweep,
)
from upriver.cli.output import check_output, check_picture, write_picture, write_whole
from upriver.errors import ConfigError
from upriver.progress import note
from upriver.text import rate_text

if TYPE_CHECKING:
    from upriver.cli.plan.question import PlanQuestion
    from upriver.policies import Policy
    from upriver.report.sweep import SweepPoint
    from upriver.types import Cluster, Plan, Workload

ALL = "all"
"""Value of ``--policy`` that asks all of them."""

EXIT_NO_FIT = 1
"""Exit code if the one requested policy has no plan that fits; the input was valid."""

MOST_SAMPLES = 2**53
"""Largest number of samples: whole numbers are exact up to it as floats."""

STAGES_ALONE = (
    "Only the stages and the tail were measured, on this machine, and the stages are taken to be as fast on "
    "the storage tier; memory, rates, load and micro-batch are those of --cluster."
)
"""Note on plans for a measured model and the machines of a file."""


def plan(
    profile: Annotated[
        Path | None, typer.Option(metavar="P.json", help="What each stage costs (upriver.profile/1).")
    ] = None,
    cluster: Annotated[
        Path | None, typer.Option(metavar="C.json", help="Machines and link (upriver.cluster/1).")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="In place of --profile: a model to measure here, named as for cuts."
        ),
    ] = None,
    freeze_to: Annotated[
        str | None, typer.Option(metavar="MODULE", help="With --model: its last frozen module.")
    ] = None,
    stored_bytes: Annotated[
        float | None,
        typer.Option(help="With --model: bytes of a stored sample; those of the model's input without it."),
    ] = None,
    micro_batch: Annotated[
        int | None,
        typer.Option(
            help="With --model: samples the frozen stages see at once; those of --cluster, else 16."
        ),
    ] = None,
    input_shape: InputShapeOption = None,
    autocast: AutocastOption = None,
    bandwidth: Annotated[
        str | None,
        typer.Option(metavar="RATE", help="Of the link, as 50Mbit or 10MB; wins over that of --cluster."),
    ] = None,
    metrics: Annotated[
        Path | None,
        typer.Option(
            metavar="M.json",
            help="In place of a profile: what was measured of an input pipeline (upriver.metrics/1), for the "
            "policies fastflow and upriver.",
        ),
    ] = None,
    policy: Annotated[str, typer.Option(metavar="NAME|all", help="Whose choice to show.")] = ALL,
    batch_size: Annotated[int, typer.Option(help="Samples of a training step.")] = 128,
    num_samples: Annotated[int, typer.Option(help="Samples of an epoch.")] = 10_000,
    sweep: Annotated[
        str | None,
        typer.Option(metavar="SPEC", help="Plan at bandwidth=50Mbit..12Gbit or bandwidth=A,B,C as well."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw the seconds of every cut, choices marked.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write all of it as one page that needs nothing else.")
    ] = None,
    save_profile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the profile that was planned with.")
    ] = None,
    save_cluster: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the cluster that was planned with.")
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> int:
    """Say where each policy would cut a model, what an epoch would take, and why.

    loadpart and inference say it of one request of a device instead, which is the compute tier then: it runs
    what is before the cut, and the storage tier, its seconds times load, the rest.

    Plans from a profile and a cluster file, with no model and no hardware; or from a model, whose stages are
    measured on this machine. The storage tier is taken as equal to it, or, with a cluster file, as fast at
    the stages and all else as the file says.

    With the name of one policy the exit code is 1 where its choice does not fit the memory; its plan is
    printed all the same, with "feasible": false. With all of them it is 0: that one has no answer is one.

    With --metrics it says instead whether, which and how many of an input pipeline's stages to offload.
    """
    if metrics is not None:
        from upriver.cli.plan.metrics import plan_metrics

        only_with_a_profile = {
            "profile": profile,
            "cluster": cluster,
            "model": model,
            "freeze-to": freeze_to,
            "stored-bytes": stored_bytes,
            "micro-batch": micro_batch,
            "input-shape": input_shape,
            "autocast": autocast,
            "bandwidth": bandwidth,
            "sweep": sweep,
            "plot": plot,
            "html": html,
            "save-profile": save_profile,
            "save-cluster": save_cluster,
        }
        idle = [name for name, value in only_with_a_profile.items() if value is not None]
        return plan_metrics(metrics, policy, idle=idle, as_json=as_json)
    outputs = Outputs(plot=plot, html=html, save_profile=save_profile, save_cluster=save_cluster)
    outputs.check()
    source = PlanInputs(
        profile=profile,
        cluster=cluster,
        model=model,
        bandwidth=None if bandwidth is None else parse_bandwidth(bandwidth),
        freeze_to=freeze_to,
        stored_bytes=stored_bytes,
        micro_batch=micro_batch,
        input_shape=parse_shape(input_shape),
        autocast=autocast,
    )
    policies = _policies(policy)
    source.check()
    if model is not None and _of_request(policies):
        raise ConfigError(f"policy {policy} plans from files: --profile P.json and --cluster C.json")
    rates = () if sweep is None else parse_sweep(sweep)
    for name, value in (("batch_size", batch_size), ("num_samples", num_samples)):
        if not 1 <= value <= MOST_SAMPLES:
            raise ConfigError(f"{name} must lie in 1..{MOST_SAMPLES}, got {value}")
    question = source.question(batch_size=batch_size, num_samples=num_samples)
    answer = _answer(policies, question, rates)
    outputs.write(question, answer)
    _tell(question, answer, policy, as_json=as_json)
    return _exit_code(answer, policy)


# --------------------------------------------------------------------------------------- the question


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanInputs:
    """Sources of profile and cluster: files, or a model and a bandwidth."""

    profile: Path | None
    cluster: Path | None
    model: str | None
    bandwidth: float | None
    freeze_to: str | None
    stored_bytes: float | None
    micro_batch: int | None
    input_shape: tuple[int, ...] | None
    autocast: str | None

    def check(self) -> None:
        """Check that all needed options were given, and no option without effect."""
        if self.profile is not None and self.model is not None:
            raise ConfigError("plan from --profile P.json or from --model NAME, not both")
        if self.profile is None and self.model is None:
            raise ConfigError("plan from --profile P.json and --cluster C.json, or from --model NAME")
        if self.profile is not None and self.cluster is None:
            raise ConfigError("--profile goes with --cluster C.json")
        if self.cluster is None and self.bandwidth is None:
            raise ConfigError("--model goes with --bandwidth RATE, as 100Mbit, or with --cluster C.json")
        if self.micro_batch is not None:
            check_micro_batch(self.micro_batch)
        names = ("freeze_to", "stored_bytes", "micro_batch", "input_shape", "autocast")
        idle = [f"--{name.replace('_', '-')}" for name in names if getattr(self, name) is not None]
        if self.profile is not None and idle:
            raise ConfigError(f"{', '.join(idle)} would not count with --profile, only with --model")

    def question(self, *, batch_size: int, num_samples: int) -> PlanQuestion:
        """Read or measure the plan's inputs."""
        from upriver.cli.plan.question import PlanQuestion, read_cluster, read_profile
        from upriver.types import Workload

        workload = Workload(batch_size=batch_size, num_samples=num_samples)
        machines = None if self.cluster is None else read_cluster(self.cluster)
        if self.profile is not None and machines is not None:
            question = PlanQuestion(profile=read_profile(self.profile), cluster=machines, workload=workload)
        else:
            question = self._measured(machines, workload)
        return question if self.bandwidth is None else question.at(self.bandwidth)

    def _measured(self, machines: Cluster | None, workload: Workload) -> PlanQuestion:
        """Measure the model; a cluster file gives the machines."""
        from upriver.cli.plan.model import SAME_MACHINE, MeasureOptions, measured_profile, same_machine
        from upriver.cli.plan.question import PlanQuestion
        from upriver.program.graph.autocast import autocast_dtype

        wanted = MeasureOptions(
            model=self.model or "",
            freeze_to=self.freeze_to,
            micro_batch=self._micro_batch(machines),
            input_shape=self.input_shape,
            autocast=autocast_dtype(self.autocast),
            stored_bytes=self.stored_bytes,
        )
        return PlanQuestion(
            profile=measured_profile(wanted),
            cluster=machines or same_machine(self.bandwidth or 0.0, wanted.micro_batch),
            workload=workload,
            notes=(SAME_MACHINE if machines is None else STAGES_ALONE,),
        )

    def _micro_batch(self, machines: Cluster | None) -> int:
        """Return the micro-batch size to plan for and measure; a cluster file decides it."""
        from upriver.types import DEFAULT_MICRO_BATCH

        if machines is None:
            return DEFAULT_MICRO_BATCH if self.micro_batch is None else self.micro_batch
        size = machines.storage.micro_batch
        if self.micro_batch not in (None, size):
            raise ConfigError(
                f"--micro-batch {self.micro_batch} would not count with --cluster, which says {size}; change "
                f"storage.micro_batch in {self.cluster}"
            )
        try:
            return check_micro_batch(size)
        except ConfigError as error:
            raise ConfigError(f"{self.cluster}: storage.{error}") from None


def _policies(name: str) -> Mapping[str, Policy]:
    """Return the policies to ask. "all" means those for training: a single request is another question."""
    from upriver.policies import POLICIES, REQUEST_POLICIES

    if name == ALL:
        return POLICIES
    if name == "fastflow":
        raise ConfigError("policy fastflow goes by measurements of an input pipeline: --metrics M.json")
    every = {**POLICIES, **REQUEST_POLICIES}
    if name not in every:
        raise ConfigError(f"--policy must be one of {', '.join(every)} or {ALL}, got {name!r}")
    return {name: every[name]}


def _of_request(policies: Iterable[str]) -> bool:
    from upriver.policies import REQUEST_POLICIES

    return any(name in REQUEST_POLICIES for name in policies)


# ----------------------------------------------------------------------------------------- the answer


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanAnswer:
    """Each requested policy's plan, and the plans at other bandwidths."""

    plans: Mapping[str, Plan]
    points: Sequence[SweepPoint]

    def document(self, policy: str) -> dict[str, Any]:
        """Return one plan as the document itself, or all under ``plans``; a sweep goes under ``sweep``."""
        from upriver.report.plan import to_dict
        from upriver.report.sweep import sweep_to_dict

        documents = {name: to_dict(plan) for name, plan in self.plans.items()}
        document: dict[str, Any] = {"plans": documents} if policy == ALL else documents[policy]
        return {**document, "sweep": sweep_to_dict(self.points)} if self.points else document


def _answer(policies: Mapping[str, Policy], question: PlanQuestion, rates: Sequence[float]) -> PlanAnswer:
    from upriver.report.sweep import sweep_bandwidth

    profile, cluster, workload = question.profile, question.cluster, question.workload
    of_request = _of_request(policies)
    question.check_finite(of_request=of_request)
    if rates:
        question.at(min(rates)).check_finite(of_request=of_request)
    return PlanAnswer(
        plans={name: policy(profile, cluster, workload) for name, policy in policies.items()},
        points=sweep_bandwidth(policies, rates, profile, cluster, workload),
    )


def _facts(question: PlanQuestion, answer: PlanAnswer) -> dict[str, str]:
    return question.request_facts() if _of_request(answer.plans) else question.facts()


def _tell(question: PlanQuestion, answer: PlanAnswer, policy: str, *, as_json: bool) -> None:
    from upriver.cli.plan.text import print_plans, print_sweep

    def text() -> None:
        print_plans(_facts(question, answer), question.notes, answer.plans)
        if answer.points:
            print_sweep(answer.points)

    if as_json:
        for line in question.notes:
            note(f"note: {line}")
    emit(answer.document(policy) if as_json else None, as_json=as_json, text=text)


def _exit_code(answer: PlanAnswer, policy: str) -> int:
    """Return the exit code, and print on stderr what is missing if no plan fits."""
    if any(plan.feasible for plan in answer.plans.values()):
        return 0
    last = answer.plans[policy] if policy != ALL else list(answer.plans.values())[-1]
    if policy == ALL:
        note(f"no policy has a plan that fits; {last.policy}: {last.why}")
        return 0
    note(f"error: policy {policy}: {last.why}")
    return EXIT_NO_FIT


# ------------------------------------------------------------------------------------------ the files


@dataclass(frozen=True, kw_only=True, slots=True)
class Outputs:
    """Files to write, each of them optional."""

    plot: Path | None
    html: Path | None
    save_profile: Path | None
    save_cluster: Path | None

    def check(self) -> None:
        """Check before any work that the files can be written.

        Raises:
            ConfigError: If one cannot, or two are the same.
        """
        check_picture(self.plot)
        for name in ("html", "save_profile", "save_cluster"):
            check_output(getattr(self, name), f"--{name.replace('_', '-')}")
        paths = [path.resolve() for path in astuple(self) if path is not None]
        if len(set(paths)) < len(paths):
            raise ConfigError("two of --plot, --html, --save-profile and --save-cluster name one file")

    def write(self, question: PlanQuestion, answer: PlanAnswer) -> None:
        """Write the files, each whole or not at all."""
        from upriver.profile import cluster_to_json, profile_to_json

        rate = rate_text(question.cluster.link.bandwidth_bytes_per_s)
        title = f"Where to cut {question.profile.model} at {rate}"
        if self.save_profile is not None:
            write_whole(self.save_profile, profile_to_json(question.profile).encode())
        if self.save_cluster is not None:
            write_whole(self.save_cluster, cluster_to_json(question.cluster).encode())
        if self.plot is not None:
            from upriver.report.plan_plot import plot_plans

            write_picture(self.plot, plot_plans(answer.plans, title=title, points=answer.points))
        if self.html is not None:
            from upriver.report.plan_html import render_html

            page = render_html(
                answer.plans,
                title=title,
                facts=_facts(question, answer),
                notes=question.notes,
                points=answer.points,
            )
            write_whole(self.html, page.encode())
        for path in (self.plot, self.html):
            if path is not None:
                note(f"written: {path}")
