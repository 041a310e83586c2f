"""Fewer bits while stored: masks as bits, exactly; floats as bf16 or scaled fp8, with loss."""

from dataclasses import dataclass

import torch
from torch import Tensor

FP8_MAX = 448.0


@dataclass(frozen=True)
class Packed:
    """A storage in a codec, with what it takes to unpack it."""

    codec: str
    data: Tensor
    dtype: torch.dtype
    numel: int
    scale: Tensor | None = None


def encode(codec: str, flat: Tensor, dtype: torch.dtype) -> Packed:
    """Compress a whole storage, given as flat bytes that hold elements of `dtype`."""
    values = flat[: flat.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
    if codec == "bits":
        return Packed(codec, _to_bits(values), dtype, values.numel())
    if codec == "bf16":
        return Packed(codec, values.to(torch.bfloat16), dtype, values.numel())
    assert codec == "fp8", codec
    top = (
        values.abs()
        .nan_to_num(0.0, 0.0, 0.0)
        .amax()
        .float()
        .clamp_min(torch.finfo(torch.float32).tiny)
    )
    scale = top / FP8_MAX
    return Packed(codec, (values / scale).to(torch.float8_e4m3fn), dtype, values.numel(), scale)


def decode(packed: Packed, num_bytes: int) -> Tensor:
    """The storage again, as flat bytes."""
    flat = torch.empty(num_bytes, dtype=torch.uint8, device=packed.data.device)
    values = flat[: packed.numel * packed.dtype.itemsize].view(packed.dtype)
    if packed.codec == "bits":
        values.copy_(_from_bits(packed.data, packed.numel))
    elif packed.scale is None:
        values.copy_(packed.data)
    else:
        values.copy_(packed.data.to(torch.float32).mul_(packed.scale))
    return flat


def _weights(device: torch.device) -> Tensor:
    return torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=device)


def _to_bits(values: Tensor) -> Tensor:
    rest = -values.numel() % 8
    padded = torch.nn.functional.pad(values.to(torch.uint8), (0, rest)).view(-1, 8)
    return (padded * _weights(values.device)).sum(1, dtype=torch.uint8)


def _from_bits(bits: Tensor, numel: int) -> Tensor:
    spread = bits.unsqueeze(1).bitwise_and(_weights(bits.device)).ne(0)
    return spread.view(-1)[:numel]
