"""Explain a request's cut: the deciding numbers, in sentences and as a table."""

from __future__ import annotations

from dataclasses import dataclass

from upriver.control.partition import DEFAULT_POLICY, ESTIMATES, CutChoice, PartitionRule, ServerConditions
from upriver.inference.capture_cache import Network
from upriver.inference.costs import CutCosts
from upriver.latency import LatencyModel
from upriver.text import rate_text, seconds_text
from upriver.types import Cost, Plan, Route, Segment, Tier


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Decision:
    """A cut and the numbers behind it.

    Attributes:
        server: Address of the server that is asked; empty where none is.
        costs: Costs with that server, or with one that could have been asked; None where there is none.
        now: Present state of the link and of that server; None where unknown.
        deadline_s: Time after which the device goes on by itself.
        exactness: How exact answers of servers are; empty where there are no servers.
        not_used: Why other servers are not asked.
    """

    rule: PartitionRule
    network: Network
    choice: CutChoice
    server: str
    costs: CutCosts | None
    now: ServerConditions | None
    deadline_s: float
    exactness: str = ""
    not_used: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return (
            f"Decision(cut={self.cut}, num_stages={self.num_stages}, server={self.server!r}, "
            f"predicted_s={self.predicted_s:.6g}, why={self.why!r})"
        )

    @property
    def cut(self) -> int:
        """Number of stages that the device runs."""
        return self.choice.cut

    @property
    def num_stages(self) -> int:
        """Number of all stages: the cut at which no server is asked."""
        return self.network.captured.program.num_stages

    @property
    def predicted_s(self) -> float:
        """Predicted seconds of the request; infinite where unknown."""
        return self.choice.seconds

    @property
    def plan(self) -> Plan:
        """The decision as a plan, with a row for each cut where a server could be asked."""
        if self.costs is None or self.now is None:
            return Plan(
                policy=self.rule.policy,
                feasible=True,
                routes=(self._route(),),
                predicted=None if self.server else self._local_cost(),
                table=(),
                why=self.why,
                unit="request",
            )
        model = LatencyModel(self.costs.profile, self.costs.cluster(self.now))
        table = model.table(ESTIMATES[self.rule.policy](self.costs.sums, self.now))
        return Plan(
            policy=self.rule.policy,
            feasible=True,
            routes=(self._route(),),
            predicted=table[self.cut].cost,
            table=table,
            why=self.why,
            unit="request",
        )

    @property
    def why(self) -> str:
        """The decision in a few sentences."""
        exactness = (f"Exactness: {self.exactness}.",) if self.exactness else ()
        not_asked = (f"Not asked: {reason}." for reason in self.not_used)
        return " ".join((self._what(), *exactness, *not_asked))

    def _what(self) -> str:
        alone = f"the device alone would take {seconds_text(self.network.total_s)} s"
        if not self.server:
            here = f"All {self.num_stages} stages run on the device"
            if self.rule.cut_of(self.num_stages) == self.num_stages:
                return f"{here}, as asked for; {alone}."
            if self.costs is None:
                return f"{here}: there is no server to ask; {alone}."
            return f"{here}: {alone}, and {self._no_cut()}{self._state()}."
        where = f"{self.cut} of {self.num_stages} stages run on the device and the rest on {self.server}"
        if self.now is None or self.costs is None:
            return f"{where}, as asked for; of the link nothing is known yet."
        sums, now = self.costs.sums, self.now
        sent_s = float(sums.sent_bytes[self.cut]) / now.upload_bytes_per_s
        parts = (
            f"{seconds_text(float(sums.device_s[self.cut]))} s here, {seconds_text(sent_s)} s on the link, "
            f"{seconds_text(float(sums.server_s[self.cut]))} s there"
        )
        asked = ", as asked for" if self.rule.cut_of(self.num_stages) is not None else ""
        trial = (
            " The device computes as well, in case that the server is slow."
            if self.choice.hedge_s == 0
            else ""
        )
        return f"{where}{asked}: {seconds_text(self.predicted_s)} s ({parts}{self._state()}); {alone}.{trial}"

    def _no_cut(self) -> str:
        """Return the reason that no cut is taken, for the shown server."""
        if self.costs is not None and self.now is not None:
            seconds = ESTIMATES[self.rule.policy](self.costs.sums, self.now)
            if self.deadline_s < seconds.min() < self.network.total_s:
                deadline = f"the deadline of {seconds_text(self.deadline_s)} s"
                return f"no answer of a server would be there by {deadline}"
            if self.rule.is_ours and self.now.misses:
                return "it answers sooner than a server did last"
        return "no cut takes less"

    def _state(self) -> str:
        """Describe the link and the load that the policy used."""
        if self.now is None:
            return ""
        now = self.now
        text = f", at {rate_text(now.upload_bytes_per_s)}, a round trip of {seconds_text(now.rtt_s)} s"
        text += f", load {now.load:.3g}"
        if now.own is not None and now.own.is_current(now.load) and self.rule.policy == DEFAULT_POLICY:
            text += f" ({now.own.load:.3g} by the last answer)"
        return text + (f" and a wait of {seconds_text(now.wait_s)} s" if now.wait_s > 0 else "")

    def _route(self) -> Route:
        segments = (
            Segment(tier=Tier.COMPUTE, start=0, stop=self.cut),
            Segment(tier=Tier.STORAGE, start=self.cut, stop=self.num_stages),
        )
        return Route(segments=segments)

    def _local_cost(self) -> Cost:
        seconds = self.network.total_s
        return Cost(epoch_s=seconds, storage_s=0.0, network_s=0.0, compute_s=seconds, bytes=0.0)
