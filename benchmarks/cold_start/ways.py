"""Load a model in a process of `cold_start`: our ways, PISeL's, and others'.

Each way is a class. Its constructor imports its needs, and a call returns the model. Others' ways run in an
environment that has their packages. Only our ways import upriver.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from benchmarks.cold_start.settings import PLAIN, way_of

if TYPE_CHECKING:
    import torch
    from torch import nn

PART_BYTES = 16 << 20
"""Bytes of a ranged read for all ways: upriver's own default."""

STORED_PART_BYTES = 1 << 30
"""Part size of stored objects. Swift computes an MD5 of a read that begins at a part, and two of a part that
is read whole. That costs more than the rest of the read: a client that reads in step with small parts is half
as fast as others."""

PRESIGNED_S = 600


class Loader(Protocol):
    """A way, ready to load."""

    def __call__(self) -> nn.Module:
        """Return the model in evaluation mode, callable. Its weights may still be arriving."""

    def finish(self) -> None:
        """Wait until everything has arrived."""


class _Loads:
    """The common part of all ways.

    Args:
        task: ``run`` (the way), ``knob``, ``assign``, ``folder`` of the model in the store, ``bucket``,
            ``options`` of the store, ``scratch`` (an empty folder on disk), ``device`` (the device of the
            model; by default the processor).
        build: The model's constructor.
    """

    def __init__(self, task: Mapping[str, Any], build: Callable[[], nn.Module]) -> None:
        self._task, self._build = task, build
        self._constructs = not task["run"].endswith(PLAIN)
        self._knob: int = task["knob"]
        self._device: str = task.get("device", "cpu")
        self._options: Mapping[str, str] = task["options"]
        self._prepare()
        if self._constructs:
            self._construct = _our_construction()

    def _prepare(self) -> None:
        """Import the remaining modules."""

    def _built(self) -> nn.Module:
        return (self._construct(self._build) if self._constructs else self._build()).eval()

    def _key(self, form: str) -> str:
        return f"{self._task['folder']}/{form}"

    def _put(self, network: nn.Module, state: Mapping[str, torch.Tensor]) -> nn.Module:
        """Copy or assign weights to a model, and move the model to its device.

        Raises:
            ValueError: If some weights are not the model's.
        """
        assign = bool(self._task["assign"])
        _, unexpected = network.load_state_dict(state, strict=False, assign=assign)  # ties are stored once
        if unexpected:
            raise ValueError(f"weights that the model does not have: {', '.join(unexpected[:5])}")
        if assign and hasattr(network, "tie_weights"):
            cast(Any, network).tie_weights()
        return self._moved(network.eval())

    def _moved(self, network: nn.Module) -> nn.Module:
        return network if self._device == "cpu" else network.to(self._device)

    def finish(self) -> None:
        """Wait until everything has arrived."""


def _our_construction() -> Callable[[Callable[[], nn.Module]], nn.Module]:
    """Return our construction, without the other imports of our cold start, which others do not need."""
    if "upriver.coldstart" not in sys.modules:
        import upriver

        alone = types.ModuleType("upriver.coldstart")
        alone.__path__ = [str(Path(upriver.__file__).parent / "coldstart")]
        sys.modules["upriver.coldstart"] = alone
    from upriver.coldstart.model.construction import construct

    return construct


class Streamed(_Loads):
    """upriver's own way, with one of its groupings."""

    grouping = "upriver"

    def _prepare(self) -> None:
        from upriver.coldstart import load_model

        self._module: Any
        self._module = load_model
        if not self._constructs:
            self._module.construct = lambda build: build()

    def __call__(self) -> nn.Module:
        """Return the model. Its weights arrive while it is called."""
        self._network = self._module.load(
            self._build,
            f"s3://{self._task['bucket']}/{self._key('upriver.safetensors')}",
            store_options=self._options,
            device=self._device,
            grouping=self.grouping,
            limits=self._module.StreamLimits(concurrency=self._knob),
        )
        return self._network.eval()

    def finish(self) -> None:
        """Wait until everything has arrived and the load has released its resources."""
        if (loading := self._module.loading(self._network)) is not None:
            loading.wait()


class Pisel(Streamed):
    """upriver's way with PISeL's groups (CIKM 2024, Algorithm 1)."""

    grouping = "pisel"


class Layers(Streamed):
    """upriver's way with a group for each layer."""

    grouping = "layer_by_layer"


class Sequential(_Loads):
    """Run one stage after the other: construct, download everything, load, and only then run."""

    def _prepare(self) -> None:
        from upriver.coldstart.format import checkpoint
        from upriver.store import Store

        self._store_class, self._find = Store, checkpoint.find

    def __call__(self) -> nn.Module:
        """Return the model with all its weights."""
        from upriver.program.graph.schema import DTYPES

        network = self._built()
        path = self._key("upriver.safetensors")
        store = self._store_class.open(f"s3://{self._task['bucket']}", options=self._options)
        found = self._find(store, path)
        data = downloaded(store, path, max(placed.stop for placed in found.tensors), self._knob)
        state = {
            placed.name: data[placed.start : placed.stop].view(DTYPES[placed.dtype]).reshape(placed.shape)
            for placed in found.tensors
        }
        return self._put(network, state | {tie: state[name] for tie, name in found.ties.items()})


def downloaded(store: Any, path: str, nbytes: int, at_once: int) -> torch.Tensor:
    """Download the beginning of an object by concurrent ranged reads into memory with the same alignment."""
    import torch

    data = torch.empty(nbytes, dtype=torch.uint8)
    view = memoryview(data.numpy().data)

    def fetch(start: int) -> None:
        store.read_into(path, start, view[start : start + PART_BYTES])

    with ThreadPoolExecutor(at_once) as pool:
        for _ in pool.map(fetch, range(0, nbytes, PART_BYTES)):
            pass
    return data


# ------------------------------------------------------------------------------------------------ others


class _Boto3(_Loads):
    """Amazon's own client for Python."""

    def _prepare(self) -> None:
        import boto3
        from boto3.s3.transfer import TransferConfig
        from botocore.config import Config

        self._client = boto3.client(
            "s3",
            endpoint_url=self._options["endpoint"],
            region_name=self._options["region"],
            aws_access_key_id=self._options.get("access_key_id", "none"),
            aws_secret_access_key=self._options.get("secret_access_key", "none"),
            config=Config(
                s3={"addressing_style": "path"},
                max_pool_connections=max(10, self._knob),
                response_checksum_validation="when_required",
            ),
        )
        self._transfer = TransferConfig(
            multipart_threshold=PART_BYTES,
            multipart_chunksize=PART_BYTES,
            max_concurrency=self._knob,
            use_threads=self._knob > 1,
        )

    def _file(self, form: str) -> Path:
        path = Path(self._task["scratch"]) / form
        self._client.download_file(self._task["bucket"], self._key(form), str(path), Config=self._transfer)
        return path


class Boto3Safetensors(_Boto3):
    """Download to a file, which safetensors maps into memory."""

    def _prepare(self) -> None:
        super()._prepare()
        from safetensors.torch import load_file

        self._load = load_file

    def __call__(self) -> nn.Module:
        """Return the model with all its weights."""
        network = self._built()
        return self._put(network, self._load(self._file("plain.safetensors"), device=self._device))


class Boto3Torch(_Boto3):
    """Download to a file, which torch.load maps into memory."""

    def __call__(self) -> nn.Module:
        """Return the model with all its weights."""
        import torch

        network = self._built()
        return self._put(network, torch.load(self._file("model.pt"), weights_only=True, mmap=True))


class Runai(_Loads):
    """runai-model-streamer, which reads a safetensors file by many threads into a buffer."""

    def _prepare(self) -> None:
        os.environ["RUNAI_STREAMER_CONCURRENCY"] = str(self._knob)
        os.environ["RUNAI_STREAMER_CHUNK_BYTESIZE"] = str(PART_BYTES)
        from runai_model_streamer import SafetensorsStreamer

        self._streamer = SafetensorsStreamer

    def __call__(self) -> nn.Module:
        """Return the model with all its weights."""
        import torch

        network = self._moved(self._built())
        targets = network.state_dict()
        with torch.no_grad(), self._streamer() as streamer:
            path = f"s3://{self._task['bucket']}/{self._key('plain.safetensors')}"
            streamer.stream_file(path, device=self._device)
            for name, tensor in streamer.get_tensors():
                targets[name].copy_(tensor)  # the next tensor may overwrite it
        return network


class Tensorizer(_Boto3):
    """tensorizer, in its own format. It supports only TLS for ``s3://``, so it receives a signed URL."""

    def _prepare(self) -> None:
        super()._prepare()
        from tensorizer import TensorDeserializer
        from tensorizer.stream_io import open_stream

        self._deserializer, self._open = TensorDeserializer, open_stream

    def __call__(self) -> nn.Module:
        """Return the model with all its weights."""
        network = self._built()
        where = {"Bucket": self._task["bucket"], "Key": self._key("model.tensors")}
        url = self._client.generate_presigned_url("get_object", Params=where, ExpiresIn=PRESIGNED_S)
        with (
            self._open(url) as stream,
            self._deserializer(stream, device=self._device, num_readers=self._knob) as found,
        ):
            found.load_into_module(network)
        return self._moved(network.eval())


class S3TorchConnector(_Loads):
    """Amazon's reader, which torch.load reads from."""

    def _prepare(self) -> None:
        from s3torchconnector import S3Checkpoint, S3ClientConfig

        config = S3ClientConfig(
            throughput_target_gbps=float(self._knob), part_size=PART_BYTES, force_path_style=True
        )
        self._checkpoint = S3Checkpoint(
            self._options["region"], endpoint=self._options["endpoint"], s3client_config=config
        )

    def __call__(self) -> nn.Module:
        """Return the model with all its weights."""
        import torch

        network = self._built()
        uri = f"s3://{self._task['bucket']}/{self._key('model.pt')}"
        with self._checkpoint.reader(uri) as reader:
            return self._put(network, torch.load(reader, weights_only=True))


LOADERS: Mapping[str, Callable[[Mapping[str, Any], Callable[[], nn.Module]], Loader]] = {
    "upriver": Streamed,
    "pisel": Pisel,
    "layers": Layers,
    "sequential": Sequential,
    "boto3-safetensors": Boto3Safetensors,
    "boto3-torch": Boto3Torch,
    "runai": Runai,
    "tensorizer": Tensorizer,
    "s3torchconnector": S3TorchConnector,
}


def loader_of(task: Mapping[str, Any], build: Callable[[], nn.Module]) -> Loader:
    """Return the way that a task names, with everything imported."""
    return LOADERS[way_of(task["run"])](task, build)


def pieces(path: Path) -> Iterator[bytes]:
    """Yield a file in parts, for a store."""
    with path.open("rb") as file:
        while piece := file.read(PART_BYTES):
            yield piece


def serialized(network: nn.Module, path: Path) -> None:
    """Write a model in tensorizer's format."""
    from tensorizer import TensorSerializer

    serializer = TensorSerializer(str(path))
    serializer.write_module(network)
    serializer.close()


def removed(path: Path) -> None:
    """Remove a file if it exists."""
    with suppress(FileNotFoundError):
        path.unlink()
