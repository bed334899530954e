"""Name stored programs by digest: a graph under ``programs/<digest>/``, its weights under ``weights/``."""

from __future__ import annotations

import hashlib
import re

import msgspec

from upriver.errors import ProgramError

DIGEST = re.compile(r"[0-9a-f]{64}")
"""Result of `digest_of`."""


def digest_of(data: bytes | memoryview) -> str:
    """Return the SHA-256 in hexadecimal: the name of a program, a weights file or a dataset."""
    return hashlib.sha256(data).hexdigest()


def is_digest(text: str) -> bool:
    """Return whether a text has the form of a digest of a program or of weights."""
    return DIGEST.fullmatch(text) is not None


def check_digest(digest: str) -> str:
    """Return a digest of 64 hexadecimal characters, so that a name can never become a path.

    Raises:
        ProgramError: If it is anything else.
    """
    if not is_digest(digest):
        raise ProgramError(f"a digest is 64 hexadecimal characters, got {digest[:80]!r}")
    return digest


def graph_path(prefix: str, digest: str) -> str:
    """Return the path of a program's graph."""
    return f"{prefix}/programs/{check_digest(digest)}/graph.json"


def weights_path(prefix: str, weights_digest: str) -> str:
    """Return the path of a weights file."""
    return f"{prefix}/weights/{check_digest(weights_digest)}.safetensors"


class _Names(msgspec.Struct):
    weights_digest: str


def weights_digest_of(graph_bytes: bytes | memoryview) -> str:
    """Return the digest of the weights file that a graph names.

    Raises:
        ProgramError: If the bytes are not a graph.
    """
    try:
        return check_digest(msgspec.json.decode(graph_bytes, type=_Names).weights_digest)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProgramError(f"graph.json: {error}") from None
