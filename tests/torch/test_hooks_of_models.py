"""Hooks that a model hangs on its own modules in its first forward."""

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from tests.torch.support import fitted


@pytest.mark.parametrize("policy", ["auto", "recompute_all"])
def test_hidden_states_are_collected_once(policy: str) -> None:
    """A capture on fake tensors takes back the hooks with the note that they are there."""
    config = BertConfig(
        hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=128,
        vocab_size=100, use_cache=False,
    )  # fmt: skip
    model, ids = BertForSequenceClassification(config), torch.arange(64).view(4, 16)
    with fitted(model, policy) as job:
        for _ in range(5):
            with job.step():
                out = model(input_ids=ids, output_hidden_states=True)
                out.logits.square().mean().backward()
            assert len(out.hidden_states) == config.num_hidden_layers + 1
            model.zero_grad()
