"""Checkpoints that can run code: how they are known, and what is said of them. Nothing here reads one."""

from __future__ import annotations

ENDINGS = (".bin", ".pt", ".pth", ".ckpt")

BEGINNINGS = (b"PK\x03\x04", *(bytes((0x80, protocol)) for protocol in range(2, 6)))
"""Of the archives that PyTorch writes, and of a pickle of each protocol that says which it is."""


def has_pickled_name(path: str) -> bool:
    """Whether that is what such files, or their indices, are called."""
    return path.removesuffix(".index.json").lower().endswith(ENDINGS)


def refusal(path: str) -> str:
    """Why it is not read, and what to do."""
    return (
        f"{path} is a pickled checkpoint: reading it can run code, so it is never read. Convert it where it "
        "comes from, with safetensors.torch.save_model(model, FILE) or, of transformers, "
        "model.save_pretrained(DIRECTORY, safe_serialization=True)"
    )
