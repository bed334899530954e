"""Provide ``upriver.offload()``: run a model on a device, a server or both, whichever is fastest now."""

from __future__ import annotations

import ssl
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from upriver._deprecation import deprecated_keywords
from upriver._threads.forks import ForkSafeLock, reset_in_child
from upriver.control.partition import (
    DEFAULT_POLICY,
    ESTIMATES,
    PartitionRule,
    choose,
    kept_away,
    kept_away_by_link,
    likely,
)
from upriver.errors import ConfigError, NotExact
from upriver.inference.capture_cache import CaptureCache, Network
from upriver.inference.change_detection import ChangeDetector, module_states
from upriver.inference.costs import WAYS, Measure, device_seconds
from upriver.inference.decision import Decision
from upriver.inference.executor import InferenceRequest, RequestPatience, ServedRequest
from upriver.inference.remote_server import OffloadTuning, RemoteServer
from upriver.inference.uplink import Uplink
from upriver.profile.latency.predictor import Predictor
from upriver.program.capture.whole_model import capture_whole
from upriver.program.compiled_code import as_written
from upriver.program.example_inputs import Example, Inputs
from upriver.program.freeze import check_initialized
from upriver.program.graph.autocast import autocast_dtype, autocast_here
from upriver.program.graph.executor import Program
from upriver.program.tensor_layouts import unusual
from upriver.rpc import validation
from upriver.rpc.client import ServerClient
from upriver.rpc.discovery import is_directory
from upriver.rpc.http import Timeouts
from upriver.rpc.tls import FilePath, client_context
from upriver.rpc.tolerance import EXACT, Agreement, Exact, tolerance_of
from upriver.text import printable
from upriver.types import Plan, require_type

DEADLINE_S = 10.0
"""Default deadline of a request. The input of VGG16 needs 5 s over 1 Mbit/s, the thinnest link of LoADPart's
evaluation (section V-B)."""

LEAST_S = 1.0
"""Shortest timeout for a connection and for calls outside a request, however short the request's deadline
is."""

START_S = 60.0
"""Longest wait for servers at the start. A slower server joins when it is ready."""

COUNTED = ("requests", "device", "server", "gave_up", "hedged")


class Offload:
    """Run a model on the device, on servers or on both. `offload` makes it. Thread-safe.

    Args:
        forms: Finds the captured network for each form of call.
        fars: Servers. ``forms`` shares this list; a forked child replaces its entries.
        fars_anew: Makes the servers again.
        agreement: How exact answers of servers must be.
        autocast: Type that the model was captured under; None where autocast was off.
        cached_cuts: Largest number of cuts that `warm` prepares.

    Attributes:
        last: How the most recently finished request was answered; None before the first.
    """

    def __init__(
        self,
        forms: CaptureCache,
        fars: list[RemoteServer],
        fars_anew: Callable[[], list[RemoteServer]],
        unchanged: ChangeDetector,
        *,
        agreement: Agreement,
        autocast: torch.dtype | None,
        rule: PartitionRule,
        patience: RequestPatience,
        cached_cuts: int,
    ) -> None:
        self.last: ServedRequest | None = None
        self._forms, self._fars, self._rule, self._agreement = forms, fars, rule, agreement
        self._patience, self._cached_cuts, self._autocast = patience, cached_cuts, autocast
        self._lock = ForkSafeLock()
        self._counts: Counter[str] = Counter()
        self._decision: Decision | None = None
        self._close = weakref.finalize(self, _end, fars, patience.helpers)
        self._fars_anew, self._in_child, self._unchanged = fars_anew, False, unchanged
        self._default_dtype = torch.get_default_dtype()
        reset_in_child(self)

    # --------------------------------------------------------------------------------------- asking

    @as_written  # a compiled caller keeps its graph around a call that may contact a server
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output for these inputs in eval mode.

        Raises:
            ConfigError: If the inputs have another form than the example and cannot be captured; the message
                names the argument. If autocast or torch's default dtype differ from those at capture. If a
                function of ``torch.func`` or ``torch.jit.trace`` is active. Or if this object was closed.
            FrozenChanged: If, since the capture, weights were written to, modules replaced, hooks registered
                or removed, or attributes that the forward reads set to other values.
            ProgramError: If the network cannot be computed on these inputs.
        """
        began = time.perf_counter()
        self._check_open()
        self._check_autocast()
        network, tensors = self._forms.find(args, kwargs)
        _check_untraced(tensors)
        patience = self._patience
        with patience.hedging() as hedges:
            decision, far = self._decide(network, hedges=hedges)
            decide_s = time.perf_counter() - began
            request = InferenceRequest(
                captured=network.captured,
                tensors=tensors,
                cut=decision.cut,
                far=far,
                process=decision.costs.process if decision.costs is not None else "",
                deadline_s=patience.deadline_s,
                hedge_s=patience.hedge_after(decision.choice.hedge_s),
                helpers=patience.helpers,
            )
            answer = network.captured.answer(request.run())
        self._unchanged.check()  # again, for changes during the request
        request.served.decide_s, request.served.total_s = decide_s, time.perf_counter() - began
        self._note(request.served)
        return answer

    def decide(self) -> Decision:
        """Decide how a request of the example's form would be cut now."""
        self._check_open()
        return self._decide(self._forms.first)[0]

    def _decide(self, network: Network, *, hedges: bool = True) -> tuple[Decision, RemoteServer | None]:
        captured = network.captured
        alone = network.other_threads if self._agreement.allowed is None else ""
        fars = [] if alone else self._fars
        offered = [(far, costs) for far in fars if (costs := far.costs(captured)) is not None]
        states = [far.now(costs) for far, costs in offered]
        sums = [costs.sums for _, costs in offered]
        offers, deadline_s = list(zip(sums, states, strict=True)), self._patience.deadline_s
        choice = choose(
            self._rule,
            network.total_s,
            captured.program.num_stages,
            offers,
            deadline_s=deadline_s,
            hedges=hedges,
        )
        for server in kept_away(self._rule, choice, offers, deadline_s=deadline_s):
            offered[server][0].ask_load_soon()
        for server in kept_away_by_link(self._rule, choice, offers, deadline_s=deadline_s):
            offered[server][0].probe_soon()
        far = None if choice.server is None else offered[choice.server][0]
        shown = choice.server or 0
        missing = fars if len(offered) < len(fars) else ()
        not_used = [alone] if alone and self._fars else []
        self._decision = decision = Decision(
            rule=self._rule,
            network=network,
            choice=choice,
            server=far.url if far is not None else "",
            costs=offered[shown][1] if offered else None,
            now=states[shown] if offered else None,
            deadline_s=deadline_s,
            exactness=self.exactness if self._fars else "",
            not_used=(*not_used, *(reason for each in missing if (reason := each.why_not(captured)))),
        )
        return decision, far

    def _note(self, served: ServedRequest) -> None:
        with self._lock:
            self.last = served
            self._counts["requests"] += 1
            self._counts["server" if served.server else "device"] += 1
            self._counts["gave_up"] += bool(served.why_not)
            self._counts["hedged"] += served.hedged

    # ------------------------------------------------------------------------------------ explained

    @property
    def decision(self) -> Decision:
        """The last decision; before the first request, the decision for the example."""
        return self._decision or self.decide()

    @property
    def plan(self) -> Plan:
        """The last decision as a plan: ``print(answer.plan)`` shows every cut."""
        return self.decision.plan

    @property
    def why(self) -> str:
        """The last decision in a few sentences, with the reason why each unused server is not asked."""
        return self.decision.why

    @property
    def exactness(self) -> str:
        """Exactness of servers' answers in one line: bit for bit, or within a tolerance and why."""
        return str(self._agreement)

    @property
    def counts(self) -> Mapping[str, int]:
        """Number of requests so far, by outcome.

        ``device`` and ``server`` count the requests that each answered. ``gave_up`` counts requests whose
        server failed to answer. ``hedged`` counts requests that the device started in parallel with a server.
        """
        with self._lock:
            return {name: self._counts[name] for name in COUNTED}

    @property
    def program(self) -> Program:
        """The captured network for the example's form."""
        return self._forms.first.captured.program

    # ------------------------------------------------------------------------------------ preparing

    def warm(self) -> dict[str, tuple[int, ...]]:
        """Prepare the likely cuts: those that win somewhere over a sweep of bandwidths and loads.

        The example runs once through each cut on both sides, and the answers are compared.

        Returns:
            The cuts that are ready, by server address.

        Raises:
            ConfigError: If this object was closed.
            FrozenChanged: As for a request.
        """
        self._check_open()
        self._unchanged.check()
        captured = self._forms.first.captured
        ready: dict[str, tuple[int, ...]] = {}
        for far in self._fars:
            far.wait(START_S, captured)
            costs = far.costs(captured)
            if costs is not None:
                cuts = likely(self._rule, costs.sums, most=self._cached_cuts)
                ready[far.url] = tuple(cut for cut in cuts if far.prepare(captured, cut))
        return ready

    def wait(self, seconds: float | None = None) -> tuple[str, ...]:
        """Wait until each server is ready or has failed, for every form of call captured so far.

        A server that first receives a program may need that long. Forms captured during the wait count too.

        Args:
            seconds: Longest wait; unlimited if None.

        Returns:
            Addresses of the servers that are neither ready nor failed for every form.

        Raises:
            ConfigError: If this object was closed.
            ProgramNotFound: If a server lacks a program and must not be sent it.
        """
        self._check_open()
        late = _wait_for(self._fars, seconds)
        self._check_open()  # again, in case it was closed during the wait
        return late

    # -------------------------------------------------------------------------------------- the end

    def close(self) -> None:
        """Release the servers and refuse further requests. May be called again."""
        self._close()

    def _check_open(self) -> None:
        if not self._close.alive:
            raise ConfigError("this model was closed; make another one with upriver.offload()")
        if self._in_child:
            self._begin_anew()

    def forked(self) -> None:
        """Reset in a forked child, where no server thread runs."""
        if self._close.detach() is None:
            return
        self._decision, self._in_child = None, True
        self._unchanged.forked()
        self._fars.clear()
        self._patience = replace(self._patience, helpers=None)  # new ones
        self._close = weakref.finalize(self, _end, self._fars, self._patience.helpers)

    def _check_autocast(self) -> None:
        now = autocast_here(self.program.device)
        if now != self._autocast:
            raise ConfigError(
                f"the model was captured {_under(self._autocast)}, and is called {_under(now)}: call it as "
                "upriver.offload() was, or make another one there"
            )
        dtype = torch.get_default_dtype()
        if dtype != self._default_dtype:
            raise ConfigError(
                f"torch's default dtype was {self._default_dtype} when the model was captured and is {dtype} "
                "now: put it back, or make another one with upriver.offload()"
            )

    def _begin_anew(self) -> None:
        """Connect to the servers at the child's first request; many children never make one."""
        with self._lock:
            if not self._in_child:
                return
            self._fars += self._fars_anew()
            for far in self._fars:
                far.may_decide = True
            for network in self._forms.networks:
                _serve(self._fars, network)
            self._in_child = False

    def __enter__(self) -> Offload:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


@deprecated_keywords(
    tuning=(OffloadTuning, {name: name for name in ("probe_s", "load_s", "window", "cached_cuts")})
)
def offload(
    model: nn.Module,
    *,
    example_inputs: Inputs,
    servers: Sequence[str] = (),
    policy: str | None = None,
    cut: int | None = None,
    deadline_s: float = DEADLINE_S,
    hedge_s: float | None = None,
    push: bool = True,
    exact: Exact = "auto",
    measure: Measure = "predict",
    tuning: OffloadTuning | None = None,
    token: str | None = None,
    ca: FilePath | None = None,
    certificate: FilePath | None = None,
    key: FilePath | None = None,
) -> Offload:
    """Run a model on this device, on servers, or on both, whichever is fastest at the moment.

    The answer equals ``model(...)`` in eval mode under ``torch.no_grad()``, with PyTorch's fused transformer
    path off: bit for bit, or within a tolerance where no server proves equal bits. If `offload` is called
    under autocast, the answer equals the model's under that autocast; later calls must use the same autocast.
    A request is answered whatever happens to the servers. The threads that track the servers end with
    ``close()``, or with the object.

    Args:
        model: Captured in its present state, in eval mode; the model itself is left unchanged. Its parameters
            are not copied. If they are written to, or an attribute that its forward reads changes, requests
            raise `FrozenChanged`; call `offload` again.
        example_inputs: Inputs of a call: a tensor, a tuple of positional inputs, or a mapping of keyword
            inputs, on the model's device. A call of another form is captured at its first use, up to 8 forms
            in all.
        servers: Addresses; without any the device answers alone.
        policy: ``inference`` (ours, and the default where neither ``policy`` nor ``cut`` is given),
            ``loadpart``, ``neurosurgeon`` (the same without the server's load), ``local`` or ``remote``.
        cut: Number of stages that the device always runs, instead of a policy.
        deadline_s: Time after which the device computes the rest of a request itself.
        hedge_s: Time after which the device starts the rest in parallel with the server. If None, our own
            policy decides: when a server is late, or when it may no longer be the better place.
        push: Whether to send the program to a server that lacks it.
        exact: ``bitwise`` uses only servers that compute the same bits. ``numeric`` accepts a tolerance,
            which ``exactness`` states. ``auto`` is ``bitwise`` if any server proves equal bits when first
            asked, else ``numeric``; what is decided then holds to the end.
        measure: ``predict`` uses the device's models from ``upriver calibrate``, and measures where there are
            none; ``measure`` measures the device. Or a `Predictor` to use.
        tuning: How closely to follow the servers, and how much to prepare.
        token: Sent with every request to a server.
        ca: As for ``upriver.connect``, like the next two.
        certificate: Certificate presented to servers.
        key: Private key of the certificate.

    Raises:
        CaptureError: If the model cannot be captured; the message says why.
        ModelError: If a parameter is not initialized yet.
        ConfigError: If an argument is outside its allowed range.
        NotExact: If ``exact`` is ``bitwise``, and all servers answer and none computes the same bits.
        ProgramNotFound: If a server lacks the program and must not be sent it.
    """
    require_type("model", model, nn.Module, "in eval or not")
    check_initialized(model)
    rule = _rule(policy, cut)
    tuning = require_type(
        "tuning", OffloadTuning() if tuning is None else tuning, OffloadTuning, "OffloadTuning()"
    )
    validation.flag("push", push)
    validation.choice("exact", exact, EXACT)
    if not isinstance(measure, Predictor):
        validation.choice("measure", measure, WAYS)
    patience = RequestPatience(deadline_s=deadline_s, hedge_s=hedge_s)
    _check_servers(servers)
    tls = client_context(ca=ca, certificate=certificate, key=key)
    token, fars = validation.token(token), list[RemoteServer]()
    unchanged = ChangeDetector(model)
    example = Example.of(example_inputs)
    autocast = autocast_dtype(autocast_here(example.tensors[0].device))
    forms = CaptureCache(example, partial(_make, model, fars, measure, unchanged, autocast))
    agreement = Agreement(exact, tolerance_of(forms.first.captured.program))
    remote = partial(RemoteServer, tuning=tuning, push=push, agreement=agreement)
    fars_anew = partial(_fars, tuple(servers), deadline_s, remote, token=token, tls=tls)
    fars += fars_anew()
    answer = Offload(
        forms,
        fars,
        fars_anew,
        unchanged,
        agreement=agreement,
        autocast=autocast,
        rule=rule,
        patience=patience,
        cached_cuts=tuning.cached_cuts,
    )
    try:
        _check_cut(rule, answer.program.num_stages)
        _serve(fars, forms.first)
        _agree(fars, agreement)
    except BaseException:
        answer.close()
        raise
    return answer


def _check_untraced(tensors: Sequence[torch.Tensor]) -> None:
    """Refuse tracers. They would see no operator of a server and take its answer for a constant."""
    if torch._C._get_tracing_state() is not None:
        raise ConfigError(_TRACED.format("torch.jit.trace"))
    for tensor in tensors:
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            raise ConfigError(_TRACED.format("functions of torch.func, such as vmap and grad,"))
        if kind := unusual(tensor):
            raise ConfigError(f"an offloaded model takes tensors in plain memory, got {kind}")


_TRACED = "{} cannot look into an offloaded model, which may be answered elsewhere: give it the model itself"


def _under(autocast: torch.dtype | None) -> str:
    return (
        "without autocast"
        if autocast is None
        else f"under autocast to {str(autocast).removeprefix('torch.')}"
    )


def _rule(policy: str | None, cut: int | None) -> PartitionRule:
    if policy is not None and cut is not None:
        raise ConfigError(f"cut={cut} takes the place of a policy; give it or policy={policy!r}")
    name = DEFAULT_POLICY if policy is None else policy
    return PartitionRule(policy=validation.choice("policy", name, ESTIMATES), cut=cut)


def _check_cut(rule: PartitionRule, num_stages: int) -> None:
    if rule.cut is not None and not (type(rule.cut) is int and 0 <= rule.cut <= num_stages):
        raise ConfigError(f"cut must be a whole number in 0..{num_stages}, got {rule.cut!r}")


def _check_servers(urls: Sequence[str]) -> None:
    if isinstance(urls, str) or not isinstance(urls, Collection):
        raise ConfigError(f"servers must be a list of addresses, got {printable(repr(urls), 100)}")
    for url in validation.addresses(urls):
        if is_directory(url):
            raise ConfigError(f"{url} is a directory; give the addresses of servers that it names")


def _fars(
    urls: Sequence[str],
    deadline_s: float,
    remote: Callable[..., RemoteServer],
    *,
    token: str | None,
    tls: ssl.SSLContext | None,
) -> list[RemoteServer]:
    timeouts, patient_s = Timeouts(), max(deadline_s, LEAST_S)
    timeouts = Timeouts(
        connect_s=min(timeouts.connect_s, patient_s), question_s=min(timeouts.question_s, patient_s)
    )
    uplink = Uplink()
    clients = [ServerClient(url, token=token, timeouts=timeouts, tls=tls) for url in dict.fromkeys(urls)]
    return [remote(client, uplink=uplink) for client in clients]


def _make(
    model: nn.Module,
    fars: Sequence[RemoteServer],
    measure: Measure,
    unchanged: ChangeDetector,
    autocast: torch.dtype | None,
    example: Example,
) -> Network:
    """Capture a model for one form of call, and have servers prepare it."""
    with unchanged.capturing():
        captured = capture_whole(model, example, autocast=autocast)
    unchanged.watch(captured.weights, module_states(model), captured.attributes)
    seconds = device_seconds(captured, measure)
    network = Network(captured=captured, device_s=seconds, total_s=sum(seconds))
    _serve(fars, network)
    return network


def _serve(fars: Sequence[RemoteServer], network: Network) -> None:
    for far in fars:
        far.serve(network.captured, network.device_s)


def _agree(fars: Sequence[RemoteServer], agreement: Agreement) -> None:
    """Ask all servers for equal bits, and decide how exact answers must be; later servers keep to it.

    Raises:
        NotExact: If equal bits are demanded, and all servers answer and none gives them.
        ProgramNotFound: If a server lacks the program and must not be sent it.
    """
    _wait_for(fars, START_S)
    inexact = {far: error for far in fars if (error := far.inexact) is not None}
    if inexact:
        first = str(next(iter(inexact.values())))
        if agreement.exact == "bitwise" and len(inexact) == len(fars):
            raise NotExact(f"{first}; exact='auto' accepts a tolerance")
        if agreement.exact == "auto" and agreement.try_tolerance(first):
            for far in inexact:
                far.ask_again()
            _wait_for(list(inexact), START_S)
            agreement.withdraw()
    for far in fars:
        far.may_decide = True


def _wait_for(fars: Sequence[RemoteServer], seconds: float | None) -> tuple[str, ...]:
    began = time.monotonic()
    for far in fars:
        far.wait(None if seconds is None else max(0.0, began + seconds - time.monotonic()))
        if (error := far.lacks_program) is not None:
            raise error
    return tuple(far.url for far in fars if not far.wait(0.0))


def _end(fars: Sequence[RemoteServer], helpers: Executor | None) -> None:
    for far in fars:
        far.close()
    if helpers is not None:
        helpers.shutdown(wait=False)  # the finalizer may run in a helper thread
