"""Define models that are hard to cut: branches on data, several inputs and towers, skips, shared modules.

Each function returns a module and an example of its inputs, so ``upriver cuts scripts.own_models:NAME`` works
from the root of the repository. ``scripts/models.py`` cuts them with the published models.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn

WIDTH, CLASSES, WORDS, TOKENS = 48, 10, 1000, 32
SAMPLES = 4


class Residual(nn.Module):
    """Two convolutions with a skip connection. The activation writes in place."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the shape of ``x``."""
        hidden = self.act(self.norm1(self.conv1(x)))
        return self.act(self.norm2(self.conv2(hidden)) + x)


def _stem(width: int = WIDTH) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, width, 3, stride=2, padding=1), nn.BatchNorm2d(width), nn.ReLU())


def _head(width: int = WIDTH) -> nn.Sequential:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(width, CLASSES))


def _images(*, seed: int = 0, size: int = 64) -> torch.Tensor:
    return torch.randn(SAMPLES, 3, size, size, generator=torch.Generator().manual_seed(seed))


class EarlyExit(nn.Module):
    """A network that skips its later blocks, after the freeze point, if an answer is confident."""

    def __init__(self, blocks: int = 9, exit_after: int = 6, threshold: float = 0.5) -> None:
        super().__init__()
        self.exit_after, self.threshold = exit_after, threshold
        self.stem = _stem()
        self.blocks = nn.ModuleList(Residual() for _ in range(blocks))
        self.early = _head()
        self.late = _head()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map images to classes."""
        x = self.stem(x)
        for number, block in enumerate(self.blocks):
            if number == self.exit_after:
                answer: torch.Tensor = self.early(x)
                if answer.detach().softmax(-1).amax(-1).min() > self.threshold:
                    return answer
            x = block(x)
        late: torch.Tensor = self.late(x)
        return late


def early_exit() -> tuple[nn.Module, torch.Tensor]:
    """Return a model with a branch on data right behind the freeze point."""
    return EarlyExit(), _images()


class Detour(nn.Module):
    """A network whose frozen part selects one of two blocks by the contents of the batch."""

    def __init__(self, blocks: int = 12, fork_after: int = 6) -> None:
        super().__init__()
        self.fork_after = fork_after
        self.stem = _stem()
        self.blocks = nn.ModuleList(Residual() for _ in range(blocks))
        self.head = _head()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map images to classes."""
        x = self.stem(x)
        skip = -1
        for number, block in enumerate(self.blocks):
            if number == self.fork_after and x.mean() > x.std():
                skip = number
            if number != skip:
                x = block(x)
        answer: torch.Tensor = self.head(x)
        return answer


def detour() -> tuple[nn.Module, torch.Tensor]:
    """Return a model with a branch on data in the middle of the frozen part."""
    return Detour(), _images()


class Checked(nn.Module):
    """A network that first checks the values of its input, as careful code does."""

    def __init__(self, blocks: int = 9) -> None:
        super().__init__()
        self.stem = _stem()
        self.blocks = nn.Sequential(*(Residual() for _ in range(blocks)))
        self.head = _head()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map images to classes."""
        if bool(x.isnan().any()):
            raise ValueError("the images hold NaN")
        answer: torch.Tensor = self.head(self.blocks(self.stem(x)))
        return answer


def checked() -> tuple[nn.Module, torch.Tensor]:
    """Return a model with a branch on data before any computation."""
    return Checked(), _images()


class TextTower(nn.Module):
    """A transformer over words, with a padding mask and the mean over the other positions."""

    def __init__(self, layers: int = 6, width: int = 2 * WIDTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.place = nn.Parameter(torch.randn(TOKENS, width) / 10)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True) for _ in range(layers)
        )

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Map (n, tokens) to (n, width)."""
        x = self.embed(ids) + self.place
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=mask == 0)
        kept = mask.unsqueeze(-1).to(x.dtype)
        return (x * kept).sum(1) / kept.sum(1)


class TwoTowers(nn.Module):
    """Pictures and text. The picture tower runs first and is trained; the text tower is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.picture = nn.Sequential(_stem(), Residual(), Residual(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.text = TextTower()
        self.head = nn.Linear(WIDTH + 2 * WIDTH, CLASSES)

    def forward(
        self, *, pixels: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """Map named inputs to an answer in the form of transformers models."""
        seen = self.picture(pixels)
        read = self.text(ids, torch.ones_like(ids) if mask is None else mask)
        return {"logits": self.head(torch.cat([seen, read], dim=-1))}


def two_towers() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Return a model with a frozen tower that runs after a trained one."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([TOKENS, TOKENS // 2, TOKENS - 3, 7])
    return TwoTowers(), {
        "pixels": _images(),
        "ids": torch.randint(0, WORDS, (SAMPLES, TOKENS), generator=generator),
        "mask": (torch.arange(TOKENS) < lengths[:, None]).long(),
    }


class UNet(nn.Module):
    """A network whose way up reads every level of the way down again."""

    def __init__(self, levels: int = 4, width: int = 16) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels)]
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(nn.Sequential(Residual(w), Residual(w)) for w in widths)
        self.shrink = nn.ModuleList(nn.Conv2d(a, b, 2, stride=2) for a, b in pairwise(widths))
        self.grow = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in pairwise(widths))
        self.up = nn.ModuleList(nn.Sequential(nn.Conv2d(2 * w, w, 1), Residual(w)) for w in widths[:-1])
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map images to a map of two classes."""
        skips = []
        x = self.stem(x)
        for number, level in enumerate(self.down):
            x = level(x)
            if number < len(self.shrink):
                skips.append(x)
                x = self.shrink[number](x)
        for number in reversed(range(len(self.grow))):
            x = self.up[number](torch.cat([self.grow[number](x), skips[number]], dim=1))
        answer: torch.Tensor = self.head(x)
        return answer


def unet() -> tuple[nn.Module, torch.Tensor]:
    """Return a model in which several tensors cross the freeze point."""
    return UNet(), _images()


class Siamese(nn.Module):
    """One encoder for both pictures of a pair."""

    def __init__(self, blocks: int = 6) -> None:
        super().__init__()
        self.encoder = nn.Sequential(_stem(), *(Residual() for _ in range(blocks)), nn.AdaptiveAvgPool2d(1))
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(2 * WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """Return the similarity of the two pictures of each pair."""
        a, b = self.encoder(left), self.encoder(right)
        answer: torch.Tensor = self.head(torch.cat([a * b, (a - b).abs()], dim=1))
        return answer


def siamese() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Return a model with a frozen module that is called twice, and two positional inputs."""
    return Siamese(), (_images(), _images(seed=1))


class Levels(NamedTuple):
    """The result of a backbone: features of three resolutions."""

    fine: torch.Tensor
    middle: torch.Tensor
    coarse: torch.Tensor


class Backbone(nn.Module):
    """A chain of blocks that returns the features after three of them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = _stem()
        self.fine = nn.Sequential(Residual(), Residual())
        self.middle = nn.Sequential(nn.MaxPool2d(2), Residual(), Residual())
        self.coarse = nn.Sequential(nn.MaxPool2d(2), Residual(), Residual())

    def forward(self, x: torch.Tensor) -> Levels:
        """Return the features, finest first."""
        fine = self.fine(self.stem(x))
        middle = self.middle(fine)
        return Levels(fine, middle, self.coarse(middle))


class Pyramid(nn.Module):
    """A detector's shape: a frozen backbone, lateral connections, a head on every level."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = Backbone()
        self.lateral = nn.ModuleList(nn.Conv2d(WIDTH, WIDTH, 1) for _ in range(3))
        self.heads = nn.ModuleList(nn.Conv2d(WIDTH, 5, 3, padding=1) for _ in range(3))

    def forward(self, x: torch.Tensor, boxes: torch.Tensor | None = None) -> tuple[torch.Tensor | None, ...]:
        """Return a map for each level, and the given boxes."""
        levels = self.backbone(x)
        above = None
        answers = []
        for lateral, head, level in zip(self.lateral, self.heads, reversed(levels), strict=True):
            here = lateral(level)
            if above is not None:
                here = here + nn.functional.interpolate(above, scale_factor=2.0)
            above = here
            answers.append(head(here))
        return *answers, boxes


def pyramid() -> tuple[nn.Module, tuple[torch.Tensor | None, ...]]:
    """Return a model with a frozen module that returns a named tuple, and an input that is None."""
    return Pyramid(), (_images(), None)


class Centred(nn.Module):
    """A network that centres frozen features over the batch, so samples influence each other."""

    def __init__(self, blocks: int = 6) -> None:
        super().__init__()
        self.stem = _stem()
        self.blocks = nn.ModuleList(Residual() for _ in range(blocks))
        self.head = _head()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map images to classes."""
        x = self.stem(x)
        x = x - x.mean(0, keepdim=True)
        for block in self.blocks:
            x = block(x)
        answer: torch.Tensor = self.head(x)
        return answer


def centred() -> tuple[nn.Module, torch.Tensor]:
    """Return a model that must be refused: an answer depends on the other samples of its micro-batch."""
    return Centred(), _images()
