"""Random small networks, from a seed: rows, sequences or images through a few random blocks."""

import random

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 64
CHANNELS = 8


class RandomBlock(nn.Module):
    """A random row of ops on rows of numbers, with what weights they need."""

    KINDS = (
        "linear", "norm", "relu", "relu_", "gelu", "dropout", "residual", "concat", "turn",
        "attention", "scale_", "gate", "slice", "expand",
    )  # fmt: skip

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.kinds = ["linear", *draw.choices(self.KINDS, k=draw.randint(2, 6)), "linear"]
        self.layers = nn.ModuleList(self._layer(kind) for kind in self.kinds)

    def _layer(self, kind: str) -> nn.Module:
        if kind == "concat":
            return nn.Linear(2 * WIDTH, WIDTH)
        if kind == "attention":
            return nn.Linear(WIDTH, 3 * WIDTH)
        if kind in ("linear", "gate"):
            return nn.Linear(WIDTH, WIDTH)
        return nn.LayerNorm(WIDTH) if kind == "norm" else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        start = x
        for kind, layer in zip(self.kinds, self.layers, strict=True):
            x = self._turn(kind, layer, x, start)
        return x

    def _turn(self, kind: str, layer: nn.Module, x: Tensor, start: Tensor) -> Tensor:
        if kind in ("linear", "norm"):
            return layer(x)
        if kind == "attention":
            q, k, v = layer(x).view(-1, 8, 3, 4, 16).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v)
            return y.transpose(1, 2).reshape(x.shape)
        simple = {
            "relu": lambda: F.relu(x),
            # Never on the block's own input: that would bar the block.
            "relu_": lambda: F.relu((x + 0.1), inplace=True),
            "gelu": lambda: F.gelu(x),
            "dropout": lambda: F.dropout(x, 0.3),
            "residual": lambda: x + start,
            "concat": lambda: layer(torch.cat((x, start), 1)),
            "turn": lambda: (x.t().contiguous() * x.t()).t(),
            "scale_": lambda: (x * 2).mul_(0.4).add_(start, alpha=0.1),
            "gate": lambda: torch.sigmoid(layer(x)) * x,
            "slice": lambda: torch.cat((x[:, 32:] * x[:, :32], x[:, :32].tanh()), 1),
            "expand": lambda: (x.unsqueeze(1).expand(-1, 2, -1) * start.unsqueeze(1)).mean(1),
        }
        return simple[kind]()


class RandomConv(nn.Module):
    """A random row of ops on images."""

    KINDS = ("conv", "norm", "relu_", "gelu", "dropout", "residual", "pool", "concat")

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.kinds = ["conv", *draw.choices(self.KINDS, k=draw.randint(2, 5)), "conv"]
        self.layers = nn.ModuleList(self._layer(kind) for kind in self.kinds)

    def _layer(self, kind: str) -> nn.Module:
        if kind == "norm":
            return nn.BatchNorm2d(CHANNELS)
        double = 2 * CHANNELS if kind == "concat" else CHANNELS
        return nn.Conv2d(double, CHANNELS, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        start = x
        for kind, layer in zip(self.kinds, self.layers, strict=True):
            if kind in ("conv", "norm"):
                x = layer(x)
            elif kind == "concat":
                x = layer(torch.cat((x, start), 1))
            elif kind == "relu_":
                x = F.relu(x + 0.1, inplace=True)
            elif kind == "pool":
                x = F.interpolate(F.max_pool2d(x, 2), scale_factor=2)
            elif kind == "residual":
                x = x + start
            else:
                x = F.gelu(x) if kind == "gelu" else F.dropout2d(x, 0.2)
        return x


def random_net(seed: int, size: int = 1) -> tuple[nn.Module, Tensor]:
    """A network of two to five random blocks, some of them alike, and a batch for it."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    make = RandomConv if draw.random() < 0.3 else RandomBlock
    seeds = [draw.randrange(1000) for _ in range(3)]
    blocks = [make(draw.choice(seeds)) for _ in range(draw.randint(2, 5))]
    generator = torch.Generator().manual_seed(seed)
    if make is RandomConv:
        return nn.Sequential(*blocks), torch.randn(4 * size, CHANNELS, 16, 16, generator=generator)
    return nn.Sequential(*blocks), torch.randn(64 * size, WIDTH, generator=generator)
