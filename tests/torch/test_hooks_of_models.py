"""Hooks on models: those that a model hangs on itself, and those of a job when it is copied."""

import copy
import io

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from tests.torch.nets import Mlp, rows, stack
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


@pytest.mark.parametrize("policy", ["keep_all", "recompute_all", "swap_all"])
def test_a_model_can_be_saved_whole_while_a_job_is_open(policy: str) -> None:
    """What is loaded runs as a plain model, and knows nothing of the job."""
    model, x, file = stack(Mlp), rows(), io.BytesIO()
    with fitted(model, policy) as job:
        for _ in range(4):
            with job.step():
                model(x).sum().backward()
            model.zero_grad()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        with job.step():
            model(x).sum().backward()
            torch.testing.assert_close(loaded.eval()(x), copy.deepcopy(model).eval()(x))
        assert not job.runner.deviation
