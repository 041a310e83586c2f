"""The built-in jobs with models of transformers, with random weights; nothing is downloaded."""

import importlib
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from legroom.core.errors import InputError
from legroom.examples.job import EXAMPLES, Device, Job, MakeBatch
from legroom.examples.making import build, integers, tokens

HIDDEN = 0
"""What stands in place of a hidden token: the vocabulary is nobody's, so any will do."""
UNASKED = -100
"""The label of a token that is not to be guessed, for the loss of transformers."""


@EXAMPLES.register("llama-tiny")
def llama_tiny(
    device: Device = "cpu",
    *,
    layers: int = 4,
    dim: int = 128,
    heads: int = 4,
    vocab: int = 1024,
    batch: int = 8,
    sequence: int = 128,
) -> Job:
    """The Llama of transformers, very small, in float32."""
    return _llama(
        device,
        torch.float32,
        layers=layers,
        dim=dim,
        heads=heads,
        vocab=vocab,
        batch=batch,
        sequence=sequence,
    )


@EXAMPLES.register("llama-1b")
def llama_1b(
    device: Device = "cpu",
    *,
    layers: int = 16,
    dim: int = 2048,
    heads: int = 16,
    vocab: int = 32000,
    batch: int = 16,
    sequence: int = 2048,
) -> Job:
    """The Llama of transformers with 0.94 billion parameters, in bfloat16."""
    return _llama(
        device,
        torch.bfloat16,
        layers=layers,
        dim=dim,
        heads=heads,
        vocab=vocab,
        batch=batch,
        sequence=sequence,
    )


@EXAMPLES.register("llama-wide")
def llama_wide(
    device: Device = "cpu",
    *,
    layers: int = 8,
    dim: int = 4096,
    heads: int = 32,
    vocab: int = 32000,
    batch: int = 8,
    sequence: int = 2048,
) -> Job:
    """The Llama of transformers, few and wide layers of the size of the 7B's, in bfloat16."""
    return _llama(
        device,
        torch.bfloat16,
        layers=layers,
        dim=dim,
        heads=heads,
        vocab=vocab,
        batch=batch,
        sequence=sequence,
    )


@EXAMPLES.register("moe")
def moe(
    device: Device = "cpu",
    *,
    layers: int = 12,
    dim: int = 1024,
    heads: int = 16,
    experts: int = 8,
    vocab: int = 32000,
    batch: int = 16,
    sequence: int = 2048,
) -> Job:
    """The Mixtral of transformers, made small: two experts per token, in bfloat16."""
    lib = _transformers("moe")
    config = lib.MixtralConfig(
        vocab_size=vocab,
        hidden_size=dim,
        intermediate_size=int(dim * 2.75) // 16 * 16,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        num_local_experts=experts,
        num_experts_per_tok=2,
        max_position_embeddings=sequence,
        use_cache=False,
    )
    return _language_model(device, config, batch, sequence)


@EXAMPLES.register("gpt2")
def gpt2(device: Device = "cpu", *, layers: int = 12, batch: int = 8, sequence: int = 1024) -> Job:
    """GPT-2 small of transformers, dropout as published, in float32."""
    lib = _transformers("gpt2")
    config = lib.GPT2Config(n_layer=layers, n_positions=sequence, use_cache=False)
    model = build(device, lambda: lib.GPT2LMHeadModel(config))
    return Job(model, tokens(device, config.vocab_size, batch, sequence), _own_loss)


@EXAMPLES.register("gpt2-large")
def gpt2_large(
    device: Device = "cpu",
    *,
    layers: int = 36,
    dim: int = 1280,
    heads: int = 20,
    vocab: int = 50257,
    batch: int = 8,
    sequence: int = 1024,
    dropout: float = 0.0,
) -> Job:
    """GPT-2 large of transformers, in bfloat16.

    Without dropout: torch's own memory budget gets its gradients wrong (pytorch 190758), and a
    comparison is to be among tools that are right.
    """
    config = _transformers("gpt2").GPT2Config(
        vocab_size=vocab,
        n_layer=layers,
        n_embd=dim,
        n_head=heads,
        n_positions=sequence,
        use_cache=False,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout),
    )
    return _language_model(device, config, batch, sequence)


EXAMPLES.register("gpt2-medium")(partial(gpt2_large, layers=24, dim=1024, heads=16))
EXAMPLES.register("gpt2-xl")(partial(gpt2_large, layers=48, dim=1600, heads=25))


@EXAMPLES.register("bert-base")
def bert_base(
    device: Device = "cpu",
    *,
    layers: int = 12,
    dim: int = 768,
    heads: int = 12,
    vocab: int = 30522,
    batch: int = 64,
    sequence: int = 512,
    dropout: float = 0.1,
) -> Job:
    """BERT of transformers, which fills in masked tokens, in bfloat16.

    Its attention is written out, as it was when BERT came: each map of weights is a tensor.
    """
    lib = _transformers("bert")
    config = lib.BertConfig(
        vocab_size=vocab,
        hidden_size=dim,
        intermediate_size=4 * dim,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=sequence,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        attn_implementation="eager",
    )
    make = lib.AutoModelForMaskedLM.from_config
    model = build(device, lambda: make(config, dtype=torch.bfloat16))
    return Job(model.train(), _masked(device, vocab, batch, sequence), _own_loss)


EXAMPLES.register("bert-large")(partial(bert_base, layers=24, dim=1024, heads=16))


def _llama(
    device: Device,
    dtype: torch.dtype,
    *,
    layers: int,
    dim: int,
    heads: int,
    vocab: int,
    batch: int,
    sequence: int,
) -> Job:
    lib = _transformers("llama")
    config = lib.LlamaConfig(
        vocab_size=vocab,
        hidden_size=dim,
        intermediate_size=int(dim * 2.6875) // 128 * 128,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=sequence,
        use_cache=False,
    )
    return _language_model(device, config, batch, sequence, dtype)


def _language_model(
    device: Device, config: Any, batch: int, sequence: int, dtype: torch.dtype = torch.bfloat16
) -> Job:
    """The model of transformers that a configuration describes, with random weights."""
    make = _transformers(config.model_type).AutoModelForCausalLM.from_config
    model = build(device, lambda: make(config, dtype=dtype))
    return Job(model.train(), tokens(device, config.vocab_size, batch, sequence), _own_loss)


def _transformers(name: str) -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise InputError(
            f"example {name!r} needs transformers: pip install 'legroom[transformers]'"
        ) from error


def _masked(device: Device, vocab: int, batch: int, sequence: int) -> MakeBatch:
    """Tokens of which about one in seven is hidden, and is to be guessed."""

    def make_batch(seed: int = 0) -> dict[str, Tensor]:
        tokens = integers("cpu", seed, vocab, (batch, sequence))
        hidden = integers("cpu", seed + 1, 7, (batch, sequence)) == 0
        given, labels = tokens.masked_fill(hidden, HIDDEN), tokens.masked_fill(~hidden, UNASKED)
        return {"input_ids": given.to(device), "labels": labels.to(device)}

    return make_batch


def _own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss
