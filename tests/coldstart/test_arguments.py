"""Check that an invalid argument of a cold start raises a one-line error before any lookup."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from upriver import coldstart
from upriver.errors import ConfigError
from upriver.store import Store

PROGRAM = f"memory://nowhere/.upriver/programs/{'0' * 64}"

BOTH = {
    "device": [*(() if torch.cuda.is_available() else ("cuda",)), "x", None],
    "limits": [3, {"a": 1}, [], {}],
    "grouping": [[], "none"],
    "store_options": [3, {"region": 3}, "secret"],
    "store": [3, "memory://nowhere"],
}
WRONG = {
    "load": BOTH | {"build_model": [None, 3, nn.Linear(2, 2)], "uri": [None, 3, ["a"]], "strict": ["x", 1]},
    "open": BOTH | {"uri": [3, ["a"]], "caps": [3], "stop": ["x"]},
    "publish_model": {
        "model": [3],
        "store": [3, "memory://nowhere"],
        "path": [3],
        "args": [torch.ones(1, 2)],
        "kwargs": [3],
    },
}
RIGHT: dict[str, Callable[[], dict[str, Any]]] = {
    "load": lambda: {"build_model": lambda: nn.Linear(2, 2), "uri": "memory://nowhere/net"},
    "open": lambda: {"uri": PROGRAM},
    "publish_model": lambda: {
        "model": nn.Linear(2, 2),
        "store": Store.open("memory://nowhere"),
        "path": "net.safetensors",
        "args": (torch.ones(1, 2),),
    },
}


@pytest.mark.parametrize(
    ("function", "name", "value"),
    [
        pytest.param(function, name, value, id=f"{function} {name} {str(value)[:20]}")
        for function, wrong in WRONG.items()
        for name, values in wrong.items()
        for value in values
    ],
)
def test_what_is_no_argument_is_named(function: str, name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name.rstrip("s")) as caught:
        getattr(coldstart, function)(**{**RIGHT[function](), name: value})
    assert len(str(caught.value).splitlines()) == 1 and "secret" not in str(caught.value)


@pytest.mark.parametrize("ask", [coldstart.loading, coldstart.arriving])
def test_only_what_can_load_has_a_load(ask: Callable[[Any], object]) -> None:
    with pytest.raises(ConfigError, match="must be a"):
        ask(3)


def test_a_time_to_wait_is_a_number() -> None:
    model = nn.Linear(2, 2)
    store = Store.open("memory://given")
    coldstart.publish_model(model, store, "net.safetensors", (torch.ones(1, 2),))
    _, handle = coldstart.begin(lambda: nn.Linear(2, 2), "net", store=store)
    assert handle.wait(60) and handle.wait(float("inf")) and handle.wait(-1.0)
    for wrong in ("x", float("nan"), True):
        with pytest.raises(ConfigError, match="timeout_s must be"):
            handle.wait(wrong)  # type: ignore[arg-type]
