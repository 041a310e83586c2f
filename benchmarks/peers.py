"""What else makes training take less memory: how a user of PyTorch would set each of them up."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

Around = Callable[[], contextlib.AbstractContextManager[object]]
OFFLOADED_BYTES = 1 << 20
"""Compiled offloading leaves smaller tensors alone."""


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks, as a user of torch's checkpointing would pick them."""
    if hasattr(model, "model") and hasattr(model.model, "layers"):
        return list(model.model.layers)
    if hasattr(model, "down") and hasattr(model, "up"):  # the stages of a U-Net
        return [model.stem, *model.down, *model.up]
    names = ("Bottleneck", "Block")
    return [m for m in model.modules() if type(m).__name__.endswith(names)]


def set_up(tool: str, model: nn.Module) -> Around:
    """Set a peer up by its name ("selective", "compile-0.7"); the context of each forward.

    Raises ValueError for a name that is not known.
    """
    family, _, setting = tool.partition("-")
    if tool == "eager":
        return contextlib.nullcontext
    if tool == "checkpoint":
        return wrap_blocks(model)
    if tool in ("selective", "selective-attention"):
        return wrap_selectively(model, attention_ops() + (matrix_ops() if not setting else []))
    if tool == "save_on_cpu":
        return lambda: torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available())
    if tool == "offload_activations":
        return offload_activations()
    if tool in ("offload-compiled", "offload-compiled-async"):
        return offload_compiled(model, apart=tool.endswith("async"))
    if family in ("compile", "blocks") and setting:
        return compile_modules([model] if family == "compile" else blocks_of(model), float(setting))
    raise ValueError(f"unknown tool {tool!r}")


# -- recomputing ---------------------------------------------------------------------------------


def wrap_blocks(model: nn.Module, **options: Any) -> Around:
    """Recompute each block with torch.utils.checkpoint."""
    for block in blocks_of(model):
        forward = block.forward

        def again(*args: Any, _forward: Any = forward, **kwargs: Any) -> Any:
            return checkpoint(_forward, *args, use_reentrant=False, **options, **kwargs)

        block.forward = again
    return contextlib.nullcontext


def wrap_selectively(model: nn.Module, ops: list[Any]) -> Around:
    """Recompute each block, but for these ops, whose outputs are kept."""
    keep = set(ops)

    def policy(ctx: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in keep else CheckpointPolicy.PREFER_RECOMPUTE

    return wrap_blocks(model, context_fn=lambda: create_selective_checkpoint_contexts(policy))


def matrix_ops() -> list[Any]:
    """The matrix products that torch's own recipes for selective checkpointing keep."""
    aten = torch.ops.aten
    names = ("mm", "addmm", "bmm", "convolution", "_grouped_mm")
    return [getattr(aten, name).default for name in names if hasattr(aten, name)]


def attention_ops() -> list[Any]:
    """The attention ops that torch's own recipes for selective checkpointing keep."""
    kinds = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
    return [getattr(torch.ops.aten, f"_scaled_dot_product_{kind}").default for kind in kinds]


# -- moving to host memory -----------------------------------------------------------------------


def offload_activations() -> Around:
    """The activation offloading of trl."""
    from trl.models.activation_offloading import OffloadActivations

    manager = OffloadActivations(use_streams=torch.cuda.is_available())
    return lambda: manager


def offload_compiled(model: nn.Module, apart: bool) -> Around:
    """Compile the model and let torch's partitioner move what it saves; `apart`: on own streams.

    Raises RuntimeError where this version of torch has no such partitioner.
    """
    import torch._functorch.config as config

    # The autograd cache does not see what the pass does.
    needed = {"enable_activation_offloading": True, "joint_custom_pass": mark_for_offload}
    wanted: dict[str, Any] = {"enable_autograd_cache": False}
    if apart:
        needed["activation_offload_separate_stream"] = True
        wanted |= {"activation_offload_sink_wait": True, "activation_reload_prefetch": True}
    for name in needed:
        if not hasattr(config, name):
            raise RuntimeError(f"torch {torch.__version__} has no torch._functorch.config.{name}")
    for name, value in (needed | wanted).items():
        if hasattr(config, name):
            setattr(config, name, value)
    return compile_modules([model], 1.0)


def mark_for_offload(graph: Any, inputs: Any) -> Any:
    """Mark each tensor that is worth it; the partitioner moves those that it saves."""
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        if node.op == "call_function" and isinstance(value, torch.Tensor):
            node.meta["should_offload"] = value.nbytes >= OFFLOADED_BYTES
    return graph


# -- compiling -----------------------------------------------------------------------------------


def compile_modules(modules: list[nn.Module], budget: float) -> Around:
    """Compile these modules, each on its own, with one memory budget for the partitioner."""
    import torch._dynamo.config as dynamo
    import torch._functorch.config as functorch

    functorch.activation_memory_budget = budget
    dynamo.recompile_limit, dynamo.accumulated_recompile_limit = 256, 4096
    for module in modules:
        if isinstance(module, nn.Sequential):  # whose own `compile` compiles nothing, silently
            module.forward = torch.compile(module.forward, dynamic=False)
        else:
            module.compile(dynamic=False)
    return contextlib.nullcontext


def num_graphs() -> int:
    """How many graphs were compiled in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])
