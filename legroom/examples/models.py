"""Models of our own, in the shapes people train: decoder, ViT, ResNet, U-Net, LSTM."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class DecoderBlock(nn.Module):
    """Pre-norm attention and feed-forward, each with a residual."""

    causal = True

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """The block on hidden states (batch, sequence, dim)."""
        x = x + self.drop(self._attend(self.norm1(x)))
        x = x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))
        return x

    def _attend(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y: Tensor = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        y = self.out(y.transpose(1, 2).flatten(2))
        return y


class Decoder(nn.Module):
    """A small language model: embeddings, decoder blocks, head."""

    def __init__(
        self, vocab: int, dim: int, layers: int, heads: int, sequence: int, dropout: float
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.place = nn.Parameter(torch.zeros(sequence, dim))
        self.blocks = nn.ModuleList(DecoderBlock(dim, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (batch, sequence, vocab) of tokens (batch, sequence)."""
        x = self.embed(tokens) + self.place[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class EncoderBlock(DecoderBlock):
    """The same, where each place sees all others."""

    causal = False


class VisionTransformer(nn.Module):
    """The usual ViT: patches and a class token, encoder blocks, a classifier on the token."""

    def __init__(
        self, image: int, patch: int, dim: int, layers: int, heads: int, classes: int
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, dim, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, dim))
        self.place = nn.Parameter(torch.zeros((image // patch) ** 2 + 1, dim))
        self.blocks = nn.ModuleList(EncoderBlock(dim, heads, 0.0) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (batch, classes) of images (batch, 3, height, width)."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(len(x), -1, -1), x), 1) + self.place
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x[:, 0]))
        return logits


class Bottleneck(nn.Module):
    """A residual block of 1x1, 3x3 and 1x1 convolutions; the stride is on the 3x3 (v1.5)."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        """The block on images (batch, channels, height, width)."""
        y: Tensor = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        y += self.downsample(x)
        y = self.relu(y)
        return y


class ResNet(nn.Module):
    """The usual bottleneck ResNet: stem, stages that halve the image, pooled classifier."""

    def __init__(self, layers: tuple[int, ...], width: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        widths = [width * 2**i for i in range(len(layers))]
        self.stages = nn.Sequential()
        inputs = width
        for i, (depth, size) in enumerate(zip(layers, widths, strict=True)):
            stage = [Bottleneck(inputs, size, 1 if i == 0 else 2)]
            stage += [Bottleneck(4 * size, size, 1) for _ in range(depth - 1)]
            self.stages.append(nn.Sequential(*stage))
            inputs = 4 * size
        self.fc = nn.Linear(inputs, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (batch, classes) of images (batch, 3, height, width)."""
        logits: Tensor = self.fc(self.stages(self.stem(images)).mean((2, 3)))
        return logits


class UNet(nn.Module):
    """Down, across and up again, with a skip at each scale."""

    def __init__(self, width: int, depth: int, classes: int) -> None:
        super().__init__()
        sizes = [width * 2**i for i in range(depth + 1)]
        pairs = list(zip(sizes, sizes[1:], strict=False))
        self.stem = _double(3, width)
        self.down = nn.ModuleList(_double(a, b) for a, b in pairs)
        self.grow = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in reversed(pairs))
        self.up = nn.ModuleList(_double(b, a) for a, b in reversed(pairs))
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (batch, classes, height, width) of images of the same size."""
        x, skips = self.stem(images), []
        for down in self.down:
            skips.append(x)
            x = down(F.max_pool2d(x, 2))
        for grow, up in zip(self.grow, self.up, strict=True):
            x = up(torch.cat((skips.pop(), grow(x)), 1))
        logits: Tensor = self.head(x)
        return logits


def _double(inputs: int, outputs: int) -> nn.Sequential:
    steps: list[nn.Module] = []
    for size in (inputs, outputs):
        steps += [nn.Conv2d(size, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)]
        steps += [nn.ReLU(inplace=True)]
    return nn.Sequential(*steps)


class LSTMStack(nn.Module):
    """A language model of stacked LSTM layers with residuals."""

    def __init__(self, vocab: int, dim: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(nn.LSTM(dim, dim, batch_first=True) for _ in range(layers))
        self.head = nn.Linear(dim, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (batch, sequence, vocab) of tokens (batch, sequence)."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)[0]
        logits: Tensor = self.head(x)
        return logits
