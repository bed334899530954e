"""Group the rarer arguments of `DataLoader`, check them, and accept those of earlier versions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypedDict

import torch
from torch import nn

from upriver._deprecation import both_given, warn_replaced
from upriver.dataloader.offload_stretch import Offloading
from upriver.errors import ConfigError
from upriver.policies import OFFLOAD_POLICIES
from upriver.rpc import validation
from upriver.rpc.tls import FilePath
from upriver.rpc.worker_fleet import Provider
from upriver.text import printable


class TorchOptions(TypedDict, total=False):
    """Further keywords of ``torch.utils.data.DataLoader``, which checks them."""

    timeout: float
    worker_init_fn: Callable[[int], None] | None
    multiprocessing_context: Any
    generator: torch.Generator | None
    prefetch_factor: int | None
    persistent_workers: bool
    pin_memory_device: str
    in_order: bool


@dataclass(frozen=True, slots=True)
class RemoteWorkers:
    """Machines that run ``upriver worker``, and how they and the loader authenticate each other.

    Args:
        urls: Addresses of the machines.
        token: Token sent with every request.
        ca: For https: certificate authorities that vouch for workers; those of the system if None.
        certificate: For https: certificate shown to workers that ask for one.
        key: Private key of the certificate.

    Raises:
        ConfigError: If an address or the token is not valid.
    """

    urls: Sequence[str]
    token: str | None = field(default=None, repr=False)
    ca: FilePath | None = None
    certificate: FilePath | None = None
    key: FilePath | None = None

    def __post_init__(self) -> None:
        if isinstance(self.urls, str | bytes) or not isinstance(self.urls, Sequence):
            raise ConfigError(
                f"urls must be a list of addresses (http://HOST:PORT), got {printable(repr(self.urls), 60)}"
            )
        object.__setattr__(self, "urls", validation.addresses(self.urls))
        validation.token(self.token)


@dataclass(frozen=True, slots=True)
class AutoOffload:
    """Rule by which ``offload="auto"`` decides.

    Args:
        policy: ``upriver`` chooses the ratio with the highest throughput and adjusts it while the job runs;
            ``fastflow`` is FastFlow's Algorithm 1, which decides once.
        model: Model that is trained, or its name. Measurements are kept for later jobs that train the same
            model on the same machines. None keeps nothing.

    Raises:
        ConfigError: If the policy is unknown.
    """

    policy: str = "upriver"
    model: str | nn.Module | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.policy, str) or self.policy not in OFFLOAD_POLICIES:
            raise ConfigError(f"policy must be one of {', '.join(OFFLOAD_POLICIES)}, got {self.policy!r}")


Workers: TypeAlias = RemoteWorkers | Sequence[str] | int | Provider
Offload: TypeAlias = Literal["auto", "never", "always"] | AutoOffload | Offloading

_ACCESS = ("token", "ca", "certificate", "key")
_AUTO = ("policy", "model")


def take_old_keywords(
    options: dict[str, Any], workers: Workers, offload: Offload
) -> tuple[Workers, Offload, AutoOffload]:
    """Return workers, offloading, and how ``auto`` decides, with the keywords of earlier versions.

    Each of them is removed from ``options`` with a `DeprecationWarning`, at the line that calls the loader.
    Where nothing is measured or no address is given they have no effect, as before.

    Raises:
        TypeError: If an option and one of its old keywords are given.
        ConfigError: If their values are not valid.
    """
    access = {name: options.pop(name) for name in _ACCESS if name in options}
    auto = {name: options.pop(name) for name in _AUTO if name in options}
    for old, option, new in [
        *((name, "workers", RemoteWorkers) for name in access),
        *((name, "offload", AutoOffload) for name in auto),
    ]:
        if isinstance({"workers": workers, "offload": offload}[option], new):
            raise TypeError(both_given("DataLoader", option, old, old))
        first = "urls, " if new is RemoteWorkers else ""
        warn_replaced("DataLoader", old, f"{option}={new.__name__}({first}{old}=…)", stacklevel=3)
    if access and workers and isinstance(workers, Sequence) and not isinstance(workers, str):
        workers = RemoteWorkers(workers, **access)
    decides = offload if isinstance(offload, AutoOffload) else AutoOffload(**auto)
    return workers, "auto" if isinstance(offload, AutoOffload) else offload, decides
