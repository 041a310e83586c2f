"""Small models for the tests of the runtime: plain blocks, and blocks with an odd habit each."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 64
ROWS = 32


class Mlp(nn.Module):
    """Norm, two layers, dropout and a residual."""

    def __init__(self, width: int = WIDTH, p: float = 0.1, inplace: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.act: nn.Module = nn.ReLU(inplace=True) if inplace else nn.GELU()
        self.drop = nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(self.act(self.up(self.norm(x)))))


class Attention(nn.Module):
    """Causal attention with a projection; three views of one storage are saved."""

    def __init__(self, width: int = WIDTH, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(batch, time, width))


class Gated(nn.Module):
    """A norm, and two layers side by side, without bias: gradients meet at what both read."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.gate, self.down = (nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(torch.relu(self.gate(y)) * self.up(y))


class Chosen(nn.Module):
    """Rows are chosen by their number, twice: backward adds to zeros."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        order = torch.arange(len(x) - 1, -1, -1)
        y = torch.tanh(self.up(x))[order]
        return x + y.gather(0, order[:, None].expand_as(y))


class Thirds(nn.Module):
    """Nothing but products: they save weights, and three views of one storage."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(256, 768, bias=False)
        self.last = nn.Linear(256, 256, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.layer(x).chunk(3, dim=-1)
        return self.last((a @ b.transpose(0, 1)) @ c)  # type: ignore[no-any-return]


class ConvNorm(nn.Module):
    """Convolution, batch norm, relu in place, residual."""

    def __init__(self, channels: int = 8, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels, momentum=momentum)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)), inplace=True) + x


class Each(nn.Module):
    """A block made of a function and a layer of weights: `fn(layer, x)`."""

    def __init__(self, fn: Callable[["Each", Any], Any], width: int = WIDTH) -> None:
        super().__init__()
        self.fn = fn
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Any) -> Any:
        return self.fn(self, x)


def stack(make: Callable[[], nn.Module], count: int = 3) -> nn.Sequential:
    """A row of such blocks, seeded."""
    torch.manual_seed(0)
    return nn.Sequential(*(make() for _ in range(count)))


def rows(width: int = WIDTH, count: int = ROWS, seed: int = 1) -> Tensor:
    """A batch of rows."""
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def images(channels: int = 8, seed: int = 1) -> Tensor:
    """A batch of images."""
    return torch.randn(4, channels, 12, 12, generator=torch.Generator().manual_seed(seed))


def texts(width: int = WIDTH, seed: int = 1) -> Tensor:
    """A batch of sequences."""
    return torch.randn(4, 16, width, generator=torch.Generator().manual_seed(seed))
