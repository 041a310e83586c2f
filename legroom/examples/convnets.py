"""Convolutional nets of our own in published shapes: VGG, Inception-v3 and DenseNet.

As published by Simonyan and Zisserman (2015), Szegedy et al. (2016) and Huang et al. (2017), with
the sizes that torchvision gives them. Inception has no second classifier.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Kernel = tuple[int, int]
SQUARE, FIVE, POINT, ROW, COLUMN = (3, 3), (5, 5), (1, 1), (1, 7), (7, 1)


class Vgg(nn.Module):
    """Stages of 3x3 convolutions, each halved by a pool; three wide linear layers."""

    def __init__(self, layers: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.stages, inputs = nn.Sequential(), 3
        for i, depth in enumerate(layers):
            size = min(64 * 2**i, 512)
            self.stages.append(_plain_stage(inputs, size, depth))
            inputs = size
        self.pool = nn.AdaptiveAvgPool2d(7)
        self.head = nn.Sequential(
            nn.Linear(49 * inputs, 4096), nn.ReLU(inplace=True), nn.Dropout(),
            nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Dropout(),
            nn.Linear(4096, classes),
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        """Logits (batch, classes) of images (batch, 3, height, width)."""
        logits: Tensor = self.head(self.pool(self.stages(images)).flatten(1))
        return logits


def _plain_stage(inputs: int, size: int, depth: int) -> nn.Sequential:
    steps: list[nn.Module] = []
    for i in range(depth):
        steps += [nn.Conv2d(size if i else inputs, size, 3, 1, 1), nn.ReLU(inplace=True)]
    return nn.Sequential(*steps, nn.MaxPool2d(2))


class Branches(nn.Module):
    """Runs its branches on one input, and puts their outputs side by side."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        """Images (batch, the branches' channels together, height, width)."""
        return torch.cat([branch(x) for branch in self.branches], 1)


class Inception(nn.Module):
    """Inception-v3: a stem, then modules of parallel convolutions at three scales."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            _conv(3, 32, SQUARE, 2), _conv(32, 32, SQUARE, same=False), _conv(32, 64, SQUARE),
            nn.MaxPool2d(3, 2),
            _conv(64, 80, POINT), _conv(80, 192, SQUARE, same=False), nn.MaxPool2d(3, 2),
        )  # fmt: skip
        self.mixed = nn.Sequential(
            *(_fine(inputs, pooled) for inputs, pooled in ((192, 32), (256, 64), (288, 64))),
            _halve_fine(288),
            *(_middle(768, width) for width in (128, 160, 160, 192)),
            _halve_middle(768),
            *(_coarse(inputs) for inputs in (1280, 2048)),
        )
        self.drop, self.fc = nn.Dropout(), nn.Linear(2048, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (batch, classes) of images (batch, 3, height, width), from 75 x 75 on."""
        pooled = self.mixed(self.stem(images)).mean((2, 3))
        logits: Tensor = self.fc(self.drop(pooled))
        return logits


def _conv(
    inputs: int, outputs: int, kernel: Kernel, stride: int = 1, same: bool = True
) -> nn.Sequential:
    """Convolution, batch norm and ReLU; padded to the same size where it does not stride."""
    padded = same and stride == 1
    padding = (kernel[0] // 2, kernel[1] // 2) if padded else (0, 0)
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False),
        nn.BatchNorm2d(outputs, eps=1e-3),
        nn.ReLU(inplace=True),
    )


def _chain(inputs: int, *steps: tuple[int, Kernel], stride: int = 1) -> nn.Sequential:
    """Convolutions one after another, by outputs and kernel; the last one may stride."""
    made = nn.Sequential()
    for i, (outputs, kernel) in enumerate(steps):
        made.append(_conv(inputs, outputs, kernel, stride if i == len(steps) - 1 else 1))
        inputs = outputs
    return made


def _pooled(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.AvgPool2d(3, 1, 1), _conv(inputs, outputs, POINT))


def _fine(inputs: int, pooled: int) -> Branches:
    return Branches(
        _conv(inputs, 64, POINT),
        _chain(inputs, (48, POINT), (64, FIVE)),
        _chain(inputs, (64, POINT), (96, SQUARE), (96, SQUARE)),
        _pooled(inputs, pooled),
    )


def _halve_fine(inputs: int) -> Branches:
    return Branches(
        _conv(inputs, 384, SQUARE, 2),
        _chain(inputs, (64, POINT), (96, SQUARE), (96, SQUARE), stride=2),
        nn.MaxPool2d(3, 2),
    )


def _middle(inputs: int, width: int) -> Branches:
    thin = ((width, POINT), (width, COLUMN), (width, ROW), (width, COLUMN))
    return Branches(
        _conv(inputs, 192, POINT),
        _chain(inputs, (width, POINT), (width, ROW), (192, COLUMN)),
        _chain(inputs, *thin, (192, ROW)),
        _pooled(inputs, 192),
    )


def _halve_middle(inputs: int) -> Branches:
    return Branches(
        _chain(inputs, (192, POINT), (320, SQUARE), stride=2),
        _chain(inputs, (192, POINT), (192, ROW), (192, COLUMN), (192, SQUARE), stride=2),
        nn.MaxPool2d(3, 2),
    )


def _coarse(inputs: int) -> Branches:
    def fork() -> Branches:
        return Branches(_conv(384, 384, (1, 3)), _conv(384, 384, (3, 1)))

    return Branches(
        _conv(inputs, 320, POINT),
        nn.Sequential(_conv(inputs, 384, POINT), fork()),
        nn.Sequential(_chain(inputs, (448, POINT), (384, SQUARE)), fork()),
        _pooled(inputs, 192),
    )


class Grow(nn.Module):
    """A layer of DenseNet: what came in, and so many channels more."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(inputs), nn.BatchNorm2d(4 * growth)
        self.conv1 = nn.Conv2d(inputs, 4 * growth, 1, bias=False)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, 1, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Images with `growth` more channels."""
        y = self.conv1(F.relu(self.norm1(x), inplace=True))
        y = self.conv2(F.relu(self.norm2(y), inplace=True))
        return torch.cat((x, y), 1)


class DenseNet(nn.Module):
    """Stages of layers that each see all before them, with half the channels and size between."""

    def __init__(self, layers: tuple[int, ...], growth: int, classes: int) -> None:
        super().__init__()
        size = 2 * growth
        self.stem = nn.Sequential(
            nn.Conv2d(3, size, 7, 2, 3, bias=False),
            nn.BatchNorm2d(size),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        self.stages = nn.Sequential()
        for i, depth in enumerate(layers):
            if i:
                self.stages.append(_shrink(size))
                size //= 2
            self.stages.append(
                nn.Sequential(*(Grow(size + j * growth, growth) for j in range(depth)))
            )
            size += depth * growth
        self.norm, self.fc = nn.BatchNorm2d(size), nn.Linear(size, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (batch, classes) of images (batch, 3, height, width)."""
        x = F.relu(self.norm(self.stages(self.stem(images))), inplace=True)
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits


def _shrink(size: int) -> nn.Sequential:
    return nn.Sequential(
        nn.BatchNorm2d(size),
        nn.ReLU(inplace=True),
        nn.Conv2d(size, size // 2, 1, bias=False),
        nn.AvgPool2d(2),
    )
