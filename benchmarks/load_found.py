"""What the records of `load_aware.py` say of one setting: who was faster, by how much, what goals are met.

A level or a rate is a phase. Phases count alike, however many requests they had: what is averaged over time
is averaged over phases.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from _common import Spread
from _planned import Records
from load_measure import LATER
from load_schedule import CHOOSING, FULL, LOCAL, NEUROSURGEON, OURS, STEADY, Phase, Setting, steady_cut

MEAN_GAIN: Mapping[str, float] = {"squeezenet1_0": 0.142, "alexnet": 0.0495}
BEST_GAIN: Mapping[str, float] = {"squeezenet1_0": 0.323, "alexnet": 0.394}
"""Against Neurosurgeon while the load changes, over all of it and at best (section V-C)."""

WORSE = -0.03
"""What the mean gain may be with the other networks."""

OVER_ENDS, OVER_FIXED, CUTTING = 0.03, 0.10, 0.01
REUSED = 100
"""Requests that what cutting costs is spread over (section III-A)."""

Row = Mapping[str, Any]


class Found:
    """One setting.

    Args:
        setting: Which.
        records: All that were kept, whatever the code was; the page tells by which.
    """

    def __init__(self, setting: Setting, records: Records) -> None:
        self.setting = setting
        self.row: Row = records.rows.get(setting.key, {})

    @property
    def complete(self) -> bool:
        """Whether it has been run."""
        return bool(self.row)

    @property
    def phases(self) -> Sequence[Phase]:
        """Those that were run."""
        return [Phase(**each) for each in self.row["schedule"]]

    @property
    def stages(self) -> int:
        """Of the network: the cut at which all is local."""
        return int(self.row["stages"])

    @property
    def ways(self) -> Sequence[str]:
        """That choose, then those that do not."""
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
        """Seconds of all requests that were cut there in a phase, whoever chose it."""
        found: dict[tuple[int, int], list[float]] = {}
        for request in self.row["requests"]:
            if not request["why"]:
                found.setdefault((request["phase"], request["cut"]), []).append(request["seconds"])
        return found

    def requests(self, phase: int, way: str, *, settled: bool = False) -> Sequence[Row]:
        """A way's requests in a phase, in order; where it is to have settled, the later half of them."""
        found = self._by_way.get((phase, way), [])
        return found[len(found) // 2 :] if settled else found

    def spread(self, phase: int, way: str) -> Spread:
        """Seconds of a way's requests in a phase; of one that has no choice everybody's at its cut."""
        cut = steady_cut(way, self.stages)
        if cut is not None:
            return Spread.of(self._by_cut[phase, cut])
        return Spread.of(each["seconds"] for each in self.requests(phase, way))

    def mean_s(self, phase: int, way: str) -> float:
        """The mean of these."""
        return statistics.fmean(self.spread(phase, way).values)

    def typical_s(self, phase: int, cut: int) -> float:
        """The median of everybody's requests at a cut in a phase."""
        return statistics.median(self._by_cut[phase, cut])

    def usual_cut(self, phase: int, way: str) -> int:
        """Where a way cuts the most often once it has settled."""
        return Counter(each["cut"] for each in self.requests(phase, way, settled=True)).most_common(1)[0][0]

    def known(self, phase: int, name: str) -> float:
        """The median of what ours knew when it chose, such as ``k``; 0 where it knew nothing."""
        values = [each[name] for each in self.requests(phase, OURS) if each[name] is not None]
        return statistics.median(values) if values else 0.0

    def label(self, cut: int) -> str:
        """A cut in the paper's words, where it has a number there."""
        if cut in (0, self.stages):
            return LOCAL if cut else FULL
        number = self.row["paper"].get(str(cut))
        return f"cut {cut}" if number is None else f"p = {number}"

    # ----------------------------------------------------------------------------- against the others

    def total_s(self, way: str) -> float:
        """The sum over phases of the mean seconds of a request."""
        return sum(self.mean_s(phase, way) for phase in range(len(self.phases)))

    def mean_gain(self, over: str) -> float:
        """What of another's seconds ours saves, over all phases."""
        return 1 - self.total_s(OURS) / self.total_s(over)

    def most_gain(self, over: str) -> float:
        """What the cut with the least mean in each phase, of all that anybody took there, would save."""
        foreseen_s = sum(
            min(statistics.fmean(seconds) for (at, _), seconds in self._by_cut.items() if at == phase)
            for phase in range(len(self.phases))
        )
        return 1 - foreseen_s / self.total_s(over)

    def best_gain(self, over: str) -> tuple[float, int]:
        """The same in the phase in which it is the most, and which one that is."""
        gains = [1 - self.mean_s(phase, OURS) / self.mean_s(phase, over) for phase in range(len(self.phases))]
        return max((gain, phase) for phase, gain in enumerate(gains))

    def best_round(self, over: str) -> float:
        """The same of one request of either, right after each other: what a picture over time shows."""
        return max(
            1 - ours["seconds"] / other["seconds"]
            for phase in range(len(self.phases))
            for ours, other in zip(self.requests(phase, OURS), self.requests(phase, over), strict=True)
        )

    # ----------------------------------------------------------------------------- against steady cuts

    def chosen_s(self, phase: int, *, settled: bool) -> float:
        """What ours' cuts take in a phase: each of its requests counts as the typical one at its cut.

        The same cut in the same phase is the same work, whoever chose it, so that of many requests tells more
        than one alone.
        """
        requests = self.requests(phase, OURS, settled=settled)
        return statistics.fmean(
            each["seconds"] if each["why"] else self.typical_s(phase, each["cut"]) for each in requests
        )

    def better_end_s(self, phase: int) -> float:
        """What the better one of local and full takes in a phase."""
        return min(self.typical_s(phase, cut) for cut in (0, self.stages))

    def over_ends(self, phase: int, how: str) -> float:
        """How much longer ours takes than the better one of local and full.

        Args:
            phase: In which.
            how: One of `OVER_ENDS_BY`.
        """
        if how == "measured":
            own = [each["seconds"] for each in self.requests(phase, OURS, settled=True)]
            ours_s = statistics.median(own)
        else:
            ours_s = self.chosen_s(phase, settled=how == "settled")
        return ours_s / self.better_end_s(phase) - 1

    def worst_over_ends(self, how: str) -> tuple[float, int]:
        """The most of it, and in which phase."""
        return max((self.over_ends(phase, how), phase) for phase in range(len(self.phases)))

    @property
    def fixed_s(self) -> dict[int, float]:
        """By cut that was tried in every phase, the sum over phases of its typical seconds."""
        every = range(len(self.phases))
        cuts = {cut for _, cut in self._by_cut}
        return {
            cut: sum(self.typical_s(phase, cut) for phase in every)
            for cut in sorted(cuts)
            if all((phase, cut) in self._by_cut for phase in every)
        }

    @property
    def best_fixed(self) -> tuple[int, float]:
        """The cut that would have been the best one throughout, and its seconds."""
        seconds, cut = min((seconds, cut) for cut, seconds in self.fixed_s.items())
        return cut, seconds

    @property
    def over_fixed(self) -> float:
        """How much longer ours takes than that one; negative where it is shorter."""
        ours = sum(self.chosen_s(phase, settled=False) for phase in range(len(self.phases)))
        return ours / self.best_fixed[1] - 1

    @property
    def untried(self) -> Sequence[int]:
        """Cuts that somebody chose, but that not every phase has."""
        chosen = {each["cut"] for each in self.row["requests"] if each["way"] in CHOOSING}
        return sorted(chosen - self.fixed_s.keys())

    # -------------------------------------------------------------------------------------- over rates

    @property
    def rates(self) -> Sequence[float]:
        """Mbit/s, each once, the slowest first."""
        return sorted({phase.mbit for phase in self.phases})

    def at_rate(self, way: str, mbit: float) -> float:
        """The median seconds of a way's requests at a rate; of one that chooses, once it has settled."""
        phases = [number for number, phase in enumerate(self.phases) if phase.mbit == mbit]
        if way in STEADY:
            return statistics.median(s for number in phases for s in self.spread(number, way).values)
        return statistics.median(
            each["seconds"] for number in phases for each in self.requests(number, way, settled=True)
        )

    def speedups(self, way: str, over: str) -> Sequence[float]:
        """How many times quicker a way is than another one, rate by rate."""
        return [self.at_rate(over, mbit) / self.at_rate(way, mbit) for mbit in self.rates]

    # ------------------------------------------------------------------------------------ what it costs

    @property
    def cutting(self) -> tuple[float, int] | None:
        """The largest share of `REUSED` requests that cutting takes, and at which cut; None if none was new.

        What the first request at a cut took beyond those right after it, and as many decisions.
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
        """Answers that were not the local model's, bit for bit."""
        return sum(not each["equal"] for each in self.row["requests"])

    @property
    def fallen_back(self) -> int:
        """Requests that the device had to finish although a server was to."""
        return sum(bool(each["why"]) for each in self.row["requests"])

    # ------------------------------------------------------------------------------------------- goals

    @property
    def asked(self) -> frozenset[str]:
        """Goals that say something of this setting, whether it has been run or not."""
        if self.setting.part != "load":
            return frozenset(GOALS) - {"mean", "best"}
        return frozenset(GOALS) - (set() if self.setting.network in BEST_GAIN else {"best"})

    @property
    def goals(self) -> dict[str, bool]:
        """Each of these that something was measured for, and whether it is met."""
        found = {
            **{how: self.worst_over_ends(how)[0] <= OVER_ENDS for how in OVER_ENDS_BY},
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
    "throughout": f"{_ENDS}, by the cuts that ours chose in all of its requests, those before it knew of a "
    f"change too, {_AT_CUTS}",
    "fixed": f"over all phases at most {OVER_FIXED:.0%} longer than the best of the fixed cuts that were "
    f"tried in every phase, by the cuts that ours chose in all of its requests, {_AT_CUTS}",
    "cutting": f"what the first request at a cut takes beyond the next {LATER}, and {REUSED} decisions, are "
    f"at most {CUTTING:.0%} of {REUSED} requests, at every cut that nobody had used before",
    "equal": "every answer is the local model's, bit for bit",
}
"""What each verdict is about, in full."""

OVER_ENDS_BY = ("settled", "measured", "throughout")
"""Goals that hold ours against local and full."""
