"""Small questions about torch's ops, asked wherever they are watched."""

import functools
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry


def in_backward() -> bool:
    """Whether autograd is running a backward in this thread."""
    return torch._C._current_graph_task_id() != -1


def current_node() -> int:
    """Which node of the graph autograd is running, by its number; -1 for none."""
    node = torch._C._current_autograd_node() if in_backward() else None
    return -1 if node is None else node._sequence_nr()


def next_node() -> int:
    """The number that the next node of this thread's graph will have."""
    return int(torch._C._autograd._get_sequence_nr())


_AROUND = ("torch/_dynamo/eval_frame.py", "torch/_compile.py")
"""Files of functions that torch puts around a dispatch mode."""


def is_sum(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether autograd itself adds a gradient to one that waits, and does so in place.

    That is, if nobody watches its ops. Not to a view, whose base could be somebody's; not where
    gradients are to have gradients; and what hooks and backwards of the user add is not meant.
    """
    if op_name(func) != "aten.add.Tensor" or not in_backward() or torch.is_grad_enabled():
        return False
    if not isinstance(args[0], torch.Tensor) or args[0]._is_view():
        return False
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        name = frame.f_code.co_filename
        if name.endswith(_AROUND) or frame.f_code.co_name == "__torch_dispatch__":
            continue
        return frame.f_code.co_name == "_engine_run_backward"
    return True  # a thread of the engine's own


_ALIASES = {"aten::_unsafe_view", "aten::lift_fresh", "aten::_reshape_alias", "aten::set_"}


@functools.cache
def op_name(func: Any) -> str:
    """An op's name as traces have it."""
    return str(func).removesuffix(".default")


@functools.cache
def is_silent(func: Any) -> bool:
    """Views, queries and such: ops that make no bytes and change none."""
    if func.namespace == "prim" or func._schema.name in _ALIASES:
        return True
    returns = func._schema.returns
    aliased = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
    return aliased and not func._schema.is_mutable


STATISTICS = {
    f"aten.{name}": (3, 4, 5)
    for name in ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
}
"""Ops that also update running statistics, which their schema does not say, and read them not:
where those are, and the flag for training."""


def statistics(func: Any, args: tuple[Any, ...]) -> list[Any]:
    """The running statistics that an op will update."""
    places = STATISTICS.get(op_name(func))
    if places is None or not args[places[2]]:
        return []
    return [x for x in args[places[0] : places[1] + 1] if x is not None]


_LIKE = {
    "_scaled_dot_product_flash_attention_for_cpu": "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu_backward": (
        "_scaled_dot_product_flash_attention_backward"
    ),
}
"""Ops that torch has no rule for, and those whose rule is theirs as well."""


def _grouped_flops(rows: torch.Tensor, columns: torch.Tensor, *_: Any, **__: Any) -> float:
    """Products of groups of rows, of columns, or of both: each group has a matrix of its own."""
    groups = rows.shape[0] if rows.dim() == columns.dim() == 3 else 1
    return 2.0 * groups * rows.shape[-2] * rows.shape[-1] * columns.shape[-1]


def _recurrent_flops(times: int, x: torch.Tensor, *weights: Any, **_: Any) -> float:
    """Each word meets each weight; what follows the weights has none of two dimensions."""
    found = tree_leaves(weights[0] if isinstance(weights[0], list | tuple) else weights[:4])
    sizes = sum(w.numel() for w in found if isinstance(w, torch.Tensor) and w.dim() == 2)
    return 2.0 * times * x.numel() / max(x.shape[-1], 1) * sizes


_RULES: dict[str, Callable[..., float]] = {
    "_grouped_mm": _grouped_flops,
    "mkldnn_rnn_layer": partial(_recurrent_flops, 1),
    "mkldnn_rnn_layer_backward": partial(_recurrent_flops, 2),
    "_cudnn_rnn": partial(_recurrent_flops, 1),
    "_cudnn_rnn_backward": partial(_recurrent_flops, 2),
}
"""Of ops that torch has no rule for, and whose rule is no other's."""


def count_flops(packet: Any, args: Any, kwargs: Any, out: Any) -> float:
    """Floating-point operations of an op; torch's rules know nothing of a dtype asked for."""
    name = getattr(packet, "__name__", "")
    if name in _RULES:
        return _RULES[name](*args, **kwargs)
    rule = flop_registry.get(getattr(torch.ops.aten, _LIKE[name]) if name in _LIKE else packet)
    if rule is None:
        return 0.0
    given = [x for x in args if not isinstance(x, torch.dtype)]
    return float(rule(*given, **kwargs, out_val=out))
