"""The built-in jobs, one function each; weights and batches are the same at every call."""

import importlib
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from legroom.core.errors import InputError
from legroom.examples.job import EXAMPLES, Device, Job, MakeBatch
from legroom.examples.models import Decoder, LSTMStack, ResNet, UNet, VisionTransformer


@EXAMPLES.register("transformer")
def transformer(
    device: Device = "cpu",
    *,
    layers: int = 8,
    dim: int = 128,
    heads: int = 4,
    vocab: int = 1024,
    batch: int = 12,
    sequence: int = 256,
    dropout: float = 0.0,
) -> Job:
    """A small pre-norm decoder; `dropout` is on the residuals."""
    model = _build(device, lambda: Decoder(vocab, dim, layers, heads, sequence, dropout))
    return Job(model, _tokens(device, vocab, batch, sequence), _next_token_loss)


@EXAMPLES.register("lstm")
def lstm(
    device: Device = "cpu",
    *,
    layers: int = 3,
    dim: int = 128,
    vocab: int = 512,
    batch: int = 32,
    sequence: int = 64,
) -> Job:
    """A small language model of LSTM layers."""
    model = _build(device, lambda: LSTMStack(vocab, dim, layers))
    return Job(model, _tokens(device, vocab, batch, sequence), _next_token_loss)


@EXAMPLES.register("mlp")
def mlp(device: Device = "cpu", *, layers: int = 12, dim: int = 256, batch: int = 8192) -> Job:
    """Linear layers and GELUs on wide batches."""

    def make() -> nn.Module:
        hidden = [nn.Sequential(nn.Linear(dim, dim), nn.GELU()) for _ in range(layers)]
        return nn.Sequential(*hidden, nn.Linear(dim, 10))

    return Job(_build(device, make), _labelled(device, (batch, dim), 10, (batch,)), _class_loss)


@EXAMPLES.register("convnet")
def convnet(
    device: Device = "cpu",
    *,
    layers: tuple[int, ...] = (2, 3, 2),
    width: int = 16,
    batch: int = 64,
    image: int = 96,
) -> Job:
    """A small bottleneck ResNet with batch norm and ReLUs in place."""
    model = _build(device, lambda: ResNet(layers, width, 10))
    return Job(model, _labelled(device, (batch, 3, image, image), 10, (batch,)), _class_loss)


@EXAMPLES.register("unet")
def unet(
    device: Device = "cpu", *, width: int = 8, depth: int = 3, batch: int = 16, image: int = 96
) -> Job:
    """A small U-Net that labels each pixel."""
    model = _build(device, lambda: UNet(width, depth, 4))
    labels = (batch, image, image)
    return Job(model, _labelled(device, (batch, 3, image, image), 4, labels), _class_loss)


@EXAMPLES.register("unet-512")
def unet_512(
    device: Device = "cpu", *, width: int = 64, depth: int = 4, batch: int = 16, image: int = 512
) -> Job:
    """The U-Net as published, on images of 512 x 512: channels last, bfloat16 autocast."""
    model = _build(device, lambda: _channels_last(UNet(width, depth, 21)))
    return Job(model, _photos(device, batch, image, 21, dense=True), _autocast_class_loss)


@EXAMPLES.register("resnet50")
def resnet50(device: Device = "cpu", *, batch: int = 256, image: int = 224) -> Job:
    """ResNet-50 on ImageNet shapes: channels last, bfloat16 autocast."""
    return _imagenet((3, 4, 6, 3), device, batch, image)


@EXAMPLES.register("resnet152")
def resnet152(device: Device = "cpu", *, batch: int = 256, image: int = 224) -> Job:
    """ResNet-152 on ImageNet shapes: channels last, bfloat16 autocast."""
    return _imagenet((3, 8, 36, 3), device, batch, image)


@EXAMPLES.register("vit-l16")
def vit_l16(
    device: Device = "cpu",
    *,
    layers: int = 24,
    dim: int = 1024,
    heads: int = 16,
    batch: int = 128,
    image: int = 224,
) -> Job:
    """ViT-L/16 on ImageNet shapes, in bfloat16 autocast."""
    model = _build(device, lambda: VisionTransformer(image, 16, dim, layers, heads, 1000))
    make_batch = _labelled(device, (batch, 3, image, image), 1000, (batch,))
    return Job(model, make_batch, _autocast_class_loss)


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
    model = _build(device, lambda: lib.GPT2LMHeadModel(config))
    return Job(model, _tokens(device, config.vocab_size, batch, sequence), _own_loss)


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
    config = _transformers("gpt2-large").GPT2Config(
        vocab_size=vocab,
        n_layer=layers,
        n_embd=dim,
        n_head=heads,
        n_positions=sequence,
        use_cache=False,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout),
    )
    return _language_model(device, config, batch, sequence)


# -- models on their device ----------------------------------------------------------------------


def _build(device: Device, make: Callable[[], nn.Module]) -> nn.Module:
    """The model, made on its device: always the same weights, and the global RNG untouched."""
    on_cuda = torch.device(device).type == "cuda"
    seed = torch.manual_seed if on_cuda else torch.default_generator.manual_seed
    with torch.random.fork_rng(devices=[device] if on_cuda else []), torch.device(device):
        seed(0)
        return make()


def _imagenet(layers: tuple[int, ...], device: Device, batch: int, image: int) -> Job:
    model = _build(device, lambda: _channels_last(ResNet(layers, 64, 1000)))
    return Job(model, _photos(device, batch, image, 1000), _autocast_class_loss)


def _channels_last(model: nn.Module) -> nn.Module:
    """The model with its filters laid out by channel; `Module.to` cannot do so to fake tensors."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
            weight = module.weight.detach().contiguous(memory_format=torch.channels_last)
            module.weight = nn.Parameter(weight)
    return model


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
    model = _build(device, lambda: make(config, dtype=dtype))
    return Job(model.train(), _tokens(device, config.vocab_size, batch, sequence), _own_loss)


def _transformers(name: str) -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise InputError(
            f"example {name!r} needs transformers: pip install 'legroom[transformers]'"
        ) from error


# -- batches -------------------------------------------------------------------------------------


def _tokens(device: Device, vocab: int, batch: int, sequence: int) -> MakeBatch:
    def make_batch(seed: int = 0) -> dict[str, Tensor]:
        tokens = _integers(device, seed, vocab, (batch, sequence))
        return {"input_ids": tokens, "labels": tokens.clone()}

    return make_batch


def _labelled(
    device: Device, shape: tuple[int, ...], classes: int, label_shape: tuple[int, ...]
) -> MakeBatch:
    def make_batch(seed: int = 0) -> tuple[Tensor, Tensor]:
        labels = _integers(device, seed + 1, classes, label_shape)
        if torch.device(device).type == "meta":
            return torch.empty(shape, device=device), labels
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(shape, generator=generator, device="cpu").to(device), labels

    return make_batch


def _photos(device: Device, batch: int, image: int, classes: int, dense: bool = False) -> MakeBatch:
    """Images by channel with a label each, or one per pixel if `dense`."""
    labels = (batch, image, image) if dense else (batch,)
    make = _labelled(device, (batch, 3, image, image), classes, labels)

    def make_batch(seed: int = 0) -> tuple[Tensor, Tensor]:
        images, labels = make(seed)
        return images.contiguous(memory_format=torch.channels_last), labels

    return make_batch


def _integers(device: Device, seed: int, high: int, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(high, shape, generator=generator, device="cpu").to(device)


# -- losses --------------------------------------------------------------------------------------


def _own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def _next_token_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits, labels = model(batch["input_ids"]), batch["labels"].roll(-1, 1)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _class_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def _autocast_class_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    kind = images.device.type
    with nullcontext() if kind == "meta" else torch.autocast(kind, torch.bfloat16):
        logits = model(images)
    return F.cross_entropy(logits.float(), labels)
