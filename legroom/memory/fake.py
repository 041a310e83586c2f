"""Fake tensors for a capture: shapes without memory, and saved tensors that let go.

Small indices and masks keep real values, so that a model which looks at them to choose its way
takes the same way as in the real step.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_leaves

from legroom.machine.spec import Machine
from legroom.memory.recorder import Recorder
from legroom.memory.saved import ViewOf


def fake_device(machine: Machine) -> torch.device:
    """Where fake tensors pretend to be: a build without CUDA cannot run fake CUDA backward."""
    cuda = machine.device == "cuda" and torch.cuda.is_available()
    return torch.device("cuda" if cuda else "cpu")


def fake_weights(model: nn.Module, device: torch.device) -> dict[str, Tensor]:
    """A fake tensor for each parameter and buffer."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    return {name: _fake_like(t, device) for name, t in tensors}


def with_weights(
    model: nn.Module, weights: dict[str, Tensor]
) -> contextlib.AbstractContextManager[None]:
    """Other tensors in place of a model's parameters and buffers, tied as those are."""
    return _reparametrize_module(model, weights, tie_weights=True, stack_weights=True)


def _fake_like(tensor: Tensor, device: torch.device) -> Tensor:
    """A fake tensor of the same form; leaves on the CPU what a CUDA model keeps on the CPU."""
    stays = tensor.device.type == "cpu" and tensor.dim() == 0
    fake = torch.empty_strided(
        tensor.size(),
        tensor.stride(),
        dtype=tensor.dtype,
        device="cpu" if stays else device,
    )
    return fake.requires_grad_(tensor.requires_grad)


MOST_TRIED_BYTES = 256 << 20
"""An op is run to see what it keeps, if that is not more."""
SMALL_INDEX_BYTES = 1 << 20


def fake_input(tensor: Tensor, device: torch.device) -> Tensor:
    """A batch tensor for the capture: small indices and masks keep their values."""
    if tensor.is_meta or tensor.is_floating_point() or tensor.is_complex():
        return _fake_like(tensor, device)
    if tensor.nbytes > SMALL_INDEX_BYTES:
        return _fake_like(tensor, device)
    with unset_fake_temporarily():
        return tensor.detach().to(device, copy=True)


def run_small_for_real(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op on fake tensors, or for real where it makes small indices from real ones.

    Models look at positions and masks to choose their way (is anything padded?); with real
    values there, the capture takes the way the real step takes.
    """
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    random = torch.Tag.nondeterministic_seeded in func.tags
    if random or any(isinstance(x, FakeTensor) for x in tensors):
        return _as_in_truth(func, args, func(*args, **kwargs))
    makes_tensors = any("Tensor" in str(r.type) for r in func._schema.returns)
    if makes_tensors and not func._schema.is_mutable:
        fake = func(*args, **kwargs)
        results = [x for x in tree_leaves(fake) if isinstance(x, Tensor)]
        if not all(_is_small_index(x) for x in results):
            return fake
    with unset_fake_temporarily():
        return func(*args, **kwargs)


def _as_in_truth(func: Any, args: tuple[Any, ...], results: Any) -> Any:
    """Mend what fake tensors do not know of an op's results."""
    if func is torch.ops.aten.native_batch_norm.default and args[1] is not None:
        # With halves as input and float weights, statistics are kept as floats.
        return (results[0], *(x.to(args[1].dtype) for x in results[1:]))
    if func is torch.ops.aten.mkldnn_rnn_layer_backward.default:
        # Both biases get one gradient, which torch's cache of fake results forgets.
        return (*results[:4], results[3], *results[5:])
    if func is torch.ops.aten.mkldnn_rnn_layer.default and results[3].numel() == 0:
        return (*results[:3], results[3].new_empty(_kept_by_lstm(func, args, results[0])))
    return results


def _kept_by_lstm(func: Any, args: tuple[Any, ...], output: Tensor) -> int:
    """What a layer of LSTM on a CPU keeps for its backward.

    It is asked, unless it is large; then that is four gates, and eleven times the states, six of
    them gradients in float32.
    """
    states = output.numel() + output[0].numel()
    about = int(4 * output.nbytes + 1.02 * states * (5 * output.itemsize + 6 * 4))
    if about > MOST_TRIED_BYTES:
        return about
    with unset_fake_temporarily(), torch.enable_grad():  # without, it keeps nothing
        real = [_zeros_like(x) if isinstance(x, Tensor) else x for x in args]
        return int(func(*real)[3].numel())


def _zeros_like(fake: Tensor) -> Tensor:
    return torch.zeros(fake.shape, dtype=fake.dtype)


def _is_small_index(tensor: Tensor) -> bool:
    exact = not tensor.is_floating_point() and not tensor.is_complex() and not tensor.is_meta
    return exact and tensor.numel() * tensor.itemsize <= SMALL_INDEX_BYTES


@dataclass
class _Return:
    """A storage on its way through backward: held until its last saved tensor was asked for."""

    sid: int
    num_bytes: int
    waiting: set[int]
    flat: Tensor | None = None


@dataclass
class _Packed:
    """What autograd holds for a saved tensor."""

    row: int
    view: ViewOf


@contextlib.contextmanager
def fake_hooks(recorder: Recorder) -> Iterator[None]:
    """Let go of every saved tensor, and hand out new bytes when backward asks for it.

    So the trace shows where the bytes would be free, and when they must be back.
    """
    returns: dict[int, _Return] = {}

    def pack(tensor: Tensor) -> Any:
        row = recorder.pack(tensor)
        if row < 0:
            return tensor
        sid = recorder.saved[row].storage
        size = tensor.untyped_storage().nbytes()
        returns.setdefault(sid, _Return(sid, size, set())).waiting.add(row)
        packed = _Packed(row, ViewOf.of(tensor))
        recorder.watch_saved(packed, row)
        return packed

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        row, view = packed.row, packed.view
        recorder.unpack(row)
        back = returns[recorder.saved[row].storage]
        recorder.paused = True
        try:
            if back.flat is None:
                back.flat = torch.empty(back.num_bytes, dtype=torch.uint8, device=recorder.device)
                recorder.adopt(back.flat, back.sid)
            back.waiting.discard(row)
            tensor: Tensor = view.on(back.flat)
            if not back.waiting:
                back.flat = None
        finally:
            recorder.paused = False
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
