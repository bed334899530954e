"""Share helpers for tests of split inference: networks, a misbehaving server, links with a set speed."""

from __future__ import annotations

import http.client
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import nn

from tests.rpc.scripted_http import Exchange, scripted
from tests.server.running import wait_for
from upriver.control.partition import PartitionRule
from upriver.inference.costs import HandlingTimes
from upriver.inference.offload import Offload
from upriver.inference.remote_server import OffloadTuning, RemoteServer
from upriver.link import LinkEstimator
from upriver.rpc.tolerance import FLOAT32, Agreement

RARELY = OffloadTuning(probe_s=3600.0, load_s=3600.0)
SELDOM: dict[str, Any] = {"tuning": RARELY, "deadline_s": 120.0}
"""Options that leave estimates to requests and the test itself, with long deadlines."""


class Chain(nn.Module):
    """A chain of layers, each with a smaller output than the layer before."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            OrderedDict(
                first=nn.Linear(64, 48),
                relu=nn.ReLU(),
                second=nn.Linear(48, 24),
                tanh=nn.Tanh(),
                third=nn.Linear(24, 12),
                sigmoid=nn.Sigmoid(),
                last=nn.Linear(12, 3),
            )
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.layers(x)
        return answer


class Two(nn.Module):
    """Take two inputs, one optional and by name; return an answer of several parts, one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 6), nn.Linear(5, 6)
        self.norm, self.head = nn.BatchNorm1d(6), nn.Linear(6, 4)

    def forward(
        self, x: torch.Tensor, other: torch.Tensor | None = None, scale: float = 1.0
    ) -> dict[str, Any]:
        hidden = torch.relu(self.left(x))
        if other is not None:
            hidden = hidden + self.right(other)
        hidden = self.norm(hidden)
        scores = self.head(hidden) * scale
        return {"scores": scores, "parts": (hidden, [scores.argmax(1), scores]), "count": 2, "none": None}


class Words(nn.Module):
    """Take whole numbers, of which some are out of range."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(10, 8), nn.Linear(8, 2)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.head(torch.tanh(self.embedding(words)).mean(1))
        return answer


def chain(seed: int = 0) -> Chain:
    torch.manual_seed(seed)
    return Chain()


def here(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Return the answer of the model itself, in eval."""
    training = model.training
    model.eval()
    with torch.no_grad():
        answer = model(*args, **kwargs)
    model.train(training)
    return answer


def bitwise() -> Agreement:
    return Agreement("bitwise", FLOAT32)


def far_of(answer: Offload, number: int = 0) -> RemoteServer:
    return answer._fars[number]


def cut_at(answer: Offload, cut: int) -> None:
    """Cut all further requests at ``cut``."""
    answer._rule = PartitionRule(cut=cut)


def let_in(answer: Offload) -> None:
    """Wait until a server passes its check; a large network may miss the deadline at first."""
    far, captured = far_of(answer), answer._forms.first.captured
    wait_for(lambda: far.costs(captured) is not None)


def tell_link(answer: Offload, bytes_per_s: float, rtt_s: float = 0.001, number: int = 0) -> None:
    """Set the estimated speed of the link to a server."""
    far = far_of(answer, number)
    far.link = LinkEstimator.of_requests()
    far.link.add_transfer(1, rtt_s)
    far.link.add_transfer(max(1e6, bytes_per_s), rtt_s + max(1e6, bytes_per_s) / bytes_per_s)
    far._costs = {digest: replace(costs, handling=HandlingTimes()) for digest, costs in far._costs.items()}
    far._client.meter.observed_bandwidth = lambda: None  # no estimate for the downlink


def tell_load(answer: Offload, k: float, wait_s: float = 0.0, number: int = 0) -> None:
    """Set the load of a server, as if no request had been sent to it."""
    far = far_of(answer, number)
    far._load, far._wait_s, far._machine = k, wait_s, 0.0
    far._own, far._misses, far._asked_at = None, Counter(), {}
    far._provisional = set()  # whatever else uses this machine


class Proxy:
    """A server in front of a real one that can treat run requests differently."""

    def __init__(self, url: str) -> None:
        self.url = ""
        self.requests = 0
        self.instead: Callable[[Exchange], None] | None = None
        self._address = urlsplit(url).netloc

    def __call__(self, exchange: Exchange) -> None:
        if exchange.path == "/v1/run":
            self.requests += 1
            if self.instead is not None:
                return self.instead(exchange)
        return self.forward(exchange)

    def forward(self, exchange: Exchange) -> None:
        connection = http.client.HTTPConnection(self._address, timeout=60)
        try:
            connection.request(exchange.method, exchange.path, body=exchange.body or None)
            response = connection.getresponse()
            exchange.plain(response.status, response.read())
        finally:
            connection.close()


@contextmanager
def proxy(url: str) -> Iterator[Proxy]:
    """Run a proxy in front of the server at ``url``."""
    found = Proxy(url)
    with scripted(found) as found.url:
        yield found
