"""The training of `plain.py` under a memory budget: the same losses, in less memory.

    python examples/with_legroom.py
    python examples/with_legroom.py 90MiB

Three lines are new: `legroom.fit`, `with job.step()`, and the report. The losses printed are those
of `plain.py`, to the last digit, for what legroom does here is exact.
"""

import sys

import torch
from plain import STEPS, Model, make_batch
from torch.nn import functional as F

import legroom


def main(budget: str) -> None:
    """Train under the budget, and print the loss now and then."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = Model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    job = legroom.fit(model, optimizer, budget=budget)
    for step in range(STEPS):
        inputs, targets = make_batch(step, device)
        with job.step():
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if step % 5 == 4:
            print(f"step {step + 1}: loss {loss.item():.6f}")
    print(job.report())


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "90MiB")
