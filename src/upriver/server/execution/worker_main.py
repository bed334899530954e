"""Run a compute worker: one process, one job at a time, no network, inputs only from the front."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import msgspec
import psutil
import torch

from upriver.coldstart.format.manifest import describe
from upriver.engine.clock import Clock
from upriver.engine.engine import Engine
from upriver.engine.fingerprint import fingerprint
from upriver.errors import ConfigError, Overloaded, ProtocolError, TooLarge, UpriverError
from upriver.pipeline import InputChain
from upriver.pipeline.formats import image
from upriver.program.capture.input_spec import made_up
from upriver.program.graph.caps import DEFAULT_CAPS, GraphCaps
from upriver.program.graph.executor import Program
from upriver.protocol import (
    PREFIX_NBYTES,
    Layout,
    aligned_empty,
    build_batch,
    data_head,
    error_body,
    error_from,
    lay_out,
    parse_data_header,
)
from upriver.protocol.tree import build
from upriver.server.execution.user_code import UserCode, take_apart
from upriver.server.ipc import messages
from upriver.server.ipc.channel import Channel, ChannelClosed
from upriver.server.ipc.shared_memory import Bytes, map_privately, map_shared
from upriver.server.scheduling.footprint import DECODING_BYTES, WEIGHED_BYTES
from upriver.server.scheduling.program_footprint import FootprintEstimator
from upriver.text import error_text
from upriver.types import MicroBatch

if TYPE_CHECKING:
    from upriver.profile.latency.predictor import Predictor

_T = TypeVar("_T", messages.UseSlot, messages.Room, messages.Here)

MAX_ENGINES = 32
"""Number of cached engines, each a chain joined with a program. An engine holds no memory of its own."""


def work(fd: int, *, network: bool, sandbox: str = "none") -> None:
    """Serve the front on the inherited socket ``fd`` until the front is gone."""
    channel = Channel(socket.socket(fileno=fd), messages.FromFront)
    try:
        setup, _ = channel.receive()
        if not isinstance(setup, messages.Setup):
            raise SystemExit(f"expected Setup first, got {type(setup).__name__}")
        try:
            hello = _prepare(setup, network=network, sandbox=sandbox)
        except Exception as error:  # sent to the front, which logs it in one line
            channel.send(messages.Failed(body=error_body(ConfigError(_one_line(error)))))
            return
        if setup.allow:
            channel.stay_apart()
        channel.send(hello)
        ComputeWorker(channel, setup).serve()
    except ChannelClosed:
        return


def _prepare(setup: messages.Setup, *, network: bool, sandbox: str) -> messages.Hello:
    torch.set_num_threads(setup.threads)
    torch.set_num_interop_threads(1)
    image.limit_pixels(setup.caps.pixels)
    _warm_up(setup.device)
    return messages.Hello(
        fingerprint=fingerprint(setup.device),
        network=network,
        sandbox=sandbox,
        resident_bytes=_resident_bytes(),
    )


def _resident_bytes() -> int:
    """Return the bytes of memory that belong to this process alone."""
    found = psutil.Process().memory_full_info()
    return int(getattr(found, "uss", found.rss))  # not every kernel reports shared memory


def _warm_up(device: str) -> None:
    """Compute on the device once.

    That torch sees a device does not mean that it is usable. A ready worker must also be warm.
    """
    image = torch.ones(1, 3, 32, 32, dtype=torch.float32, device=device)
    convolved = torch.nn.functional.conv2d(image, torch.ones(8, 3, 3, 3, dtype=torch.float32, device=device))
    torch.mm(convolved.reshape(8, -1), convolved.reshape(8, -1).T).sum().item()


def graph_caps(memory_bytes: int) -> GraphCaps:
    """Return the bounds on a program's declarations: no more than the memory for all requests."""
    return replace(
        DEFAULT_CAPS,
        tensor_bytes=min(DEFAULT_CAPS.tensor_bytes, memory_bytes),
        live_bytes=min(DEFAULT_CAPS.live_bytes, memory_bytes),
    )


def _as_ours(error: Exception) -> UpriverError:
    """Return the error to send to the front.

    An out-of-memory error becomes `Overloaded`, since another worker may have the memory.
    """
    cause: BaseException | None = error
    while cause is not None:
        if _is_out_of_memory(cause):
            return Overloaded("a worker ran out of memory on this; ask again, or elsewhere")
        cause = cause.__cause__
    return error if isinstance(error, UpriverError) else UpriverError(_one_line(error))


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, OSError):  # from mapping a file
        return error.errno == errno.ENOMEM
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in error_text(
        error
    )


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n", 1)[0][:500]


def _models_of(text: bytes, device: str) -> Predictor | None:
    """Return latency models; None unless they are valid ones of this device."""
    from upriver.profile.latency.predictor import place_of
    from upriver.profile.latency.serialization import predictor_from_json  # most workers need none of it

    try:
        found = predictor_from_json(text)
    except UpriverError:
        return None
    return found if found.place == place_of(device) else None


class ComputeWorker:
    """Keep the mapped slots and loaded programs between jobs, as the front directs."""

    def __init__(self, channel: Channel[messages.FromFront], setup: messages.Setup) -> None:
        self._channel = channel
        self._setup = setup
        self._caps = graph_caps(setup.memory_bytes)
        self._slots: dict[int, Bytes] = {}
        self._programs: dict[str, Program] = {}
        self._weighing: OrderedDict[str, FootprintEstimator] = OrderedDict()
        self._warm: set[tuple[str, int]] = set()
        self._engines: OrderedDict[tuple[str | None, bytes, int], Engine] = OrderedDict()
        self._models: Predictor | None = None
        self._code = UserCode(setup.allow)
        self._beside = self._small_left = 0
        self._waited_s = 0.0

    def serve(self) -> None:
        """Handle messages until the front is gone, which raises `ChannelClosed`."""
        while True:
            message, fds = self._channel.receive()
            try:
                self._handle(message, fds)
            except ChannelClosed:
                raise
            except UpriverError as error:
                self._channel.send(messages.Failed(body=error_body(_as_ours(error))))
            except Exception as error:  # from libraries, on unforeseen inputs: the worker lives on
                self._channel.send(messages.Failed(body=error_body(_as_ours(error))))
            finally:
                for fd in fds:
                    os.close(fd)

    def _handle(self, message: messages.FromFront, fds: Sequence[int]) -> None:
        match message:
            case messages.MapSlot() | messages.Forget() | messages.LatencyModels():
                self._keep_up(message, fds)
            case messages.LoadProgram():
                self._load(message, fds)
                self._channel.send(self._loaded(message.key))
            case messages.Run() | messages.RunCode():
                self._small_left = messages.SMALL_BYTES
                self._run(message) if isinstance(message, messages.Run) else self._run_code(message)
            case messages.Measure():
                self._channel.send(self._measure(message))
            case messages.Describe():
                self._channel.send(self._describe(message))
            case messages.Weigh():
                self._channel.send(self._weigh(message, fds))
            case messages.Setup() | messages.UseSlot() | messages.Room() | messages.Here():
                raise SystemExit(f"unexpected {type(message).__name__}")

    def _keep_up(
        self, message: messages.MapSlot | messages.Forget | messages.LatencyModels, fds: Sequence[int]
    ) -> None:
        """Handle a message that has no answer.

        Raises:
            SystemExit: If it fails: the front would take a `Failed` for the answer to the next job.
        """
        try:
            if isinstance(message, messages.MapSlot):
                self._slots[message.slot] = map_shared(fds[0], message.nbytes)
            elif isinstance(message, messages.LatencyModels):
                self._models = _models_of(message.text, self._setup.device)
            else:
                self._forget(message)
        except Exception as error:
            raise SystemExit(f"{type(message).__name__} failed: {_one_line(error)}") from None

    def _forget(self, message: messages.Forget) -> None:
        for slot in message.slots:
            self._slots.pop(slot, None)
        for key in message.programs:
            self._programs.pop(key, None)
            self._weighing.pop(key, None)
            self._warm -= {warm for warm in self._warm if warm[0] == key}
        for joined in [joined for joined in self._engines if joined[0] in message.programs]:
            del self._engines[joined]

    def _load(self, message: messages.LoadProgram, fds: Sequence[int]) -> None:
        graph = map_privately(fds[0], message.graph_nbytes)
        weights = map_privately(fds[1], message.weights_nbytes)
        self._programs[message.key] = Program.from_bytes(
            graph,
            weights,
            device=self._setup.device,
            digest=message.digest,
            caps=self._caps,
            before_stage=partial(self._before_stage, message.key) if message.coming else None,
        )

    def _loaded(self, key: str) -> messages.Loaded:
        """Return the prediction for a loaded program, if all its operators have models."""
        program, predicted_s = self._programs[key], list[float]()
        if self._models is not None:
            with suppress(UpriverError):
                predicted_s = self._models.stage_seconds(program.graph)
        return messages.Loaded(predicted_s=tuple(predicted_s), micro_batch=program.micro_batch)

    def _before_stage(self, key: str, position: int, keys: Collection[str]) -> None:
        """Wait until the front has the weights that a stage first reads; see `Program.before_stage`."""
        if not keys:
            return
        program = self._programs[key]
        numbers = (number for number, weight in enumerate(program.graph.weights) if weight.key in keys)
        began = time.perf_counter()
        self._channel.send(messages.NeedWeights(weights=tuple(numbers)))
        here = self._answer(messages.Here)
        self._waited_s += time.perf_counter() - began
        if here.error:
            raise error_from(here.error)
        if here.whole:
            program.before_stage = None

    def _weigh(self, message: messages.Weigh, fds: Sequence[int]) -> messages.Weighed:
        """Return the footprint of a stage range. Its tensors run without data, so it needs no weights."""
        scale = self._weighing.pop(message.key, None)
        if scale is None:
            graph = map_privately(fds[0], message.graph_nbytes)
            scale = FootprintEstimator(graph, torch.device(self._setup.device), self._caps)
        found = scale.weigh(message.start, message.stop)
        self._weighing[message.key] = scale
        while sum(each.nbytes for each in self._weighing.values()) > WEIGHED_BYTES:
            self._weighing.popitem(last=False)
        return found

    @torch.no_grad()
    def _run(self, run: messages.Run) -> None:
        clock = Clock()
        engine = self._engine(run)
        self._beside, self._waited_s = 0, 0.0
        with image.asking(self._make_room):
            batch = self._input(run, engine, clock)
        if run.stop > batch.position:
            batch = engine.advance(batch, run.stop, clock)
        if self._waited_s:  # by the same clock that measured the stages around the wait
            clock.add("forward", -self._waited_s)
            clock.add("weights", self._waited_s)
        with clock.phase("encode"):
            frames = tuple(self._write(part) for part in _parts(batch, run))
        timings = clock.timings()
        self._channel.send(
            messages.Done(frames=frames, phases=dict(timings.phases), stages=dict(timings.stages))
        )

    def _run_code(self, run: messages.RunCode) -> None:
        """Run the user's code, with gradients and generators as in a loader's process."""
        clock = Clock()
        with clock.phase("input"):
            raws = None
            if run.header:  # copied: the user's code may keep its inputs
                payload = aligned_empty(run.payload_nbytes)
                payload.copy_(torch.from_numpy(self._slots[run.slot][: run.payload_nbytes]))
                sent = self._sent(run, payload)
                raws = build(sent.tree, sent.tensors)
            made = self._code.make(run, raws)
        with clock.phase("encode"):
            frames = (self._write(take_apart(run, made, most_tensors=self._setup.caps.tensors)),)
        self._channel.send(messages.Done(frames=frames, phases=dict(clock.phases), stages={}))

    def _measure(self, measure: messages.Measure) -> messages.StageMeasurements:
        program = self._programs[measure.program]
        stop = program.num_stages if measure.stop is None else measure.stop
        if stop > program.num_stages:
            raise ProtocolError(f"stop must lie in 0..{program.num_stages}, got {stop}")
        inputs = self._made_up(program)
        warm = (measure.program, stop)
        if warm not in self._warm:  # lazy set-up and cold caches are not the stages' cost
            program.run(inputs, 0, stop)  # no stage after `stop`: memory is held only up to there
            self._warm.add(warm)
        clock = Clock()
        program.run(inputs, 0, stop, on_stage=clock.stage)
        stages = program.stages[:stop]
        return messages.StageMeasurements(
            micro_batch=program.micro_batch,
            names=tuple(stage.name for stage in stages),
            seconds=tuple(clock.stages[position] for position in range(1, stop + 1)),
            peak_bytes=tuple(stage.peak_bytes for stage in stages),
        )

    def _describe(self, message: messages.Describe) -> messages.Described:
        program = self._programs[message.program]
        manifest = describe(program.weight_tensors, program.weights_digest, caps=self._caps)
        return messages.Described(manifest=b"" if manifest is None else manifest.encode())

    def _made_up(self, program: Program) -> list[torch.Tensor]:
        """Return inputs of the right form, no larger than a job may bring; else raise `TooLarge`."""
        inputs = program.graph.inputs
        nbytes, most = sum(value.spec.nbytes for value in inputs), self._setup.caps.payload_bytes
        if nbytes > most:
            raise TooLarge(f"the inputs of a micro-batch have {nbytes} bytes, and at most {most} are taken")
        return made_up(inputs, self._setup.device)

    def _engine(self, run: messages.Run) -> Engine:
        key = (run.program, run.chain, run.micro_batch)
        if key not in self._engines:
            chain = InputChain.from_json(msgspec.json.decode(run.chain)) if run.chain else None
            program = self._programs[run.program] if run.program is not None else None
            self._engines[key] = Engine(chain=chain, program=program, micro_batch=run.micro_batch)
            if len(self._engines) > MAX_ENGINES:
                self._engines.popitem(last=False)
        self._engines.move_to_end(key)
        return self._engines[key]

    def _input(self, run: messages.Run, engine: Engine, clock: Clock) -> MicroBatch:
        memory = self._slots[run.slot]
        if run.header:
            sent = self._sent(run, torch.from_numpy(memory[: run.payload_nbytes]))
            return self._through_input(run, engine, sent, clock) if sent.position < 0 else sent
        return engine.begin(
            [memory[start : start + nbytes].data for start, nbytes in run.blobs],
            run.ids,
            object_names=run.object_names,
            stop=run.stop,
            seed=run.seed,
            epoch=run.epoch,
            on_bad_sample=run.on_bad_sample,
            clock=clock,
        )

    def _through_input(self, run: messages.Run, engine: Engine, sent: MicroBatch, clock: Clock) -> MicroBatch:
        """Run the input stages on samples that a client sent, which may hold any data.

        Raises:
            ProtocolError: If the samples are not valid at their position.
        """
        try:
            return engine.resume(
                sent,
                object_names=run.object_names,
                stop=min(run.stop, 0),
                seed=run.seed,
                epoch=run.epoch,
                on_bad_sample=run.on_bad_sample,
                clock=clock,
            )
        except (UpriverError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if _is_out_of_memory(error):
                raise
            raise ProtocolError(
                f"what was sent is no sample at position {sent.position}: {_one_line(error)}"
            ) from None

    def _sent(self, run: messages.Run | messages.RunCode, payload: torch.Tensor) -> MicroBatch:
        """Return the micro-batch that was sent along; its tensors are views of ``payload``."""
        header = parse_data_header(run.header, run.payload_nbytes, self._setup.caps)
        return build_batch(header, payload, checksum=header.checksum)  # the front has verified it already

    def _write(self, batch: MicroBatch) -> tuple[bytes, bytes | None]:
        """Lay a frame of the answer out; return its head, and its payload unless that is in a slot."""
        layout = lay_out(batch.tensors)
        if layout.nbytes > self._setup.caps.payload_bytes:
            raise TooLarge(
                f"an answer has at most {self._setup.caps.payload_bytes} bytes, this one {layout.nbytes}: "
                "ask for a smaller micro-batch or another cut"
            )
        if layout.nbytes <= self._small_left:
            self._small_left -= layout.nbytes
            payload = bytearray(layout.nbytes)
            return self._head(batch, layout, layout.write_into(memoryview(payload))), bytes(payload)
        self._channel.send(messages.NeedSlot(nbytes=layout.nbytes))
        slot = self._answer(messages.UseSlot).slot
        if slot == messages.NO_SLOT:
            raise Overloaded(f"no memory for an answer of {layout.nbytes} bytes now")
        return self._head(batch, layout, layout.write_into(self._slots[slot].data)), None

    def _make_room(self, nbytes: int) -> None:
        """Reserve memory before an image is decoded or changed; raise `Overloaded` if there is none now."""
        beside = nbytes - DECODING_BYTES
        if beside <= self._beside:
            return
        self._channel.send(messages.NeedRoom(nbytes=beside))
        if not self._answer(messages.Room).granted:
            raise Overloaded(f"no memory now for an image that takes {nbytes} bytes at once")
        self._beside = beside

    def _answer(self, kind: type[_T]) -> _T:
        """Return the front's answer to a question; handle other messages that arrive before."""
        while True:
            answer, fds = self._channel.receive()
            if isinstance(answer, kind):
                return answer
            try:
                self._handle(answer, fds)
            finally:
                for fd in fds:
                    os.close(fd)

    def _head(self, batch: MicroBatch, layout: Layout, checksum: str) -> bytes:
        head, most = data_head(batch, layout, checksum), self._setup.caps.header_bytes
        if len(head) - PREFIX_NBYTES > most:
            raise TooLarge(
                f"the header of an answer has at most {most} bytes, this one {len(head) - PREFIX_NBYTES}: "
                "ask for a smaller micro-batch"
            )
        return head


def _parts(batch: MicroBatch, run: messages.Run) -> Iterator[MicroBatch]:
    """Split a joined micro-batch into the micro-batches that it answers, as rows of all that crosses."""
    if run.rows == run.micro_batch:
        yield batch
        return
    for first in range(0, len(batch.ids), run.rows):
        ids = batch.ids[first : first + run.rows]
        yield replace(
            batch,
            ids=ids,
            tensors=tuple(tensor.narrow(0, first, run.rows) for tensor in batch.tensors),
            skipped=tuple(sample for sample in batch.skipped if sample in ids),
        )
