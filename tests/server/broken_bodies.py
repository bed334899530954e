"""Make broken run requests for the fuzzers: valid ones, and mutations of them.

A seed and a number determine every body, so that each can be made again.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import xxhash

from upriver.protocol import VERSION, DatasetRef, FrameKind, RunRequest, encode
from upriver.protocol.frames import PREFIX
from upriver.types import MicroBatch

CASES = int(os.environ.get("UPRIVER_FUZZ", "0"))
"""Cases of each fuzzer over HTTP, where more than a test run's few are wanted."""

SEED = int(os.environ.get("UPRIVER_FUZZ_SEED", "0"))
"""Seed of the cases."""

INTEGERS = (0, 1, -1, 2, 3, 63, 64, 65, 255, 1023, 1024, 1025, 65536, 1 << 20, 1 << 30, 1 << 31, 1 << 32)
INTEGERS += (
    1 << 40,
    1 << 48,
    (1 << 48) + 1,
    (1 << 63) - 1,
    1 << 63,
    1 << 64,
    1 << 70,
    -(1 << 40),
    -(1 << 63),
)
TEXTS = (
    "",
    "x",
    "..",
    "../../etc/passwd",
    "/etc/passwd",
    "file:///etc/passwd",
    "http://127.0.0.1:9/",
    "s3://b/k",
)
TEXTS += (
    "0" * 64,
    "f" * 64,
    "0" * 63,
    "\x00",
    "\n",
    "é" * 40,
    "x" * 70_000,
    "default\n",
    "float32",
    "object",
    "bool",
)
RAW = (
    b"1e999",
    b"-0",
    b"1" * 5000,
    b"NaN",
    b"Infinity",
    b'"\\ud800"',
    b'"\xff\xfe"',
    b"[" * 100_000,
    b'{"a":' * 20_000,
)
RAW += (b"", b"null", b"{", b"[]", b"[[]]", b"\x00", b'"' + b"x" * 100_000 + b'"', b"1" + b"0" * 400, b"0.5")


@dataclass(frozen=True, kw_only=True)
class Case:
    """Body that a server is sent.

    Attributes:
        name: Seed and number, which reproduce the body.
        kind: Mutation of a valid body.
    """

    name: str
    kind: str
    body: bytes


@dataclass(frozen=True)
class Frame:
    """One frame of a body, taken apart."""

    kind: int
    header: bytes
    payload: bytes
    prefix: bytes = b""

    def wire(self) -> bytes:
        """Return the frame's bytes; the prefix is true unless another was given."""
        said = PREFIX.pack(b"UPRV", VERSION, self.kind, 0, len(self.header), len(self.payload))
        return (self.prefix or said) + self.header + self.payload


def frames_of(body: bytes) -> list[Frame]:
    """Return a valid body's frames."""
    found, at = [], 0
    while at < len(body):
        _, _, kind, _, header_nbytes, payload_nbytes = PREFIX.unpack_from(body, at)
        start = at + PREFIX.size
        middle, at = start + header_nbytes, start + header_nbytes + payload_nbytes
        found.append(Frame(kind, body[start:middle], body[middle:at]))
    return found


def wire(frames: Sequence[Frame]) -> bytes:
    """Return a body of these frames."""
    return b"".join(frame.wire() for frame in frames)


def valid_bodies(*requests: RunRequest) -> list[bytes]:
    """Return some requests as they are sent, among them tensors of all sorts that are sent along."""
    torch.manual_seed(0)
    base = torch.arange(96.0).reshape(4, 4, 6)
    sent = [
        (base, torch.tensor([True, False, True, True])),
        (base.transpose(1, 2), base[:, ::2, 1:], torch.zeros(1).expand(4, 3)),
        (torch.zeros(4, 0), torch.arange(8, dtype=torch.int64).reshape(4, 2)),
        (torch.ones(4, 2, dtype=torch.complex64), torch.rand(4, 3).half(), torch.rand(4, 5).bfloat16()),
    ]
    bodies = [wire_of(request) for request in requests]
    for tensors in sent:
        batches = [
            MicroBatch(ids=(7, 1), position=0, tensors=tensors),
            MicroBatch(ids=(2,), position=0, tensors=tensors),
        ]
        ids = tuple(batch.ids for batch in batches)
        request = RunRequest(micro_batches=ids, start=0, stop=0, micro_batch=4)
        bodies.append(wire_of(request, *batches))
    return bodies


def made_up_request() -> RunRequest:
    """Return a request that names a dataset and a program that no server has."""
    return RunRequest(
        micro_batches=((0, 1, 2), (3,)),
        start=-5,
        stop=2,
        micro_batch=4,
        dataset=DatasetRef(store="default", digest="0" * 64),
        program="1" * 64,
    )


def wire_of(*messages: RunRequest | MicroBatch) -> bytes:
    """Return messages as they are sent."""
    return b"".join(bytes(part) for message in messages for part in encode(message))


# ------------------------------------------------------------------------------------------- mutations


def flipped(rng: random.Random, body: bytes) -> bytes:
    """Flip some bits, mostly near the start, where the lengths and headers stand."""
    broken = bytearray(body)
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        most = len(broken) if rng.random() < 0.5 else min(len(broken), 400)
        broken[rng.randrange(most)] ^= 1 << rng.randrange(8)
    return bytes(broken)


def truncated(rng: random.Random, body: bytes) -> bytes:
    return body[: rng.randrange(len(body))]


def extended(rng: random.Random, body: bytes) -> bytes:
    return body + rng.choice(
        (rng.randbytes(rng.randrange(1, 200)), body, body[: rng.randrange(1, 60)], bytes(99))
    )


def spliced(rng: random.Random, body: bytes, other: bytes) -> bytes:
    """Join the head of one body and the tail of another, cut anywhere."""
    return body[: rng.randrange(len(body) + 1)] + other[rng.randrange(len(other)) :]


def rearranged(rng: random.Random, body: bytes) -> bytes:
    """Repeat, drop or reorder frames."""
    frames = frames_of(body)
    match rng.randrange(3):
        case 0:
            frames.insert(rng.randrange(len(frames) + 1), rng.choice(frames))
        case 1:
            frames.pop(rng.randrange(len(frames)))
        case _:
            rng.shuffle(frames)
    return wire(frames)


def lied(rng: random.Random, body: bytes) -> bytes:
    """Make a prefix that contradicts its frame."""
    frames = frames_of(body)
    at = rng.randrange(len(frames))
    frame = frames[at]
    said: list[Any] = [b"UPRV", VERSION, frame.kind, 0, len(frame.header), len(frame.payload)]
    field = rng.choice((0, 1, 2, 3, 4, 4, 5, 5))
    widths = {1: 16, 2: 8, 3: 8, 4: 32, 5: 64}
    near = said[field] + rng.choice((-1, 1, 7)) if field >= 4 else 0
    said[field] = rng.randbytes(4) if field == 0 else rng.choice((*INTEGERS, near)) % (1 << widths[field])
    frames[at] = replace(frame, prefix=PREFIX.pack(*said))
    return wire(frames)


def edited(rng: random.Random, body: bytes) -> bytes:
    """Change a value of a header, add an unknown field or drop one; correct the lengths."""
    frames = frames_of(body)
    at = rng.randrange(len(frames))
    header = json.loads(frames[at].header)
    for _ in range(rng.choice((1, 1, 2, 4))):
        edit(rng, header)
    frames[at] = replace(frames[at], header=json.dumps(header).encode())
    return wire(frames)


def edit(rng: random.Random, header: Any) -> None:
    """Change one place of a JSON value, anywhere in it."""
    place, key = rng.choice(places(header) or [(header, "x")])
    match rng.randrange(6):
        case 0 if isinstance(place, dict):
            del place[key]
        case 0 | 1 if isinstance(place, list):
            place.insert(key, rng.choice(place))
        case 1:
            place[rng.choice(("x", "protocol", "uri", "prefix", "path"))] = rng.choice((None, 1, "s3://b/k"))
        case 2:
            place[key] = rng.choice(([], {}, None, True, [[]] * 3, [0] * 1025, {"a": {"a": {}}}))
        case 3:
            place[key] = rng.choice(TEXTS)
        case _:
            place[key] = rng.choice((*INTEGERS, 0.5, -1.5, 1e300))


def places(value: Any) -> list[tuple[Any, Any]]:
    """Return every container in a JSON value with each of its keys."""
    keys = (
        list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    )
    return [(value, key) for key in keys] + [place for key in keys for place in places(value[key])]


def raw_text(rng: random.Random, body: bytes) -> bytes:
    """Make a header that is not JSON, or not JSON of the expected form."""
    frames = frames_of(body)
    at = rng.randrange(len(frames))
    text = frames[at].header
    cut = [index for index in range(len(text)) if text[index : index + 1] in b":,["]
    start = rng.choice(cut) + 1
    stop = next((index for index in range(start, len(text)) if text[index : index + 1] in b",]}"), len(text))
    other = rng.choice(RAW)
    whole = rng.random() < 0.2
    frames[at] = replace(frames[at], header=other if whole else text[:start] + other + text[stop:])
    return wire(frames)


def repaid(rng: random.Random, body: bytes) -> bytes:
    """Change, add or remove bytes of a payload, and correct the checksum."""
    frames = frames_of(body)
    data = [index for index, frame in enumerate(frames) if frame.kind == FrameKind.DATA and frame.payload]
    if not data:
        return edited(rng, body)
    at = rng.choice(data)
    payload = bytearray(frames[at].payload)
    for _ in range(rng.choice((1, 4, 32))):
        payload[rng.randrange(len(payload))] = rng.choice((0, 1, 2, 127, 128, 255))
    payload = payload[: rng.choice((len(payload), len(payload), len(payload) - 1))] + bytes(
        rng.choice((0, 0, 1))
    )
    header = json.loads(frames[at].header)
    header["checksum"] = xxhash.xxh3_64(bytes(payload)).hexdigest()
    if rng.random() < 0.5:
        edit(rng, header)
    frames[at] = replace(frames[at], header=json.dumps(header).encode(), payload=bytes(payload))
    return wire(frames)


CHANGES: dict[str, Callable[[random.Random, bytes], bytes]] = {
    "bits flipped": flipped,
    "cut off": truncated,
    "more behind": extended,
    "frames rearranged": rearranged,
    "a lying prefix": lied,
    "header edited": edited,
    "no such JSON": raw_text,
    "payload changed": repaid,
}
KINDS = (*CHANGES, "two spliced", "random bytes", "as it was")


def make(number: int, bodies: Sequence[bytes], *, seed: int = SEED) -> Case:
    """Return the body of this number."""
    rng = random.Random(f"{seed}/{number}")
    kind = rng.choices(KINDS, weights=[*[4] * len(CHANGES), 4, 1, 1])[0]
    body = rng.choice(bodies)
    if kind in CHANGES:
        body = CHANGES[kind](rng, body)
    elif kind == "two spliced":
        body = spliced(rng, body, rng.choice(bodies))
    elif kind == "random bytes":
        body = rng.choice((b"", b"UPRV")) + rng.randbytes(rng.randrange(300))
    return Case(name=f"seed {seed}, case {number} ({kind})", kind=kind, body=body)


def pieces(number: int, body: bytes) -> list[bytes]:
    """Cut a body into pieces of any size, as a network does."""
    rng = random.Random(number)
    found, at = [], 0
    while at < len(body):
        size = rng.choice((1, 3, 19, 20, 21, 500, 70_000, len(body)))
        found.append(body[at : at + size])
        at += size
    return found


def note(line: str) -> None:
    """Print an outcome for readers of the output and for ``scripts/fuzz``."""
    print(line)
    if path := os.environ.get("UPRIVER_FUZZ_REPORT"):
        with Path(path).open("a", encoding="utf-8") as report:
            report.write(f"{line}\n")
