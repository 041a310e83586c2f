"""Samples: calls of blocks as a step made them, held without their device memory."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map

from legroom.memory.mechanisms.recompute import Autocast, autocast_state
from legroom.memory.saved import ViewOf, flat_bytes, has_storage


class Given(NamedTuple):
    """An argument that wants no gradient, with its numbers: in host memory until a trial."""

    view: ViewOf
    flat: Tensor
    device: torch.device

    @property
    def size(self) -> torch.Size:
        """Of the tensor."""
        return self.view.size

    def tensor(self) -> Tensor:
        """The tensor again."""
        return self.view.on(self.flat.to(self.device, copy=True))


class Like(NamedTuple):
    """Stands for an argument whose numbers do not matter: it wants a gradient, or is fake."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    wants_grad: bool = True

    def tensor(self) -> Tensor:
        """A tensor of this form."""
        made = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)
        return made.normal_().requires_grad_() if self.wants_grad else made


@dataclass(frozen=True)
class Sample:
    """One call of a block as a step made it."""

    name: str
    module: nn.Module
    args: Any
    """(args, kwargs), each tensor as a Like or a Given."""
    autocast: Autocast

    @classmethod
    def take(cls, name: str, module: nn.Module, args: Any, device: torch.device) -> "Sample":
        """Of a call that is about to run."""
        return cls(name, module, tree_map(_stand_in, args), autocast_state(device))

    def inputs(self) -> Any:
        """(args, kwargs) again, with other numbers where gradients flow."""
        return tree_map(
            lambda x: x.tensor() if isinstance(x, Like | Given) else x,
            self.args,
            is_leaf=lambda x: isinstance(x, Like | Given),
        )

    @contextlib.contextmanager
    def casting(self) -> Iterator[None]:
        """Autocast as in the step."""
        with contextlib.ExitStack() as stack:
            for kind, enabled, dtype, cached in self.autocast:
                cast = torch.autocast(kind, dtype, enabled=enabled, cache_enabled=cached)
                stack.enter_context(cast)
            yield


def _stand_in(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    if not leaf.requires_grad and has_storage(leaf) and not isinstance(leaf, FakeTensor):
        return Given(ViewOf.of(leaf), flat_bytes(leaf).to("cpu", copy=True), leaf.device)
    return Like(leaf.size(), leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad)
