"""Evaluate the records of `load_aware` for one setting: who was faster, by how much, and the goals.

A level or a rate is a phase. Phases count alike, with any number of requests: an average over time is an
average over phases.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from benchmarks.harness.measuring import Spread
from benchmarks.harness.records import Records
from benchmarks.load_aware.measure import LATER
from benchmarks.load_aware.schedule import (
    CHOOSING,
    FULL,
    LOCAL,
    NEUROSURGEON,
    OURS,
    STEADY,
    Phase,
    Setting,
    steady_cut,
)

MEAN_GAIN: Mapping[str, float] = {"squeezenet1_0": 0.142, "alexnet": 0.0495}
BEST_GAIN: Mapping[str, float] = {"squeezenet1_0": 0.323, "alexnet": 0.394}
"""Gains over Neurosurgeon while the load changes, on average and at best (section V-C)."""

WORSE = -0.03
"""Least mean gain with the other networks."""

OVER_ENDS, OVER_FIXED, CUTTING = 0.03, 0.10, 0.01

MOST_LATE = 1
"""Late requests of a phase: the one that meets a change cannot know of it."""

REUSED = 100
"""Requests that share the cost of cutting (section III-A)."""

Row = Mapping[str, Any]


class Found:
    """The results of one setting.

    Args:
        setting: The setting.
        records: All stored records, of any code version. The page names the version.
    """

    def __init__(self, setting: Setting, records: Records) -> None:
        self.setting = setting
        self.row: Row = records.rows.get(setting.key, {})

    @property
    def complete(self) -> bool:
        """Return whether the setting has run."""
        return bool(self.row)

    @property
    def phases(self) -> Sequence[Phase]:
        """Return the phases that ran."""
        return [Phase(**each) for each in self.row["schedule"]]

    @property
    def stages(self) -> int:
        """Return the stages of the network: the cut at which all is local."""
        return int(self.row["stages"])

    @property
    def ways(self) -> Sequence[str]:
        """Return the ways that choose, then those with a fixed cut."""
        return (*CHOOSING, *STEADY)

    # -------------------------------------------------------------------------------------- requests

    @cached_property
    def _by_way(self) -> dict[tuple[int, str], list[Row]]:
        found: dict[tuple[int, str], list[Row]] = {}
        for request in self.row["requests"]:
            found.setdefault((request["phase"], request["way"]), []).append(request)
        return found

    @cached_property
    def _by_cut(self) -> dict[tuple[int, int], list[float]]:
        """Return the seconds of requests by phase and cut, whichever way chose it.

        Those that the device finished, or computed as well, are excluded.
        """
        found: dict[tuple[int, int], list[float]] = {}
        for request in self.row["requests"]:
            if not request["why"] and not request.get("hedged"):
                found.setdefault((request["phase"], request["cut"]), []).append(request["seconds"])
        return found

    def requests(self, phase: int, way: str, *, settled: bool = False) -> Sequence[Row]:
        """Return a way's requests in a phase, in order; if settled, the later half of them."""
        found = self._by_way.get((phase, way), [])
        return found[len(found) // 2 :] if settled else found

    def spread(self, phase: int, way: str) -> Spread:
        """Return the seconds of a way's requests in a phase.

        A way with a fixed cut uses all requests there.
        """
        cut = steady_cut(way, self.stages)
        if cut is not None:
            return Spread.of(self._by_cut[phase, cut])
        return Spread.of(each["seconds"] for each in self.requests(phase, way))

    def mean_s(self, phase: int, way: str) -> float:
        """Return the mean of these seconds."""
        return statistics.fmean(self.spread(phase, way).values)

    def typical_s(self, phase: int, cut: int) -> float:
        """Return the median of all ways' requests at a cut in a phase."""
        return statistics.median(self._by_cut[phase, cut])

    def usual_cut(self, phase: int, way: str) -> int:
        """Return the most frequent cut of a way once it has settled."""
        return Counter(each["cut"] for each in self.requests(phase, way, settled=True)).most_common(1)[0][0]

    def known(self, phase: int, name: str) -> float:
        """Return the median of our knowledge at the choices, such as ``k``; 0 without any."""
        values = [each[name] for each in self.requests(phase, OURS) if each[name] is not None]
        return statistics.median(values) if values else 0.0

    def label(self, cut: int) -> str:
        """Return a cut in the paper's words, where it has a number there."""
        if cut in (0, self.stages):
            return LOCAL if cut else FULL
        number = self.row["paper"].get(str(cut))
        return f"cut {cut}" if number is None else f"p = {number}"

    # ----------------------------------------------------------------------------- against the others

    def total_s(self, way: str) -> float:
        """Return the sum over phases of the mean seconds of a request."""
        return sum(self.mean_s(phase, way) for phase in range(len(self.phases)))

    def mean_gain(self, over: str) -> float:
        """Return the share of another way's seconds that ours saves, over all phases."""
        return 1 - self.total_s(OURS) / self.total_s(over)

    def most_gain(self, over: str) -> float:
        """Return the saving by the cut with the least mean in each phase.

        All cuts that any way took in the phase compete.
        """
        foreseen_s = sum(
            min(statistics.fmean(seconds) for (at, _), seconds in self._by_cut.items() if at == phase)
            for phase in range(len(self.phases))
        )
        return 1 - foreseen_s / self.total_s(over)

    def best_gain(self, over: str) -> tuple[float, int]:
        """Return the largest saving in a phase, and that phase."""
        gains = [1 - self.mean_s(phase, OURS) / self.mean_s(phase, over) for phase in range(len(self.phases))]
        return max((gain, phase) for phase, gain in enumerate(gains))

    def best_round(self, over: str) -> float:
        """Return the largest saving between adjacent requests: what a plot over time shows."""
        return max(
            1 - ours["seconds"] / other["seconds"]
            for phase in range(len(self.phases))
            for ours, other in zip(self.requests(phase, OURS), self.requests(phase, over), strict=True)
        )

    # ----------------------------------------------------------------------------- against steady cuts

    def cost_s(self, phase: int, request: Row) -> float:
        """Return the seconds of one of our requests: the typical ones at its cut.

        A request that the device finished, or computed as well, counts as itself.
        """
        if request["why"] or request.get("hedged"):
            return float(request["seconds"])
        return self.typical_s(phase, request["cut"])

    def chosen_s(self, phase: int, *, settled: bool) -> float:
        """Return the seconds of our cuts in a phase: each request counts as the typical one at its cut.

        The same cut in the same phase is the same work for every way, so many requests give a better estimate
        than one.
        """
        requests = self.requests(phase, OURS, settled=settled)
        return statistics.fmean(self.cost_s(phase, each) for each in requests)

    def late(self, phase: int) -> int:
        """Return how many of our requests were more than `OVER_ENDS` above the better one of both ends."""
        most_s = (1 + OVER_ENDS) * self.better_end_s(phase)
        return sum(self.cost_s(phase, each) > most_s for each in self.requests(phase, OURS))

    @property
    def most_late(self) -> tuple[int, int]:
        """Return the largest number of late requests of a phase, and that phase."""
        return max((self.late(phase), phase) for phase in range(len(self.phases)))

    def better_end_s(self, phase: int) -> float:
        """Return the seconds of the better one of local and full in a phase."""
        return min(self.typical_s(phase, cut) for cut in (0, self.stages))

    def over_ends(self, phase: int, how: str) -> float:
        """Return how much longer ours takes than the better one of local and full.

        Args:
            phase: The phase.
            how: One of `OVER_ENDS_BY`.
        """
        if how == "measured":
            own = [each["seconds"] for each in self.requests(phase, OURS, settled=True)]
            ours_s = statistics.median(own)
        else:
            ours_s = self.chosen_s(phase, settled=how == "settled")
        return ours_s / self.better_end_s(phase) - 1

    def worst_over_ends(self, how: str) -> tuple[float, int]:
        """Return the largest such excess, and its phase."""
        return max((self.over_ends(phase, how), phase) for phase in range(len(self.phases)))

    @property
    def fixed_s(self) -> dict[int, float]:
        """Return the sum over phases of typical seconds, by cut that was tried in every phase."""
        every = range(len(self.phases))
        cuts = {cut for _, cut in self._by_cut}
        return {
            cut: sum(self.typical_s(phase, cut) for phase in every)
            for cut in sorted(cuts)
            if all((phase, cut) in self._by_cut for phase in every)
        }

    @property
    def best_fixed(self) -> tuple[int, float]:
        """Return the best cut throughout in hindsight, and its seconds."""
        seconds, cut = min((seconds, cut) for cut, seconds in self.fixed_s.items())
        return cut, seconds

    @property
    def over_fixed(self) -> float:
        """Return how much longer ours takes than the best fixed cut; negative where it is shorter."""
        ours = sum(self.chosen_s(phase, settled=False) for phase in range(len(self.phases)))
        return ours / self.best_fixed[1] - 1

    @property
    def untried(self) -> Sequence[int]:
        """Return the cuts that some way chose, but that not every phase has."""
        chosen = {each["cut"] for each in self.row["requests"] if each["way"] in CHOOSING}
        return sorted(chosen - self.fixed_s.keys())

    # -------------------------------------------------------------------------------------- over rates

    @property
    def rates(self) -> Sequence[float]:
        """Return the rates in Mbit/s, each once, the slowest first."""
        return sorted({phase.mbit for phase in self.phases})

    def at_rate(self, way: str, mbit: float) -> float:
        """Return the median seconds of a way's requests at a rate; of a choosing way, once it has settled."""
        phases = [number for number, phase in enumerate(self.phases) if phase.mbit == mbit]
        if way in STEADY:
            return statistics.median(s for number in phases for s in self.spread(number, way).values)
        return statistics.median(
            each["seconds"] for number in phases for each in self.requests(number, way, settled=True)
        )

    def speedups(self, way: str, over: str) -> Sequence[float]:
        """Return how many times quicker a way is than another one, rate by rate."""
        return [self.at_rate(over, mbit) / self.at_rate(way, mbit) for mbit in self.rates]

    # ------------------------------------------------------------------------------------ what it costs

    @property
    def cutting(self) -> tuple[float, int] | None:
        """Return the largest share of `REUSED` requests spent on cutting, with its cut; None if none was new.

        The cost is the excess of the first request at a cut over the next ones, and as many decisions.
        """
        decide_s = self.row["decide_s"]
        shares = [
            (
                (max(0.0, each["first_s"] - each["later_s"]) + REUSED * decide_s)
                / (REUSED * each["later_s"]),
                int(cut),
            )
            for cut, each in self.row["cutting"].items()
        ]
        return max(shares, default=None)

    @property
    def wrong(self) -> int:
        """Return the number of answers that differ from the local model's in a bit."""
        return sum(not each["equal"] for each in self.row["requests"])

    @property
    def fallen_back(self) -> int:
        """Return the requests that the device had to finish instead of a server."""
        return sum(bool(each["why"]) for each in self.row["requests"])

    # ------------------------------------------------------------------------------------------- goals

    @property
    def asked(self) -> frozenset[str]:
        """Return the goals that apply to this setting, whether it has run or not."""
        if self.setting.part != "load":
            return frozenset(GOALS) - {"mean", "best"}
        return frozenset(GOALS) - (set() if self.setting.network in BEST_GAIN else {"best"})

    @property
    def goals(self) -> dict[str, bool]:
        """Return each of these goals with a measurement, and whether it is met."""
        found = {
            **{how: self.worst_over_ends(how)[0] <= OVER_ENDS for how in ("settled", "measured")},
            "late": self.most_late[0] <= MOST_LATE,
            "fixed": self.over_fixed <= OVER_FIXED,
            "equal": self.wrong == 0,
        }
        if self.cutting is not None:
            found["cutting"] = self.cutting[0] <= CUTTING
        if "mean" in self.asked:
            found["mean"] = self.mean_gain(NEUROSURGEON) >= MEAN_GAIN.get(self.setting.network, WORSE)
        if "best" in self.asked:
            found["best"] = self.best_gain(NEUROSURGEON)[0] >= BEST_GAIN[self.setting.network]
        return found


def _listed(shares: Mapping[str, float]) -> str:
    return " and ".join(f"{100 * share:.3g} % with {name}" for name, share in shares.items())


_ENDS = f"in no phase more than {OVER_ENDS:.0%} above the better one of local and full offload"
_AT_CUTS = "each request as long as the median of everybody's at its cut in its phase"

GOALS: Mapping[str, str] = {
    "mean": "while the load changes, the mean seconds of all of ours' requests, phases alike, are less "
    f"than Neurosurgeon's by {_listed(MEAN_GAIN)}, and at most {-WORSE:.0%} more with the others",
    "best": f"the same in the one phase in which it is the most: less by {_listed(BEST_GAIN)}",
    "settled": f"{_ENDS}, by the cuts that ours chose in the later half of its requests, {_AT_CUTS}",
    "measured": f"{_ENDS}, by the median seconds of the later half of ours' own requests, a few",
    "late": f"in no phase more than {MOST_LATE} of ours' requests that is more than {OVER_ENDS:.0%} above "
    f"the better one of local and full offload, {_AT_CUTS}, or as itself where the device computed, too",
    "fixed": f"over all phases at most {OVER_FIXED:.0%} longer than the best of the fixed cuts that were "
    f"tried in every phase, by the cuts that ours chose in all of its requests, {_AT_CUTS}",
    "cutting": f"what the first request at a cut takes beyond the next {LATER}, and {REUSED} decisions, are "
    f"at most {CUTTING:.0%} of {REUSED} requests, at every cut that nobody had used before",
    "equal": "every answer is the local model's, bit for bit",
}
"""Full texts of the verdicts' goals."""

OVER_ENDS_BY = ("settled", "measured", "throughout")
"""Requests by which ours is compared with local and full: the later half by cuts, by themselves, and all."""
