"""Hold the text of `cold_start`'s report, which `report` fills in."""

TEMPLATE = """# Cold start: from a fresh process to its first answer

{verdicts}
{left}
Figures are medians (lowest to highest) of seconds. Settings are called MODEL-bBATCH-LINK-CORES.

## From process start to the first right answer

The model constructed by upriver (parameters allocated, not filled), whoever loads it:

{started}

Constructed as ever, weights filled by its constructor:

{started_plain}

Among them are about as many seconds of imports for everybody, which no loader can do anything about.

## From the end of imports

Constructed by upriver:

{imported}

Constructed as ever:

{imported_plain}
{untimed}
## Who is ahead

{behind}

upriver over the best other: the median, over turns in which both answered rightly, of one time over the
other in the same turn, less one. Of many that are as good one is the best by chance: so each turn's best
other is whoever has the lowest median of all *other* turns. Whoever fails or is wrong in more than
{most_failed:.0%} of its turns is not compared. Of {turns} turns of upriver's, {apart} were run in another
start of the benchmark than the best other's, which stay when upriver's code has changed. The name is that of
whoever has the lowest median of all turns; it ends in ` plain` where its model was constructed as ever. In
the first columns upriver is held against everybody, those too that use its construction; in the last ones
nobody does. Within {near_best:.0%} counts as even. In brackets, from six turns on: where that median lies
with a certainty of {sure:.0%}, by the ranks of the turns alone.

## Imports evened out

{evened}

From process start, had imports taken what is usual. They are the same code for everybody but for what a way
imports beside PyTorch and the model's library, and yet they took so much longer or shorter from one process
to the next, by what else the machine did, that {near_best:.0%} of all cannot be seen. So the imports of a
turn, whose processes run soon after one another, are taken to be as long for all, and longer for a way by
what is usual for it in all turns of a library's models (Tukey's median polish). All that follows is as it
was measured. Seconds that are usual:

{imports}

## Imports, and CPU time

{efforts}

Seconds from process start to the end of imports / CPU seconds of the process until its answer, constructed
by upriver. What the store takes is on another core, but with "2core".

## Against the bound

![Seconds after imports, and the bound]({name}.png)

{bounds}

The last columns are the bound over the time from the end of imports, constructed by upriver: 1 were as
fast as can be. Both are of one turn, and the median of turns is told. The bound, of one core:
F + max(d + L + E, D + l + e); of two: F + max(d + L + e, d + l1 + E, D + l + e).

- F, first byte: a read of one byte through a connection that is not open yet.
- D, download: of the bytes that the answer needs. On a shaped link they are divided by its payload rate
  (95.6 % of the rate on the wire), or by what it was measured to carry, if that is more. On one without
  a shape it is the download of the whole object into this process's memory by ranged reads, as
  many at once as sequential does best with, less F, in proportion.
- L, load: CRC32C and one copy into fresh memory of bytes that are in this process already.
- E, execute: the first call of a model whose weights are all there, in a fresh process.
- What cannot overlap: d is the first weight's share of D; l1 and l are the first one's and the last one's
  of L, by bytes; e is E from the operator on that first reads the last weight.

All are measured in the first {parts_repeats} turns, on the same cores, and are told by their medians. Cores
differ from one start of the benchmark to another, so a median of all turns is not to be held against them.
Receiving takes time of the one core, which is in D on the unshaped link and nowhere on shaped ones;
constructing is in neither. So no loader reaches 1, but by chance.

## Memory

Peaks above a process that imports the same and makes no model, in multiples of the weights (of less than
{judged:.0f} MB in MiB), at one sample without a shape: of the process (VmHWM, above the median VmRSS of
{baselines} that have imported) / of its control group (peak above peak). The highest of all turns
counts.

{memory}

The process's peak holds the activations of the call and what PyTorch's kernels reserve, too: "a call" is
what the first call of a model takes in whose weights are all there, VmHWM less what there was before. The
control group's peak also counts pages of files that were written or read: {groups}.

## Afterwards

{afters}

Forward passes in turns, in {after_repeats} processes: of the model that arrived while it was called, of
one whose weights were copied, and, to see the noise, of another such one. The median ratio of each process.
Where two plain ones differ by more than {most_after:.0%}, nothing is judged.

## Everybody at their best

{sweeps}

Found with {swept} at one sample, for models of 10 MB and less with {swept_small}: the shortest of
{sweep_runs} runs each, in turns, or of one where that was more than {sweep_near:.0%} over the shortest;
"cannot" where it fails or answers wrongly. Of values within {sweep_even:.0%} of the shortest the lowest is
taken, with its own best way to take tensors. The link of 0.1 Gbit/s takes the values of that of 1 Gbit/s,
and two cores take those of one.
"Taken as it came": by `load_state_dict(assign=True)`, which spares a copy. Where that changes low bits
of a model's answer, as memory that is not aligned can, weights are copied.

## How it was measured

{models}

- Weights are made up, from seed {seed}, and differ from what constructors give, so that no model answers
  rightly without them. Each model is published once: in upriver's form, as `safetensors.torch.save_model`
  writes it, as `torch.save` does, and as tensorizer does.
- A fresh process each time. It imports PyTorch, the model's library and what its way needs, and makes its
  input; from there "after imports" counts. Libraries and stored objects are in the page cache. Its
  parent's clock runs from the call that starts it until it says that it has an answer, the process's own
  beside it.
- The first answer is compared by `torch.equal` with that of the whole model, computed with as many threads.
- OpenStack Swift with its S3 door has core 0 and a network namespace, the process core 1 and another one;
  with "2core" it has both. Links are shaped both ways by `tc tbf`, and measured before use. Swift gives
  some 550 MB/s here, so the unshaped link stands for 10 Gbit/s, too: such a link would never be full.
- Objects are stored in parts of {parts_gib:g} GiB. Swift takes an MD5 of what is read from the beginning of a
  part on, and two of a part that is read whole: where parts were as large as everybody's reads, 16 MiB, who
  read in step with them got 250 MB/s, and who did not got twice as much.
- Ways take turns, in an order that is drawn for each turn; the first turn of all settings comes first. All
  processes run a copy of the code that was made at the start. A run is a record; those count that are of the
  newest code among all of the same run and setting. Where upriver's code has changed, all run the turn anew.
- With and without our construction runs everybody on the unshaped link at one sample (layer by layer and
  PISeL's groups with some models), and with some models at 1 Gbit/s, too.
- Sequential: construct, download upriver's file by ranged reads into memory, `load_state_dict`, run; no
  checksums. Layer by layer and PISeL's groups: upriver with another grouping, so they construct while they
  ask for the manifest, check sums and wait for single weights as it does. Each remembers a link's bandwidth
  for the next process of its own; the first of each start, which has nothing to go by, is not counted.
- boto3: `download_file` to a file on disk, in parts of 16 MiB; then `safetensors.torch.load_file`, or
  `torch.load` with `mmap` and `weights_only`. runai-model-streamer: tensors copied into the model as they
  come. tensorizer takes `s3://` over TLS alone, so it is given a signed URL of the same object.
  s3torchconnector: `torch.load` from its reader.
- Failed or wrong runs:{told}
- Left out, as not installed: {out}.{hint}
- Load of the machine before turns: {loads}.
- upriver: {code}; {machine}.
  {versions}. Peers' environment, with the same PyTorch: {packages}.

## What it does not show

GPUs; real networks, whose latency is not some 0.1 ms; disks that are slow; several processes that start at
once; models in half precision. Both hosts share the memory and the caches of one machine.

Run it again: `python -m benchmarks.cold_start` as root; it goes on from the records, and runs anew what is of
other code than there is.
"""
