"""Train a small language model with PyTorch alone; `with_legroom.py` does it in less memory.

python examples/plain.py
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCAB, DIM, LAYERS, BATCH, LENGTH, STEPS = 256, 128, 8, 16, 128, 20


class Model(nn.Module):
    """Embeddings, a stack of transformer layers, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(DIM, 4, 4 * DIM, 0.1, batch_first=True, norm_first=True)
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(DIM, VOCAB)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token at each place."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, src_mask=self.mask, is_causal=True)
        return self.head(x)


def make_batch(step: int, device: str) -> tuple[Tensor, Tensor]:
    """Sequences that count in steps of one to four: inputs, and what comes next."""
    draw = torch.Generator().manual_seed(step)
    start = torch.randint(VOCAB, (BATCH, 1), generator=draw)
    stride = torch.randint(1, 5, (BATCH, 1), generator=draw)
    tokens = (start + stride * torch.arange(LENGTH + 1)) % VOCAB
    return tokens[:, :-1].to(device), tokens[:, 1:].to(device)


def main() -> None:
    """Train, and print the loss now and then."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = Model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        inputs, targets = make_batch(step, device)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 4:
            print(f"step {step + 1}: loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
