"""Which storage a tensor lives in, and which saved tensors are ours to act on.

[Note: identity] A storage is known by a weak reference, never by its address alone: addresses are
used again within one step. The table below forgets a storage the moment it dies.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

SMALL_BYTES = 1024
"""Saved storages up to this size are left alone: handling them costs more than they hold."""

T = TypeVar("T")


class StorageTable(Generic[T]):
    """A weak dict from storages to values; an optional callback hears of each death."""

    def __init__(self, on_death: Callable[[T], None] | None = None) -> None:
        self._rows: dict[int, tuple[weakref.ref[torch.UntypedStorage], T]] = {}
        self._on_death = on_death

    def get(self, storage: torch.UntypedStorage) -> T | None:
        """The value filed for this very storage, or None."""
        row = self._rows.get(storage._cdata)
        return row[1] if row is not None else None

    def put(self, storage: torch.UntypedStorage, value: T) -> None:
        """File a value until the storage dies."""
        key = storage._cdata

        def forget(_: object) -> None:
            self._rows.pop(key, None)
            if self._on_death is not None:
                self._on_death(value)

        self._rows[key] = (weakref.ref(storage, forget), value)

    def live(self) -> int:
        """How many storages are still there."""
        return sum(link() is not None for link, _ in self._rows.values())

    def clear(self) -> None:
        """Forget all, quietly."""
        self._rows.clear()

    def __len__(self) -> int:
        return len(self._rows)


def weight_storages(modules: Iterable[nn.Module]) -> StorageTable[bool]:
    """The storages of all parameters and buffers."""
    table: StorageTable[bool] = StorageTable()
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            if has_storage(tensor):
                table.put(tensor.untyped_storage(), True)
    return table


def has_storage(tensor: Tensor) -> bool:
    """Whether the tensor is plain strided memory (not sparse, not a wrapper without bytes)."""
    plain = type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
    there = (plain and not is_wrapped(tensor)) or isinstance(tensor, FakeTensor)
    return there and tensor.layout == torch.strided


def is_wrapped(x: object) -> bool:
    """Whether it is a tensor of a transform of torch.func."""
    return isinstance(x, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(x)


def is_ours(tensor: Tensor, device: torch.device, weights: StorageTable[bool]) -> bool:
    """Whether a saved tensor is an activation on the device, and worth acting on."""
    if type(tensor) is not Tensor and (isinstance(tensor, nn.Parameter) or not has_storage(tensor)):
        return False
    if is_wrapped(tensor):
        return False
    if tensor.device.type != device.type or tensor.layout is not torch.strided:
        return False
    storage = tensor.untyped_storage()
    if storage.nbytes() <= SMALL_BYTES or weights.get(storage) is not None:
        return False
    if tensor.is_conj() or tensor.is_neg():  # a view of the bytes would lose these
        return False
    return not is_weight(tensor)


def is_weight(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter or a view of one, be it of this model or not."""
    base = tensor._base if tensor._is_view() else tensor
    return type(base) is not Tensor and isinstance(base, nn.Parameter)  # the latter is slow


class ViewOf(NamedTuple):
    """How a tensor looks at its storage: dtype, size, stride, offset."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> "ViewOf":
        """The view this tensor takes of its storage."""
        return cls(tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def is_of(self, tensor: Tensor) -> bool:
        """Whether the tensor looks at its storage in this way already."""
        return (
            tensor.dtype == self.dtype
            and tensor.stride() == self.stride
            and tensor.size() == self.size
            and tensor.storage_offset() == self.offset
        )

    def on(self, flat: Tensor) -> Tensor:
        """The same view of other bytes, given as any tensor on the whole of a storage."""
        if self.is_of(flat):
            return flat
        if isinstance(flat, FakeTensor):  # set_ on a fake storage would keep it alive for good
            whole = flat.numel() // self.dtype.itemsize * self.dtype.itemsize
            return flat[:whole].view(self.dtype).as_strided(self.size, self.stride, self.offset)
        empty = torch.empty(0, dtype=self.dtype, device=flat.device)
        return empty.set_(flat.untyped_storage(), self.offset, self.size, self.stride)


def flat_bytes(tensor: Tensor) -> Tensor:
    """The tensor's whole storage as a flat uint8 tensor, sharing memory."""
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.untyped_storage())


def bare(tensor: Tensor, apart: bool = False) -> Tensor:
    """The tensor without its history, which may lead to who holds it: that would be for ever.

    A node may save its own result; a tape or a frame is held by nodes of the graph. `apart`: it is
    to be another tensor in any case, so that one can see who else holds the first.
    """
    if tensor.grad_fn is None and not apart:
        return tensor
    if type(tensor) is not Tensor or not torch._C._len_torch_dispatch_stack():
        return tensor.detach()
    with torch._C._DisableTorchDispatch():  # modes take their time
        return tensor.detach()


def hold(tensor: Tensor) -> tuple[Tensor, int]:
    """What to hold for a saved tensor that nothing is done with: it, and its version."""
    tensor = bare(tensor)
    return tensor, tensor._version
