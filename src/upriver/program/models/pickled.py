"""Recognize checkpoints that can run code, and explain the refusal. Nothing here reads one."""

from __future__ import annotations

ENDINGS = (".bin", ".pt", ".pth", ".ckpt")

BEGINNINGS = (b"PK\x03\x04", *(bytes((0x80, protocol)) for protocol in range(2, 6)))
"""First bytes of PyTorch's archives, and of a pickle of each protocol that declares itself."""


def has_pickled_name(path: str) -> bool:
    """Return whether a path is named like a pickled checkpoint, or like its index."""
    return path.removesuffix(".index.json").lower().endswith(ENDINGS)


def refusal(path: str) -> str:
    """Return why the checkpoint is not read, and what to do."""
    return (
        f"{path} is a pickled checkpoint: reading it can run code, so it is never read. Convert it where it "
        "comes from, with safetensors.torch.save_model(model, FILE) or, of transformers, "
        "model.save_pretrained(DIRECTORY, safe_serialization=True)"
    )
