"""Fewer bits while stored: masks as bits, exactly; floats as bf16 or scaled fp8, with loss."""

from dataclasses import dataclass

import torch
from torch import Tensor

FP8_MAX = 448.0
NUM_PIECES, LEAST_PIECE = 16, 4096


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
    if codec == "bf16":
        return Packed(codec, values.to(torch.bfloat16), dtype, values.numel())
    if codec == "bits":
        bits = torch.empty(-(-values.numel() // 8), dtype=torch.uint8, device=values.device)
        for part in pieces(values.numel()):
            bits[part.start // 8 : -(-part.stop // 8)] = _to_bits(values[part])
        return Packed(codec, bits, dtype, values.numel())
    assert codec == "fp8", codec
    least = torch.finfo(torch.float32).tiny
    tops = [values[p].abs().nan_to_num_(0.0, 0.0, 0.0).amax() for p in pieces(values.numel())]
    scale = torch.stack(tops).amax().float().clamp_min(least) / FP8_MAX
    small = torch.empty(values.numel(), dtype=torch.float8_e4m3fn, device=values.device)
    for part in pieces(values.numel()):
        small[part] = (values[part] / scale).to(torch.float8_e4m3fn)
    return Packed(codec, small, dtype, values.numel(), scale)


def decode(packed: Packed, num_bytes: int) -> Tensor:
    """The storage again, as flat bytes."""
    flat = torch.empty(num_bytes, dtype=torch.uint8, device=packed.data.device)
    values = flat[: packed.numel * packed.dtype.itemsize].view(packed.dtype)
    if packed.codec == "bf16":
        values.copy_(packed.data)
        return flat
    for part in pieces(packed.numel):
        if packed.codec == "bits":
            bits = packed.data[part.start // 8 : -(-part.stop // 8)]
            values[part] = _from_bits(bits, part.stop - part.start)
        else:
            assert packed.scale is not None
            values[part] = packed.data[part].to(torch.float32).mul_(packed.scale).to(values.dtype)
    return flat


def pieces(numel: int) -> list[slice]:
    """All elements in a few pieces of whole bytes of bits: scratch is made for one at a time."""
    size = max(-(-numel // NUM_PIECES) // 8 * 8 + 8, LEAST_PIECE)
    return [slice(a, min(a + size, numel)) for a in range(0, numel, size)]


def _weights(device: torch.device) -> Tensor:
    return torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=device)


def _to_bits(values: Tensor) -> Tensor:
    rest = -values.numel() % 8
    padded = torch.nn.functional.pad(values.to(torch.uint8), (0, rest)).view(-1, 8)
    return (padded * _weights(values.device)).sum(1, dtype=torch.uint8)


def _from_bits(bits: Tensor, numel: int) -> Tensor:
    spread = bits.unsqueeze(1).bitwise_and(_weights(bits.device)).ne(0)
    return spread.view(-1)[:numel]
