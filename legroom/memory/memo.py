"""Trials made before: what builds were measured to take, kept in the user's cache.

A build is known again by all that could make it another: the code of the block's modules, their
settings and weights' shapes, what the block is called with, the card, and torch itself. What was
compiled is in the compiler's own cache; with both, a second start tries nothing.
"""

import contextlib
import hashlib
import inspect
import os
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn
from torch.utils._pytree import tree_flatten

import legroom
from legroom.core.files import cache_dir
from legroom.memory.builds import Build
from legroom.memory.sample import Sample

FILES = ("trial", "forecast")
ADDRESS = " at 0x"
"""In the description of a thing that cannot be known again."""


class Memo:
    """The builds of one block, by their names."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._known = self._read()

    @classmethod
    def of(cls, sample: Sample, device: torch.device) -> "Memo":
        """That of a block and what it is called with; an empty one if they cannot be told."""
        text = describe(sample, device)
        if ADDRESS in text:
            return cls(None)
        name = hashlib.sha256(text.encode()).hexdigest()[:32]
        return cls(cache_dir() / "builds" / f"{name}.json")

    def _read(self) -> dict[str, Build]:
        if self.path is not None and self.path.exists():
            with contextlib.suppress(OSError, msgspec.MsgspecError):  # damaged: tried anew
                return msgspec.json.decode(self.path.read_bytes(), type=dict[str, Build])
        return {}

    def get(self, name: str) -> Build | None:
        """What was measured of a build before."""
        return self._known.get(name)

    def put(self, name: str, build: Build) -> None:
        """Keep what was measured; a cache that cannot be written costs the next process a trial."""
        self._known = self._read() | self._known | {name: build}  # others may write it, too
        if self.path is None:
            return
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part = self.path.with_suffix(f".{os.getpid()}")
            part.write_bytes(msgspec.json.encode(self._known))
            part.replace(self.path)


def describe(sample: Sample, device: torch.device) -> str:
    """All that a build depends on, as text."""
    module = sample.module
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    leaves, tree = tree_flatten(sample.args)
    parts = [
        _own_code(),
        torch.__version__,
        card,
        str(torch.get_num_threads()) if device.type == "cpu" else "",
        torch.get_float32_matmul_precision(),
        str(torch.are_deterministic_algorithms_enabled()),
        *sorted({_code(type(m)) for m in module.modules()}),
        repr(module),
        repr([m.training for m in module.modules()]),
        repr([_settings(m) for m in module.modules()]),
        repr([(n, p.shape, p.dtype, p.requires_grad) for n, p in module.named_parameters()]),
        repr([(n, b.shape, b.dtype) for n, b in module.named_buffers()]),
        repr(tree),
        *(_leaf(leaf) for leaf in leaves),
        repr(sample.autocast),
    ]
    return "\n".join(parts)


def _code(kind: type[nn.Module]) -> str:
    try:
        return f"{kind.__module__}.{kind.__qualname__}\n{inspect.getsource(kind)}"
    except (OSError, TypeError):  # typed in by hand
        return f"{kind.__qualname__}{ADDRESS}"


def _settings(module: nn.Module) -> list[str]:
    """What was set on a module and may not show in its description."""
    plain = {k: v for k, v in vars(module).items() if isinstance(v, bool | int | float | str)}
    return [repr(plain), repr(getattr(module, "config", None))]


def _leaf(leaf: Any) -> str:
    """A part of an argument, without numbers of tensors."""
    return repr((leaf.shape, leaf.dtype)) if isinstance(leaf, torch.Tensor) else repr(leaf)


@cache
def _own_code() -> str:
    """What makes and measures builds here."""
    root = Path(legroom.__file__).parent
    files = (*(root / "nn").glob("*.py"), *(root / "memory" / f"{x}.py" for x in FILES))
    made = (*files, root / "memory" / "mechanisms" / "compiled.py")
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted(made))
