"""Whether a device is there: asked once, before a server says that it is one."""

from __future__ import annotations

import torch

from upriver.errors import ConfigError


def check_device(name: str) -> None:
    """Look whether PyTorch can compute there.

    Raises:
        ConfigError: If not; the message names the devices that are there.
    """
    seen = devices()
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(
            f"device {name!r} is none that torch knows; it sees here: {', '.join(seen)}"
        ) from None
    wanted = device.type if device.index is None or device.type == "cpu" else f"{device.type}:{device.index}"
    if wanted not in seen:
        raise ConfigError(f"device {name!r} is not available here; torch sees: {', '.join(seen)}")


def devices() -> list[str]:
    """The processor, and each accelerator by its type and by its number."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return ["cpu"]
    numbered = [f"{accelerator.type}:{index}" for index in range(torch.accelerator.device_count())]
    return ["cpu", accelerator.type, *numbered]
