"""Check that capturing a model in one thread changes nothing for other threads."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from tests.examples import some
from upriver.program.capture.export import export
from upriver.program.capture.whole_model import capture_whole
from upriver.program.example_inputs import Example


class Watched(nn.Module):
    """Let another thread act at each recorded pass through the module."""

    def __init__(self, elsewhere: Callable[[], Any]) -> None:
        super().__init__()
        given: list[Any] = []
        self.given = lambda: given  # a capture restores lists such as the model's, but not code
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.LayerNorm(14), nn.Flatten(), nn.Linear(1568, 4))
        self.elsewhere = elsewhere

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if get_proxy_mode() is not None:
            thread = threading.Thread(target=lambda: self.given().append(self.elsewhere()))
            thread.start()
            thread.join()
        return self.layers(x)  # type: ignore[no-any-return]


def flags() -> tuple[bool, bool, bool]:
    return (
        torch.backends.mkldnn.enabled,
        torch._C._get_nnpack_enabled(),  # type: ignore[attr-defined]
        torch.backends.cudnn.enabled,
    )


def test_no_kernel_is_switched_off_for_other_threads() -> None:
    before = flags()
    model = Watched(flags)
    capture_whole(model, torch.randn(1, 3, 16, 16))
    assert len(model.given()) >= 1
    assert set(model.given()) == {before}
    assert flags() == before


def test_other_threads_get_the_bits_that_they_always_get() -> None:
    torch.manual_seed(0)
    other = nn.Sequential(*[nn.Conv2d(16, 16, 3, padding=1) for _ in range(4)]).eval().requires_grad_(False)
    x = torch.randn(1, 16, 64, 64)
    wanted = other(x)
    model = Watched(lambda: other(x))
    capture_whole(model, torch.randn(1, 3, 16, 16))
    assert model.given()
    assert all(torch.equal(given, wanted) for given in model.given())


def test_torch_itself_still_switches_them_off_when_others_export() -> None:
    """A user's own export in another thread keeps torch's behaviour."""

    class Seen(nn.Module):
        seen: tuple[bool, ...] = ()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if get_proxy_mode() is not None:
                Seen.seen = flags()
            return x + 1

    def own_export() -> tuple[bool, ...]:
        torch.export.export(Seen(), (torch.randn(2),), strict=False)
        return Seen.seen

    own_export()
    assert Seen.seen == (False, False, False)
    capture_whole(Watched(flags), torch.randn(1, 3, 16, 16))
    Seen.seen = ()
    assert own_export() == (False, False, False)


@pytest.mark.parametrize("enabled", some(1, [True, False]))
def test_the_program_is_the_same_whether_cudnn_is_allowed(enabled: bool) -> None:
    """The flag is among the arguments of norms, and the digest identifies a program."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.InstanceNorm2d(4), nn.GroupNorm(2, 4))
    wanted = capture_whole(model.eval(), torch.randn(2, 3, 8, 8)).program.digest
    before = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = enabled
    try:
        assert capture_whole(model, torch.randn(2, 3, 8, 8)).program.digest == wanted
    finally:
        torch.backends.cudnn.enabled = before


def test_what_other_threads_print_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    def speak() -> None:
        print("out of another thread")
        print("and its errors", file=sys.stderr)

    class Chatty(Watched):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if get_proxy_mode() is not None:
                print("a graph of many pages")
            return super().forward(x)

    export(Chatty(speak), Example(args=(torch.randn(1, 3, 16, 16),)), [], whole=True)
    out, err = capsys.readouterr()
    assert "out of another thread" in out
    assert "and its errors" in err
    assert "many pages" not in out


def test_two_threads_that_capture_leave_streams_and_logs_as_they_were() -> None:
    """One capture begins inside the other: the first must not restore what the second one set."""
    example = Example(args=(torch.randn(1, 3, 16, 16),))
    ended: list[str] = []
    second = threading.Thread(
        target=lambda: (export(Watched(flags), example, [], whole=True), ended.append("second"))
    )

    class Starts(Watched):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if get_proxy_mode() is not None and second.ident is None:
                second.start()
                second.join(0.5)  # the thread waits: torch records one model at a time
            return super().forward(x)

    before = sys.stdout, sys.stderr, logging.getLogger("torch.export").level
    export(Starts(flags), example, [], whole=True)
    ended.append("first")
    second.join()
    assert (sys.stdout, sys.stderr, logging.getLogger("torch.export").level) == before
    assert ended == ["first", "second"]
