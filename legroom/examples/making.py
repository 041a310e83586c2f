"""What built-in jobs are made with: a model on its device, batches and losses."""

from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from legroom.examples.job import Device, MakeBatch


def build(device: Device, make: Callable[[], nn.Module]) -> nn.Module:
    """The model, made on its device: always the same weights, and the global RNG untouched."""
    on_cuda = torch.device(device).type == "cuda"
    seed = torch.manual_seed if on_cuda else torch.default_generator.manual_seed
    with torch.random.fork_rng(devices=[device] if on_cuda else []), torch.device(device):
        seed(0)
        return make()


def channels_last(model: nn.Module) -> nn.Module:
    """The model with its filters laid out by channel; `Module.to` cannot do so to fake tensors."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
            weight = module.weight.detach().contiguous(memory_format=torch.channels_last)
            module.weight = nn.Parameter(weight)
    return model


# -- batches -------------------------------------------------------------------------------------


def tokens(device: Device, vocab: int, batch: int, sequence: int) -> MakeBatch:
    """Tokens, which are their own labels."""

    def make_batch(seed: int = 0) -> dict[str, Tensor]:
        tokens = integers(device, seed, vocab, (batch, sequence))
        return {"input_ids": tokens, "labels": tokens.clone()}

    return make_batch


def labelled(
    device: Device, shape: tuple[int, ...], classes: int, label_shape: tuple[int, ...]
) -> MakeBatch:
    """Random numbers in this shape, and labels in another."""

    def make_batch(seed: int = 0) -> tuple[Tensor, Tensor]:
        labels = integers(device, seed + 1, classes, label_shape)
        if torch.device(device).type == "meta":
            return torch.empty(shape, device=device), labels
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(shape, generator=generator, device="cpu").to(device), labels

    return make_batch


def photos(device: Device, batch: int, image: int, classes: int, dense: bool = False) -> MakeBatch:
    """Images by channel with a label each, or one per pixel if `dense`."""
    labels = (batch, image, image) if dense else (batch,)
    make = labelled(device, (batch, 3, image, image), classes, labels)

    def make_batch(seed: int = 0) -> tuple[Tensor, Tensor]:
        images, labels = make(seed)
        return images.contiguous(memory_format=torch.channels_last), labels

    return make_batch


def integers(device: Device, seed: int, high: int, shape: tuple[int, ...]) -> Tensor:
    """Integers below `high`, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(high, shape, generator=generator, device="cpu").to(device)


# -- losses --------------------------------------------------------------------------------------


def next_token_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The loss of predicting each next token."""
    logits, labels = model(batch["input_ids"]), batch["labels"].roll(-1, 1)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def class_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The loss of a classifier."""
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def autocast_class_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The same, with the model in bfloat16 autocast."""
    images, labels = batch
    kind = images.device.type
    with nullcontext() if kind == "meta" else torch.autocast(kind, torch.bfloat16):
        logits = model(images)
    return F.cross_entropy(logits.float(), labels)
