"""Find a job by name: a built-in one, or a function of the user's module or file."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from legroom.core.errors import InputError, UnknownName
from legroom.examples.job import EXAMPLES, Builder, Device, Job, MakeBatch

_RETURNS = "a Job, or (model, make_batch, loss_fn)"


def load_job(name: str) -> Builder:
    """The builder of a job: a built-in name, `module:function` or `path/to/file.py:function`.

    The function returns a Job or `(model, make_batch, loss_fn)`; one that takes a `device` keyword
    gets it. Raises UnknownName for a name or function that is not there, InputError for a missing
    module or file or what cannot be called; the builder raises InputError for wrong arguments or
    a wrong return.
    """
    where, colon, function = name.rpartition(":")
    if not colon and not name.endswith(".py"):
        return EXAMPLES[name]
    if not where or not function.isidentifier():
        raise InputError(
            f"job {name!r} names no function: write module:function or file.py:function"
        )
    module = _load_file(Path(where)) if where.endswith(".py") else _load_module(where)
    return _builder(name, _find(module, where, function))


def _load_module(where: str) -> ModuleType:
    _see(Path.cwd())
    try:
        return importlib.import_module(where)
    except (ImportError, SyntaxError, TypeError) as error:
        raise InputError(f"cannot import {where!r}: {error}") from error


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise InputError(f"no file at {path}")
    _see(path.resolve().parent)
    spec = importlib.util.spec_from_file_location(f"legroom_job_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except (ImportError, SyntaxError) as error:
        raise InputError(f"cannot import {path}: {error}") from error
    return module


def _see(folder: Path) -> None:
    """Let the user's modules import those beside them, as `python file.py` does."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _find(module: ModuleType, where: str, function: str) -> Callable[..., Any]:
    found = getattr(module, function, None)
    if found is None:
        known = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise UnknownName(f"function of {where}", function, known)
    if not callable(found):
        raise InputError(f"{where}:{function} is a {type(found).__name__}, not a function")
    checked: Callable[..., Any] = found
    return checked


def _builder(name: str, function: Callable[..., Any]) -> Builder:
    def build(device: Device = "cpu", **sizes: Any) -> Job:
        if _takes(function, "device"):
            sizes["device"] = device
        _check_call(name, function, sizes)
        return _as_job(name, function(**sizes))

    return build


def _check_call(name: str, function: Callable[..., Any], sizes: dict[str, Any]) -> None:
    try:
        inspect.signature(function).bind(**sizes)
    except TypeError as error:
        raise InputError(f"cannot call {name} with {sorted(sizes)}: {error}") from None


def _as_job(name: str, made: Any) -> Job:
    parts = (made.model, made.make_batch, made.loss_fn) if isinstance(made, Job) else made
    if not isinstance(parts, tuple) or len(parts) != 3:
        raise InputError(f"{name} returned {_in_words(made)}, wanted {_RETURNS}")
    model, make_batch, loss_fn = parts
    if not isinstance(model, nn.Module):
        raise InputError(f"{name}: the model is a {type(model).__name__}, not a torch.nn.Module")
    for what, part in (("make_batch", make_batch), ("loss_fn", loss_fn)):
        if not callable(part):
            raise InputError(f"{name}: {what} is a {type(part).__name__}, not a function")
    return Job(model, _seeded(make_batch), loss_fn)


def _in_words(made: Any) -> str:
    if isinstance(made, tuple):
        return f"a tuple of {len(made)}"
    return f"a {type(made).__name__}"


def _seeded(make_batch: Callable[..., Any]) -> MakeBatch:
    """The user's maker as it is, or made to take a seed if it takes nothing."""
    if inspect.signature(make_batch).parameters:
        return make_batch

    def without_seed(seed: int = 0) -> Any:
        return make_batch()

    return without_seed


def _takes(function: Callable[..., Any], keyword: str) -> bool:
    parameters = inspect.signature(function).parameters
    return keyword in parameters or any(
        p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()
    )
