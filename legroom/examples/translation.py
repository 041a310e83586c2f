"""A translator of LSTM layers with attention, in the shapes of GNMT (Wu et al. 2016).

Attention is additive (Bahdanau et al. 2015). The first layer of the decoder asks for all words at
once, and what it finds goes into every layer above. The encoder's first layer reads both ways.
"""

import torch
from torch import Tensor, nn


class Layer(nn.Module):
    """An LSTM layer, one way or both, with a residual where the sizes allow it."""

    def __init__(self, inputs: int, dim: int, dropout: float, both: bool = False) -> None:
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.lstm = nn.LSTM(inputs, dim, batch_first=True, bidirectional=both)

    def forward(self, x: Tensor, found: Tensor | None = None) -> Tensor:
        """States (batch, words, dim) of what is below, beside what attention found."""
        y = self.drop(x)
        y = self.lstm(y if found is None else torch.cat((y, found), -1))[0]
        result: Tensor = x + y if x.shape == y.shape else y
        return result


class Attention(nn.Module):
    """Additive: a small net scores each word of the source for each word of the target."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim)
        self.score = nn.Linear(dim, 1, bias=False)

    def forward(self, asking: Tensor, states: Tensor) -> Tensor:
        """What each of (batch, target, dim) finds in states (batch, source, dim)."""
        mixed = self.query(asking).unsqueeze(2) + self.key(states).unsqueeze(1)
        weights = self.score(mixed.tanh()).squeeze(-1).softmax(-1)
        found: Tensor = weights @ states
        return found


class Translator(nn.Module):
    """Reads a sentence, and predicts each next word of another."""

    def __init__(self, vocab: int, dim: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        above = (2 * dim, *(dim for _ in range(layers - 2)))
        self.encoder = nn.Sequential(
            Layer(dim, dim, dropout, both=True), *(Layer(size, dim, dropout) for size in above)
        )
        self.first, self.attention = Layer(dim, dim, dropout), Attention(dim)
        self.layers = nn.ModuleList(Layer(2 * dim, dim, dropout) for _ in range(layers - 1))
        self.head = nn.Linear(dim, vocab)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Logits (batch, target, vocab) of two batches of words."""
        states = self.encoder(self.embed(source))
        x = self.first(self.embed(target))
        found = self.attention(x, states)
        for layer in self.layers:
            x = layer(x, found)
        logits: Tensor = self.head(x)
        return logits
