"""Small networks, each with one property that makes cutting hard."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """A residual block with BatchNorm and an in-place activation that is used twice."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x
        return self.relu(out)


class Small(nn.Module):
    """Stem, three blocks, dropout, head; input (n, 3, 16, 16)."""

    def __init__(self, width: int = 8, classes: int = 5) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )
        self.block1 = Block(width)
        self.pool = nn.MaxPool2d(2)
        self.block2 = Block(width)
        self.block3 = Block(width)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(self.block1(self.stem(x)))
        x = self.block3(self.block2(x))
        x = functional.adaptive_avg_pool2d(x, 1).flatten(1)
        return self.head(self.dropout(x))


class Mixing(nn.Module):
    """Subtract the batch mean in the frozen part: each row's features depend on the other rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.head(self.second(x - x.mean(0)))


class Late(nn.Module):
    """Run a parameter-free module before the boundary and read its result after the boundary."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Softmax(dim=1)
        self.first = nn.Linear(6, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.scale(x)
        return self.head(self.first(x) * scale)


class Shared(nn.Module):
    """Use one activation module on both sides of the boundary, and tie weights in the frozen part."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.Tanh()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.third = nn.Linear(6, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act(self.first(x))
        x = self.act(self.second(x))
        return self.head(self.act(self.third(x)))


class InPlaceAfter(nn.Module):
    """Write into the shipped value with in-place code right after the boundary."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x += 1.0
        return self.head(functional.hardswish(x, inplace=True))


def freeze(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.requires_grad_(False)


def frozen_small(upto: str = "block2", *, seed: int = 0) -> Small:
    """Return ``Small`` with seeded weights and moving statistics, frozen through one of its blocks."""
    torch.manual_seed(seed)
    model = Small()
    model.train()
    with torch.no_grad():
        model(torch.randn(8, 3, 16, 16))
    order = ["stem", "block1", "block2", "block3"]
    for name in order[: order.index(upto) + 1]:
        freeze(model.get_submodule(name))
    return model


class Reading(nn.Module):
    """Read attributes of a frozen module, and its type, in the tail, which does not run the module."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.first(x))
        if isinstance(self.first, nn.Linear) and self.second.out_features == 6:
            x = x @ self.first.weight.T + self.second.bias
        return self.head(x)


class Casting(nn.Module):
    """Use casts and memory formats in the frozen part."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3)
        self.second = nn.Conv2d(4, 4, 3)
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).double().float().to(memory_format=torch.channels_last)
        return self.head(self.second(x).mean((2, 3)))


class Encoder(nn.Module):
    """Use a stock ``nn.TransformerEncoder``, whose forward reads attributes of its first layer."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, dim_feedforward=32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3)
        self.head = nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x).mean(1))


class Branching(nn.Module):
    """Branch on data in the frozen part."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.head(self.second(x * 2 if x.sum() > 0 else x))


class TwoInputs(nn.Module):
    """Take two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.head(self.first(x) + y)


class Towers(nn.Module):
    """Run two towers, the frozen one second, and a head on both."""

    def __init__(self) -> None:
        super().__init__()
        self.trained = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.frozen = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 6), nn.Tanh())
        self.head = nn.Linear(12, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left = self.trained(x)
        right = self.frozen(x)
        return self.head(torch.cat([left, right], 1))


class Skips(nn.Module):
    """A small U-Net: the upward path reads the results of the downward path again."""

    def __init__(self) -> None:
        super().__init__()
        self.down1 = nn.Conv2d(3, 4, 3, padding=1)
        self.down2 = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(4, 8, 3, padding=1), nn.ReLU())
        self.down3 = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
        self.up2 = nn.Conv2d(16, 4, 3, padding=1)
        self.up1 = nn.Conv2d(8, 2, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one = self.down1(x)
        two = self.down2(one)
        three = functional.interpolate(self.down3(two), scale_factor=2)
        back = functional.interpolate(self.up2(torch.cat([two, three], 1)), scale_factor=2)
        return self.up1(torch.cat([one, back], 1))


class Masked(nn.Module):
    """Take tokens, a mask by keyword and a nested dict of options; return a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.block1 = nn.Linear(8, 8)
        self.block2 = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor | None = None,
        options: dict[str, torch.Tensor | None] | None = None,
    ) -> dict[str, torch.Tensor | None]:
        x = self.block2(torch.tanh(self.block1(self.embed(ids))))
        if mask is not None:
            x = x * mask.unsqueeze(-1)
        if options is not None and options["shift"] is not None:
            x = x + options["shift"].unsqueeze(1)
        return {"logits": self.head(x.mean(1)), "nothing": None, "hidden": x}


class BranchingLate(nn.Module):
    """Branch on data in the trained part only."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.head = nn.Linear(6, 2)
        self.other = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(torch.relu(self.first(x)))
        return self.head(x) if x.sum() > 0 else self.other(x)


class LayerDrop(nn.Module):
    """Skip layers at random during training, as speech models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if not self.training or torch.rand([]) > 0.1:
                x = torch.tanh(layer(x))
        return self.head(x)


class Noisy(nn.Module):
    """Add noise in the second frozen module, also in eval."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.noise = Jitter()
        self.third = nn.Linear(6, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.third(self.noise(self.first(x))))


class Jitter(nn.Module):
    """Scale its input and add random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + torch.rand_like(x)


class Counting(nn.Module):
    """Count the calls of a frozen module in a buffer, and read the count."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.counter = Counter()
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.counter(self.first(x)))


class Counter(nn.Module):
    """The frozen module of `Counting`."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.count: torch.Tensor
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return x * self.scale + self.count


class CallCount(nn.Module):
    """Count its calls in a buffer that it never reads."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * 2


class Checkpointed(nn.Module):
    """Checkpoint activations around one or two blocks at a time."""

    def __init__(self, *, together: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(6, 2)
        self.together = together

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        step = 2 if self.together else 1
        for start in range(0, 4, step):
            x = checkpoint(self._run, x, start, start + step, use_reentrant=False)
        return self.head(x)

    def _run(self, x: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        for block in self.blocks[start:stop]:
            x = block(x)
        return x


class SideChannel(nn.Module):
    """Keep a value as an attribute of a frozen module, and read it after the cut."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Keeping()
        self.second = nn.Linear(6, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(x)) + self.first.kept)


class Keeping(nn.Module):
    """The frozen module of `SideChannel`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.kept = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = torch.tanh(x)
        return self.inner(x)


class TimeFirst(nn.Module):
    """Ship a value that has samples in its second dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.first(x.transpose(0, 1))).mean(0)


class Windows(nn.Module):
    """Turn each sample into four rows before the cut."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.first(x.reshape(-1, 6))
        return self.head(rows).reshape(x.shape[0], -1)


class Auxiliary(nn.Module):
    """Add a head in the middle of the frozen part, which answers only in training."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.aux = nn.Linear(6, 2)
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = torch.tanh(self.first(x))
        aux = (self.aux(x),) if self.training else ()
        return (self.head(torch.tanh(self.second(x))), *aux)


class SharedDropout(nn.Module):
    """Use one Dropout in the frozen part and again after it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.dropout(self.first(x)))
        return self.head(self.dropout(x))
