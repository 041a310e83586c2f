"""Causal language models of transformers with their loss in chunks, and nothing else changed."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

import legroom
from legroom.core.errors import InputError
from legroom.memory.timers import memory_reports, reports_peak
from legroom.nn import chunk_head
from tests.torch.support import GIB, MACHINE

WORDS = 503


def llama(**given: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=3,
            num_attention_heads=2, num_key_value_heads=2, use_cache=False, **given,
        )
    )  # fmt: skip


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=WORDS, n_embd=32, n_layer=2, n_head=2, use_cache=False, **drop)
    )


def ids(rows: int = 4, length: int = 20) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randint(0, WORDS, (rows, length))


def grads(model: nn.Module, **given: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Loss and gradients."""
    model.zero_grad()
    loss = model(**given).loss
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("make", [llama, gpt2], ids=["llama", "gpt2, tied weights"])
@pytest.mark.parametrize("items", [None, 55])
def test_loss_and_gradients_are_those_of_the_model(make: Any, items: int | None) -> None:
    """With masked labels, and with the number of items a Trainer counts over micro-batches."""
    model, x = make(), ids()
    labels = x.masked_fill(x % 7 == 0, -100)
    given = {"input_ids": x, "labels": labels}
    given |= {} if items is None else {"num_items_in_batch": torch.tensor(items)}
    plain = grads(model, **given)
    head = chunk_head(model, chunks=5)
    mine = grads(model, **given)
    torch.testing.assert_close(mine, plain, rtol=1e-5, atol=1e-6)
    head.remove()
    assert all(torch.equal(a, b) for a, b in zip(grads(model, **given)[1], plain[1], strict=True))


def test_logits_are_made_for_who_looks_at_them() -> None:
    """By method, by function, by item and by operator; once."""
    model, x = llama().eval(), ids()
    plain = model(input_ids=x).logits
    chunk_head(model)
    out = model(input_ids=x, labels=x)
    assert out.logits.shape == plain.shape
    assert torch.equal(out.logits.argmax(-1), plain.argmax(-1))
    assert torch.equal(torch.softmax(out.logits, -1), torch.softmax(plain, -1))
    assert torch.equal(out.logits[:, -1], plain[:, -1])
    assert torch.equal(out.logits / 2, plain / 2) and torch.equal(1 / out.logits, 1 / plain)
    assert torch.equal(out.logits**2, plain**2) and bool((out.logits >= plain).all())
    assert torch.equal(torch.cat([out.logits, out.logits]), torch.cat([plain, plain]))
    assert out.logits.make() is out.logits.make()
    again = model.generate(x[:1], max_new_tokens=3, do_sample=False)
    assert again.shape[1] == x.shape[1] + 3


@pytest.mark.parametrize("cast", [False, True])
def test_form_and_dtype_are_told_without_making_them(cast: bool) -> None:
    """As the model's own have them; and made later, they are cast as they were to be."""
    model, x = llama(), ids()
    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        plain = model(input_ids=x).logits
        chunk_head(model)
        logits = model(input_ids=x).logits
    assert (logits.dtype, logits.shape, logits.device) == (plain.dtype, plain.shape, plain.device)
    assert logits._made is None and logits.float().dtype == torch.float32
    assert torch.equal(logits.make(), plain)


def test_gradients_flow_through_logits_that_were_looked_at() -> None:
    """A loss of one's own on them is right too."""
    model, x = llama(), ids()
    model(input_ids=x).logits.float().logsumexp(-1).mean().backward()
    plain = model.lm_head.weight.grad.clone()
    model.zero_grad()
    chunk_head(model)
    model(input_ids=x).logits.float().logsumexp(-1).mean().backward()
    assert torch.equal(model.lm_head.weight.grad, plain)


def test_models_that_change_their_logits_are_left_as_they_are() -> None:
    """Their loss gets logits in full, capped as they should be."""
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=WORDS, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, use_cache=False,
    )  # fmt: skip
    model, x = Gemma2ForCausalLM(config), ids()
    plain = grads(model, input_ids=x, labels=x)
    chunk_head(model)
    torch.testing.assert_close(grads(model, input_ids=x, labels=x), plain)


def test_logits_of_old_weights_are_not_made_from_new_ones() -> None:
    """After the update they cannot be had any more, and say so."""
    model, x = llama(), ids()
    chunk_head(model)
    out = model(input_ids=x, labels=x)
    out.loss.backward()
    torch.optim.SGD(model.parameters(), 1.0).step()
    with pytest.raises(RuntimeError, match="before optimizer.step"):
        out.logits.argmax()


def test_an_evaluation_gets_tensors() -> None:
    """What gathers logits over batches wants nothing else."""
    model, x = llama().eval(), ids()
    chunk_head(model)
    with torch.no_grad():
        out = model(input_ids=x, labels=x)
    assert isinstance(out.logits, torch.Tensor)


def test_float_gives_float32() -> None:
    """For a model in bfloat16 as well."""
    model, x = llama().bfloat16(), ids()
    chunk_head(model)
    logits = model(input_ids=x).logits
    assert logits.dtype == torch.bfloat16 and logits.float().softmax(-1).dtype == torch.float32


def test_the_peak_falls() -> None:
    """The logits, their float32 copy and their gradients are never there at once."""
    model, x = llama(), ids(16, 128)
    peaks = []
    for chunks in (0, 8):
        if chunks:
            chunk_head(model, chunks)
        reports: list[tuple[int, int]] = []
        model.zero_grad(set_to_none=True)
        with memory_reports(reports):
            model(input_ids=x, labels=x).loss.backward()
        peaks.append(reports_peak(reports))
    logits = 16 * 128 * WORDS * 4
    assert peaks[0] - peaks[1] > logits


def test_it_goes_with_a_budget() -> None:
    """Planned, a step gives bit for bit what it gives unplanned."""
    model, x = llama(), ids(8, 64)
    chunk_head(model, chunks=4)
    natural = legroom.estimate(model, {"input_ids": x, "labels": x}, machine=MACHINE)
    budget = {"device": int(natural.device_bytes * 0.7), "disk": GIB, "host": GIB}
    with legroom.fit(model, budget=budget, machine=MACHINE) as job:
        for _ in range(4):
            model.zero_grad()
            with job.step():
                model(input_ids=x, labels=x).loss.backward()
        verdict = job.verify(lambda: model(input_ids=x, labels=x).loss)
        assert job.current is not None and job.current.plan.actions and verdict.identical


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (nn.Linear(2, 2), "not a model of transformers"),
        (BertForMaskedLM(BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1,
                                    num_attention_heads=2, intermediate_size=32)), "loss"),
    ],
)  # fmt: skip
def test_other_models_are_refused(model: nn.Module, says: str) -> None:
    """By what is different about them."""
    with pytest.raises(InputError, match=says):
        chunk_head(model)


def test_it_is_found_by_its_name() -> None:
    """With no import but that of legroom."""
    code = "import legroom; print(legroom.nn.chunk_head.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "chunk_head"


def test_a_head_is_not_chunked_twice_or_into_nothing() -> None:
    """Both are mistakes."""
    model = llama()
    with pytest.raises(InputError, match="chunks is 0"):
        chunk_head(model, chunks=0)
    chunk_head(model)
    with pytest.raises(InputError):
        chunk_head(model)
