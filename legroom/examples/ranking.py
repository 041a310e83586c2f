"""A recommender in the shapes of DLRM (Naumov et al. 2019), as MLPerf trains it on Criteo's data.

Bags of embeddings and a small net for the numbers; every pair of their results is multiplied, and
a larger net guesses the click. The tables are smaller than Criteo's.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NUM_NUMBERS = 13
"""Numbers that come with each row of the data, beside its categories."""


class Layer(nn.Module):
    """A linear layer and a ReLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Rows (batch, outputs)."""
        return F.relu(self.linear(x), inplace=True)


class Pairs(nn.Module):
    """Finds a vector for each category, and multiplies every pair of vectors."""

    places: Tensor

    def __init__(self, tables: int, rows: int, dim: int) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, dim, mode="sum") for _ in range(tables))
        places = torch.tril_indices(tables + 1, tables + 1, -1)
        self.register_buffer("places", places, persistent=False)

    def forward(self, dense: Tensor, rows: Tensor) -> Tensor:
        """Products (batch, pairs) of vectors (batch, dim) and rows (tables, batch, picks)."""
        found = [bag(picks) for bag, picks in zip(self.bags, rows, strict=True)]
        features = torch.stack((dense, *found), 1)
        products = features @ features.transpose(1, 2)
        return products[:, self.places[0], self.places[1]]


class Ranker(nn.Module):
    """The chance that a row of numbers and categories is clicked on."""

    def __init__(self, tables: int, rows: int, dim: int) -> None:
        super().__init__()
        self.bottom, self.pairs = _net(NUM_NUMBERS, 512, 256, dim), Pairs(tables, rows, dim)
        self.top = _net(dim + tables * (tables + 1) // 2, 1024, 1024, 512, 256)
        self.head = nn.Linear(256, 1)

    def forward(self, numbers: Tensor, rows: Tensor) -> Tensor:
        """Logits (batch,) of numbers (batch, 13) and rows (tables, batch, picks)."""
        dense = self.bottom(numbers)
        logits: Tensor = self.head(self.top(torch.cat((dense, self.pairs(dense, rows)), 1)))
        return logits.squeeze(1)


def _net(*sizes: int) -> nn.Sequential:
    return nn.Sequential(*(Layer(a, b) for a, b in zip(sizes, sizes[1:], strict=False)))
