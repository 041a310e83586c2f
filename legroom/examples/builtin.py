"""The built-in jobs with models of our own; weights and batches are the same at every call."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from legroom.examples.convnets import DenseNet, Inception, Vgg
from legroom.examples.job import EXAMPLES, Device, Job
from legroom.examples.making import (
    autocast_class_loss,
    build,
    channels_last,
    class_loss,
    integers,
    labelled,
    next_token_loss,
    photos,
    tokens,
)
from legroom.examples.models import Decoder, LSTMStack, ResNet, UNet, VisionTransformer
from legroom.examples.ranking import NUM_NUMBERS, Ranker
from legroom.examples.translation import Translator


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
    model = build(device, lambda: Decoder(vocab, dim, layers, heads, sequence, dropout))
    return Job(model, tokens(device, vocab, batch, sequence), next_token_loss)


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
    model = build(device, lambda: LSTMStack(vocab, dim, layers))
    return Job(model, tokens(device, vocab, batch, sequence), next_token_loss)


@EXAMPLES.register("mlp")
def mlp(device: Device = "cpu", *, layers: int = 12, dim: int = 256, batch: int = 8192) -> Job:
    """Linear layers and GELUs on wide batches."""

    def make() -> nn.Module:
        hidden = [nn.Sequential(nn.Linear(dim, dim), nn.GELU()) for _ in range(layers)]
        return nn.Sequential(*hidden, nn.Linear(dim, 10))

    return Job(build(device, make), labelled(device, (batch, dim), 10, (batch,)), class_loss)


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
    model = build(device, lambda: ResNet(layers, width, 10))
    return Job(model, labelled(device, (batch, 3, image, image), 10, (batch,)), class_loss)


@EXAMPLES.register("unet")
def unet(
    device: Device = "cpu", *, width: int = 8, depth: int = 3, batch: int = 16, image: int = 96
) -> Job:
    """A small U-Net that labels each pixel."""
    model = build(device, lambda: UNet(width, depth, 4))
    labels = (batch, image, image)
    return Job(model, labelled(device, (batch, 3, image, image), 4, labels), class_loss)


@EXAMPLES.register("unet-512")
def unet_512(
    device: Device = "cpu", *, width: int = 64, depth: int = 4, batch: int = 16, image: int = 512
) -> Job:
    """The U-Net as published, on images of 512 x 512: channels last, bfloat16 autocast."""
    model = build(device, lambda: channels_last(UNet(width, depth, 21)))
    return Job(model, photos(device, batch, image, 21, dense=True), autocast_class_loss)


@EXAMPLES.register("resnet50")
def resnet50(device: Device = "cpu", *, batch: int = 256, image: int = 224) -> Job:
    """ResNet-50 on ImageNet shapes: channels last, bfloat16 autocast."""
    return _imagenet((3, 4, 6, 3), device, batch, image)


@EXAMPLES.register("resnet152")
def resnet152(device: Device = "cpu", *, batch: int = 256, image: int = 224) -> Job:
    """ResNet-152 on ImageNet shapes: channels last, bfloat16 autocast."""
    return _imagenet((3, 8, 36, 3), device, batch, image)


@EXAMPLES.register("resnet200")
def resnet200(device: Device = "cpu", *, batch: int = 128, image: int = 224) -> Job:
    """ResNet-200 on ImageNet shapes: channels last, bfloat16 autocast."""
    return _imagenet((3, 24, 36, 3), device, batch, image)


@EXAMPLES.register("vgg16")
def vgg16(device: Device = "cpu", *, batch: int = 256, image: int = 224) -> Job:
    """VGG-16 on ImageNet shapes: channels last, bfloat16 autocast."""
    return _photo_classifier(lambda: Vgg((2, 2, 3, 3, 3), 1000), device, batch, image)


@EXAMPLES.register("inception")
def inception(device: Device = "cpu", *, batch: int = 256, image: int = 299) -> Job:
    """Inception-v3 without its second classifier: channels last, bfloat16 autocast."""
    return _photo_classifier(lambda: Inception(1000), device, batch, image)


@EXAMPLES.register("densenet")
def densenet(
    device: Device = "cpu",
    *,
    layers: tuple[int, ...] = (6, 12, 24, 16),
    growth: int = 32,
    batch: int = 256,
    image: int = 224,
) -> Job:
    """DenseNet-121 on ImageNet shapes: channels last, bfloat16 autocast."""
    return _photo_classifier(lambda: DenseNet(layers, growth, 1000), device, batch, image)


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
    model = build(device, lambda: VisionTransformer(image, 16, dim, layers, heads, 1000))
    make_batch = labelled(device, (batch, 3, image, image), 1000, (batch,))
    return Job(model, make_batch, autocast_class_loss)


@EXAMPLES.register("seq2seq")
def seq2seq(
    device: Device = "cpu",
    *,
    layers: int = 4,
    dim: int = 1024,
    vocab: int = 32000,
    batch: int = 128,
    sequence: int = 50,
    dropout: float = 0.2,
) -> Job:
    """A translator of LSTM layers with attention, in the shapes of GNMT, in float32."""
    model = build(device, lambda: Translator(vocab, dim, layers, dropout))

    def make_batch(seed: int = 0) -> tuple[Tensor, Tensor]:
        source = integers(device, seed, vocab, (batch, sequence))
        return source, integers(device, seed + 1, vocab, (batch, sequence))

    return Job(model, make_batch, _translation_loss)


@EXAMPLES.register("dlrm")
def dlrm(
    device: Device = "cpu",
    *,
    tables: int = 26,
    rows: int = 100_000,
    dim: int = 128,
    picks: int = 8,
    batch: int = 65536,
) -> Job:
    """A recommender in the shapes of DLRM on Criteo's data, with small tables, in float32."""
    model = build(device, lambda: Ranker(tables, rows, dim))

    def make_batch(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        numbers, clicks = labelled(device, (batch, NUM_NUMBERS), 2, (batch,))(seed)
        return numbers, integers(device, seed + 2, rows, (tables, batch, picks)), clicks

    return Job(model, make_batch, _click_loss)


def _imagenet(layers: tuple[int, ...], device: Device, batch: int, image: int) -> Job:
    return _photo_classifier(lambda: ResNet(layers, 64, 1000), device, batch, image)


def _photo_classifier(make: Callable[[], nn.Module], device: Device, batch: int, image: int) -> Job:
    model = build(device, lambda: channels_last(make()))
    return Job(model, photos(device, batch, image, 1000), autocast_class_loss)


def _translation_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    source, target = batch
    logits = model(source, target[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten())


def _click_loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    numbers, rows, clicks = batch
    return F.binary_cross_entropy_with_logits(model(numbers, rows), clicks.float())
