"""Limit what a receiver accepts: checked before anything is allocated."""

from __future__ import annotations

import msgspec

VERSION = 1
"""Version of the protocol. Another version is refused, never guessed at."""

MAX_INTEGER = 2**48
"""Largest size, stride, offset or position in a header: beyond any memory, far from 64-bit overflow."""


MAX_MICRO_BATCH = 65536
"""Largest micro-batch that a request may name: beyond it, 64 kB a sample are 4 GiB."""


class Caps(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Upper limits of one frame and of one request.

    The defaults leave room for the largest cut of the tested networks (vgg19 after its first stage: 12.8 MB a
    sample, 205 MB for a micro-batch of 16) and little more.

    Attributes:
        header_bytes: Bytes of the JSON header of one frame.
        payload_bytes: Bytes of the payload of one frame; also those that a tensor may stand for (a stride of
            0 repeats bytes).
        tensors: Tensors in one frame; before the model there is one for each sample.
        dims: Dimensions of one tensor.
        micro_batches: Micro-batches of one request.
        samples: Samples of one request.
        body_bytes: Bytes of the body of one run request: the server holds it until its last byte has arrived.
        program_bytes: Bytes of graph and weights of one uploaded program.
        pixels: Width times height of a stored image, and of its resized form. The default is the input
            stages' own limit (`upriver.pipeline.formats.image.MAX_PIXELS`), so servers accept every image
            that local training accepts.
    """

    header_bytes: int = 1 << 20
    payload_bytes: int = 1 << 30
    tensors: int = 1024
    dims: int = 16
    micro_batches: int = 1024
    samples: int = 16384
    body_bytes: int = 512 << 20
    program_bytes: int = 4 << 30
    pixels: int = 64 << 20


DEFAULT_CAPS = Caps()
