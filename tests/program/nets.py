"""Small networks, each with one thing that makes cutting hard."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


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
    """Frozen part subtracts the batch mean: one row's features depend on the others."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.head(self.second(x - x.mean(0)))


class Late(nn.Module):
    """A parameter-free module runs before the boundary and is read after it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Softmax(dim=1)
        self.first = nn.Linear(6, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.scale(x)
        return self.head(self.first(x) * scale)


class Shared(nn.Module):
    """One activation module used before and after the boundary, and tied weights in the frozen part."""

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
    """In-place code right after the boundary writes into the shipped value."""

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
    """``Small`` with seeded weights and moving statistics, frozen through one of its blocks."""
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
    """The tail asks a frozen module that it does not run what it is and what it holds."""

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
    """Casts and memory formats in the frozen part."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3)
        self.second = nn.Conv2d(4, 4, 3)
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).double().float().to(memory_format=torch.channels_last)
        return self.head(self.second(x).mean((2, 3)))


class Encoder(nn.Module):
    """A stock ``nn.TransformerEncoder``, whose forward reads attributes of its first layer."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, dim_feedforward=32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3)
        self.head = nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x).mean(1))


class Branching(nn.Module):
    """Control flow that depends on data, in the frozen part."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.head(self.second(x * 2 if x.sum() > 0 else x))


class TwoInputs(nn.Module):
    """Takes two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.head(self.first(x) + y)
