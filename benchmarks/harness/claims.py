"""List what upriver claims: the goal, the statistic that judges it, and where its report says the result."""

from __future__ import annotations

import re

from benchmarks.harness.reports import (
    NUMBER,
    Claim,
    Count,
    Headline,
    ReportError,
    column,
    figures,
    goals_met,
    holds,
    met,
    ratios,
    span,
)

APART = ("cli", "cluster", "demo", "report")
FINETUNE = (*APART, "dataloader", "inference")
SERVER = (*FINETUNE, "finetune")
"""Rooms of the package that take no part in fine-tuning, and in what a server does."""

PLANNING = (*SERVER, "engine", "protocol", "rpc", "server", "store")
COLD = (*APART, "dataloader", "finetune", "inference", "policies", "profile", "protocol", "rpc", "server")


def front_ms(text: str) -> list[str]:
    """Return what this tree's server takes, one and eight requests at a time."""
    both = zip(column(text, "server"), column(text, "front, ms"), strict=True)
    return [cell for server, cell in both if server == "now"]


def missed_for(words: str) -> Count:
    """Return a function that finds the items which miss a goal, behind some words; ``none`` without them."""

    def count(text: str) -> str:
        found = re.search(rf"{words} (?:missed for (.*?)(?:;|\. |$)|met for )", " ".join(text.split()))
        if found is None:
            raise ReportError(f"no verdict behind {words!r}")
        return found[1] or "none"

    return count


def first_of_all(text: str) -> str:
    """Return whether every model's answer came first and was right, on a report of an accelerator."""
    pairs = re.findall(r"(\d+) of (\d+)(?:\.| answers)", text)
    return "met" if pairs and all(some == every for some, every in pairs) else "missed"


CLAIMS = (
    Claim(
        name="speedup",
        goal="0.85 of the bound and 0.95 of the plain way's speed in every setting; measuring at most 3 % of "
        "ten epochs of the smallest job",
        judged_by="median of an epoch's repeats, the least of all settings",
        says=rf"\*\*(?P<held>\w+)[^*]*: `upriver` reaches (?P<bound>{NUMBER}) of the bound at the median and "
        rf"(?P<least_bound>{NUMBER}) at least [^*]*? is (?P<times>{NUMBER}) times as fast as the plain way "
        rf"at "
        rf"the median, (?P<least>{NUMBER}) at least[^*]*\*\* \*\*(?P<held_measuring>\w+): in the smallest "
        rf"job "
        rf"[^*]* (?P<measuring>{NUMBER})% of 10 epochs",
        counts={
            "most": figures("upriver", "Times as fast", of=max, digits=1),
            "settings": lambda text: str(len(column(text, "upriver", "Times as fast"))),
        },
        result="{held}: {times} times as fast as the plain way at the median of {settings} settings ({least} "
        "to {most}), {bound} of the bound ({least_bound} at least). {held_measuring}: measuring {measuring} "
        "%",
        without=FINETUNE,
    ),
    Claim(
        name="first_batch",
        goal="the first batch within 5 s cold and 2 s warm on two cores; 1 to 5 epochs of 300 samples in at "
        "most 1.05 times an ordinary loop's time",
        judged_by="largest median of three networks; largest ratio of medians",
        says=rf"\*\*(?P<held>\w+)[^*]*: the first batch of \d+ networks comes (?P<cold>{NUMBER}) s after the "
        rf"call at most with cold caches \(goal 5\) and (?P<warm>{NUMBER}) s [^*]*? after "
        rf"(?P<before_cold>{NUMBER}) and (?P<before_warm>{NUMBER}) s; [^*]*\*\* "
        rf"\*\*(?P<held_short>\w+)[^*]*: jobs of [^*]*? take (?P<least>{NUMBER}) to "
        rf"(?P<most>{NUMBER}) times as long",
        result="{held}: the first batch after {cold} s cold and {warm} s warm ({before_cold} and "
        "{before_warm} s if prepared before it). {held_short}: short jobs take {least} to {most} times as "
        "long",
        without=FINETUNE,
    ),
    Claim(
        name="kept_features",
        goal="not behind the best of three other ways from three epochs on; five epochs at 20 Mbit/s at "
        "least 1.2 times as fast as features kept by hand, and 3 times as fast as 0.1.0",
        judged_by="95 % interval of 5 pairs below 1.03; medians",
        counts={"met": goals_met, "ratios": span('keep="auto" / best other')},
        result="{met} goals met: {ratios} times the best other way's time",
        without=FINETUNE,
    ),
    Claim(
        name="device_mix",
        goal="at most 1.05 times the better of the plain way and a full push, whichever side is slow; ahead "
        "of both where 5 % are predicted",
        judged_by="ratio of medians of 3 repeats, each setting",
        says=rf"\*\*(?P<held>\w+)[^*]*?: an epoch by `upriver`'s plan takes (?P<least>{NUMBER}) to "
        rf"(?P<most>{NUMBER}) times the better [^*]*?\. (?P<held_ahead>\w+): it is ahead of both in "
        r"(?P<ahead>\d+) of (?P<paying>\d+) settings",
        counts={"settings": lambda text: str(len(column(text, "`upriver`", "Seconds of an epoch")))},
        result="{held}: {least} to {most} times the better of both in {settings} settings. {held_ahead}: "
        "ahead of both in {ahead} of {paying} where that is predicted",
        without=FINETUNE,
    ),
    Claim(
        name="plan_quality",
        goal="within 5 % of the best measured single cut in 95 % of settings, and ahead of it on the mean",
        judged_by="median of 5 repeats over that of the best cut",
        says=rf"\*\*(?P<held>\w+)[^*]*: `upriver` is within 5% of the best measured single cut in "
        rf"(?P<share>{NUMBER})% of (?P<settings>\d+) settings, and takes (?P<mean>{NUMBER}) times its "
        rf"seconds",
        counts={"most": figures("upriver", "## Every setting", of=max)},
        result="{held}: within 5 % in {share} % of {settings} settings, {mean} of its time on the mean, "
        "{most} at most",
        without=FINETUNE,
    ),
    Claim(
        name="plain",
        goal="no slower than a `DataLoader` loop at its best",
        judged_by="ratios of neighbours in time; slower if all 5 agree",
        says=r"\*\*(?P<held>No row speaks against it|It does not hold here[^*]*)\.?\*\*",
        counts={
            "least": figures("ratio", of=min),
            "most": figures("ratio", of=max),
            "settings": lambda text: str(len(column(text, "ratio"))),
        },
        result="{held}: {least} to {most} times as fast in {settings} settings",
        without=FINETUNE,
    ),
    Claim(
        name="split_overhead",
        goal="an iteration cut takes at most 3 % longer than whole",
        judged_by="median over networks of the median of paired ratios",
        says=rf"cut / whole: \*\*(?P<median>{NUMBER})\*\*; the goal of 1\.03 is (?P<held>\w+)",
        counts={"step": figures("step - by hand, ms", of=max)},
        result="{held}: {median} times at the median; a step at batch 1 takes up to {step} ms more than the "
        "tail's modules",
        without=FINETUNE,
    ),
    Claim(
        name="faster_prefix",
        goal="none; tells the speed-up and the error of each faster prefix, network by network",
        judged_by="median of ratios of neighbours in time, 11 turns",
        says=r"\*\*(?P<measured>\d+) of (?P<networks>\d+) networks measured(?P<told>[^*]*)\.\*\*",
        result="{measured} of {networks} networks measured{told}",
        without=FINETUNE,
    ),
    Claim(
        name="proof_steps",
        goal="every split trains what its model trains whole",
        judged_by="equal bits, each row",
        says=r"(?P<rows>\d+) rows, (?P<wrong>\d+) of them wrong",
        result="{wrong} of {rows} rows wrong",
        without=FINETUNE,
    ),
    Claim(
        name="link_change",
        goal="a fresh plan within 10 iterations of a change from 200 to 20 Mbit/s; none for jitter",
        judged_by="predicted epoch within 3 % of a fresh plan's, one run",
        says=r"by what the job knows, (?P<live>[^()]*) \(.*? by what a new job measures, "
        r"(?P<new>[^()]*) \(.*? With jitter of a fifth: (?P<calm>.*?)\. ",
        counts={
            "held": holds(
                r"by what the job knows, [^()]* \(met",
                r"by what a new job measures, [^()]* \(met",
                "Losses are equal bit for bit",
                "With jitter of a fifth: 0 switches [^.]*?, 0 switches ",
            ),
        },
        result="{held}: {live} by what the job knows, {new} by what a new job measures; {calm}",
        without=FINETUNE,
    ),
    Claim(
        name="kills",
        goal="no sample and no bit lost, more than half of the samples through servers",
        judged_by="the least of three runs",
        says=rf"(?P<held>Met|Missed)\S* (?P<kills>\d+) kills: .*? at least (?P<share>{NUMBER})% of the "
        rf"samples",
        counts={"faults": lambda text: "; ".join(sorted(set(column(text, "faults"))))},
        result="{held}: {kills} kills, faults: {faults}; at least {share} % through servers",
        without=FINETUNE,
    ),
    Claim(
        name="server",
        goal="memory, fairness, concurrency, tenants, adaptation, reuse, overload, stalled readers",
        judged_by="3 or 5 repeats, by each claim's own statistic",
        says=rf"the peak is (?P<peak>{NUMBER}) of the budget \(goal 1\.1\), the throughput "
        rf"(?P<throughput>{NUMBER}) .*? at equal weights \((?P<equal>{NUMBER}) times;.*? at weight 4 "
        rf"\((?P<four>{NUMBER}) times; .*? clients that wait: (?P<wait>{NUMBER}) .*? normal again after "
        rf"(?P<again>{NUMBER}) s",
        counts={"met": goals_met},
        result="{met} claims met: {peak} of the memory budget, {equal} times the 99th percentile with a "
        "greedy tenant, {wait} of the peak rate under four times the load",
        without=SERVER,
    ),
    Claim(
        name="strangers",
        report="small_requests",
        goal="none; tells what a small request costs the front",
        judged_by="median of 8 turns",
        says="",
        counts={
            "one": lambda text: front_ms(text)[0],
            "eight": lambda text: front_ms(text)[1],
        },
        result="{one} ms of processor time one at a time, {eight} ms eight at a time",
        without=SERVER,
    ),
    Claim(
        name="wire",
        goal="0.4 of a raw socket's rate, checksums on",
        judged_by="median of ratios within a repeat",
        says=rf"by the median: \*\*(?P<held>\w+)\*\* \((?P<frames>{NUMBER})\)",
        counts={"server": lambda text: column(text, "of the raw socket, median (lowest to highest)")[2]},
        result="{held}: {frames} through front and client; a whole server {server}",
        without=SERVER,
    ),
    Claim(
        name="input_pipeline",
        goal="shortest epochs or within 3 % of the shortest, and six more",
        judged_by="shortest of 5 epochs",
        says=r"shortest epochs.*?met in (?P<shortest>\d+ of \d+) settings.*? Ray Data: \*\*\w+\*\*, met in "
        r"(?P<systems>\d+ of \d+) settings.*?By medians upriver is within 3% of the best other in "
        r"(?P<medians>\d+ of \d+) settings",
        counts={"met": goals_met, **ratios("upriver", "PyTorch", "## Seconds of an epoch")},
        result="{met} goals met: shortest epochs in {shortest} settings ({medians} by medians), ahead of "
        "tf.data service and Ray Data in {systems}",
        without=(*APART, "coldstart", "finetune", "inference"),
    ),
    Claim(
        name="load_aware",
        goal="less time than Neurosurgeon as in LoADPart's Table, never 3 % above local or full offload, and "
        "six "
        "more",
        judged_by="mean of all requests, phases alike; medians for a phase",
        says=r"bit for bit: \*\*met\*\*, met in (?P<right>\d+ of \d+)",
        counts={
            "met": goals_met,
            "least": figures("ours saves of neurosurgeon", of=min, digits=0),
            "most": figures("ours saves of neurosurgeon", of=max, digits=0),
            "networks": lambda text: str(len(column(text, "ours saves of neurosurgeon"))),
        },
        result="{met} goals met: {least} to {most} % less than Neurosurgeon with {networks} networks",
        without=(*APART, "dataloader", "finetune"),
    ),
    Claim(
        name="latency_models",
        goal="errors no larger than LoADPart's by kind; whole networks within 15 %",
        judged_by="MAPE of held-out operators of 50 us and more",
        counts={
            "missed": missed_for("kind by kind:"),
            "networks": missed_for("off the shortest of its lower quartiles:"),
        },
        result="missed for {missed} by kind, and for {networks} as a whole; met for the others",
        without=(*FINETUNE, "finetune", "rpc", "server", "store"),
    ),
    Claim(
        name="memory_model",
        goal="an estimate never under the measured peak, at most 15 % over at the median",
        judged_by="median of high over measured",
        says=rf"high / measured: forward (?P<forward>{NUMBER}), training (?P<training>{NUMBER}); the goal",
        counts={"held": holds(r"the goal of at most 1\.15 is met", r"Under the measured peak: \*\*0 of ")},
        result="{held}: forward {forward}, training {training}",
        without=PLANNING,
    ),
    Claim(
        name="published_runs",
        goal="rank HAPI's 184 published runs from two of each pair",
        judged_by="rank correlation, each pair",
        says="",
        counts={
            "met": lambda text: met("", "| goal | result")(text),
            "mean": lambda text: column(text, "result")[1].split(";")[0],
        },
        result="{met} goals met: mean rank correlation {mean} for bytes alone",
        without=PLANNING,
    ),
    Claim(
        name="plan_time",
        goal="a chain of 1,000 stages planned in less than 5 ms",
        judged_by="median of 51 plans, each policy",
        says="",
        counts={"met": met("< 5 ms"), "most": figures("ms a plan", of=max)},
        result="{met} policies met, {most} ms at most",
        without=PLANNING,
    ),
    Claim(
        name="decision_time",
        goal="a request's cut decided in less than 100 us",
        judged_by="median of 2,001 decisions, each policy",
        says="",
        counts={"met": met("< 100 us"), "most": figures("us, median (lowest to highest)", of=max, digits=1)},
        result="{met} met, {most} us at most",
        without=PLANNING,
    ),
    Claim(
        name="admission_time",
        goal="1,000 requests admitted in less than 1 ms",
        judged_by="median of 51 rounds, each kind of queue",
        says="",
        counts={"met": met("< 1 ms"), "most": figures("ms a round", of=max)},
        result="{met} kinds met, {most} ms at most",
        without=PLANNING,
    ),
    Claim(
        name="cold_start",
        goal="first to answer, or within 3 % of the first, of nine ways; 0.85 of the bound; and ten more",
        judged_by="median over turns of paired ratios",
        says=r"from process start: first to answer.*?met in (?P<start>\d+ of \d+) settings.*?from the end of "
        r"imports: the same: \*\*\w+\*\*, met in (?P<imports>\d+ of \d+) settings.*?of the bound at 1 "
        r"Gbit/s: "
        r"\*\*\w+\*\*, met in (?P<bound>\d+ of \d+) settings",
        counts={"met": goals_met},
        result="{met} goals met: first or within 3 % in {start} settings from process start, {imports} from "
        "the "
        "end of imports; the bound in {bound}",
        without=COLD,
    ),
    Claim(
        name="cold_calls",
        goal="a call of an arrived model within 1 % of a plain one's instructions",
        judged_by="median of 3 calls, each model",
        says=r"\*\*(?P<held>\w+)\*\*: within 1% for (?P<models>\d+ of \d+) models; the same bits",
        result="{held}: {models} models",
        without=COLD,
    ),
    Claim(
        name="cold_connections",
        goal="the fifth load sooner than the first; within 10 % of one that is told",
        judged_by="median of 3 rounds, each model",
        says=r"sooner than the first: (?P<sooner>\d+ of \d+)\. Within 10% of one that is told: (?P<near>\d+ "
        r"of \d+)",
        result="sooner for {sooner} models, within 10 % for {near}",
        without=COLD,
    ),
    Claim(
        name="cold_accelerator",
        goal="first to answer on an accelerator, or within 3 % of the first",
        judged_by="one turn, each model",
        says=r"First, or within 3 % of who is: (?P<fresh>\d+ of \d+)\..*?First, or within 3 % of who is: "
        r"(?P<warm>\d+ of \d+)\.",
        counts={"held": first_of_all},
        result="{held}: {fresh} models in a fresh process, {warm} where it computed before",
        without=COLD,
    ),
)

HEADLINES = (
    Headline(
        claim="speedup",
        title="Fine-tuning near the data",
        compared_with="PyTorch's `DataLoader` on the same store, with the workers and prefetch factor best "
        "for it",
        result="an epoch {times} times as fast at the median of {settings} settings ({least} to {most}); "
        "{bound} of the bound that storage, link and compute set",
        measured_on="a storage host and a training host, a CPU core each; the plain way computes on one of "
        "them",
    ),
    Headline(
        claim="plan_quality",
        title="The plan",
        compared_with="every single cut, each run",
        result="{mean} of the best cut's time on the mean of {settings} settings, {most} at most",
        measured_on="the same two hosts",
    ),
    Headline(
        claim="cold_start",
        title="Cold start from a store",
        compared_with="eight other ways: boto3, runai-model-streamer, tensorizer, s3torchconnector, PISeL's "
        "groups, …",
        result="first or within 3 % of the fastest in {start} settings from process start, in {imports} from "
        "the "
        "end of imports; {met} goals met",
        measured_on="a CPU core for the process, another one for Swift; links of 0.1 and 1 Gbit/s and no "
        "limit",
    ),
    Headline(
        claim="input_pipeline",
        title="Input pipeline on another host",
        compared_with="PyTorch's `DataLoader` at its best; tf.data service, Ray Data",
        result="{median} of the `DataLoader`'s epoch at the median ({least} to {most}); shorter epochs than "
        "both "
        "others in {systems} settings; {met} goals met",
        measured_on="a trainer and a worker, a CPU core each; a wait stands for the accelerator",
    ),
    Headline(
        claim="load_aware",
        title="Split inference with a busy server",
        compared_with="Neurosurgeon, which does not know the load",
        result="{least} to {most} % less time on the mean, with {networks} networks; answers bit for bit the "
        "device's own; {met} goals met",
        measured_on="a server and a device, a CPU core each; the device is slowed 20 times, 8 Mbit/s",
    ),
    Headline(
        claim="server",
        title="Many tenants on one server",
        compared_with="the same requests one after another, or alone",
        result="at four times its memory: {peak} of the budget, {throughput} of the throughput; with a "
        "greedy tenant {equal} times the latency, {four} at weight 4",
        measured_on="a CPU core for the server, another one for its clients",
    ),
)
"""The rows of README's table."""
