"""Blocks compiled on their own, each in one of several builds.

A build is what torch's partitioner makes of a block when it may keep a given share of what the
block would save. Blocks of one class with weights of the same form share their code: the compiler
is given the class's forward, and the module as an argument. A block in use has its build in place
of its forward, as an attribute of that one module, which is taken away again.
"""

import operator
from collections.abc import Callable, Mapping
from functools import partial, update_wrapper
from types import FunctionType
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._inductor.decomposition import select_decomp_table
from torch.utils.checkpoint import CheckpointPolicy

from legroom.core.errors import InputError

BACKEND = "inductor"
LEAST_SHARE = 1e-9
"""With none at all the partitioner does not look at what must be kept."""
MOST_SHAPES = 64
"""Shapes, or kinds of block, that one forward may be compiled for before it is left eager."""
Forward = Callable[..., Any]
_builds: dict[tuple[Any, float, str, Any], Forward] = {}
"""For all jobs of the process: a second one on the same classes compiles nothing.

One for each form of weights: dynamo looks through all it compiled of a function at every call.
"""


class Compiler:
    """Makes builds, each once, and puts them in place."""

    def __init__(self, backend: str = "") -> None:
        self.backend = backend or BACKEND
        self._placed: dict[str, tuple[nn.Module, float, Forward]] = {}
        self._made: dict[tuple[nn.Module, float], Forward] = {}
        self._routed: list[nn.Module] = []

    def build(self, module: nn.Module, share: float) -> Forward:
        """The module's forward, compiled to keep this share of what it could save."""
        if (module, share) not in self._made:
            forms = tuple((p.shape, p.dtype) for p in module.parameters())
            key = (type(module).forward, share, self.backend, forms)
            if key not in _builds:
                backend = _backend(self.backend, share)
                _builds[key] = torch.compile(_copied(key[0]), backend=backend, dynamic=False)
            self._made[module, share] = partial(_builds[key], module)
        return self._made[module, share]

    def place(self, modules: Mapping[str, nn.Module], shares: Mapping[str, float]) -> bool:
        """Have the named modules run these builds, and all others as they are; whether all do."""
        for path, (module, share, build) in list(self._placed.items()):
            if shares.get(path) != share:
                mine = module.__dict__.get("forward")
                if isinstance(mine, Route):
                    mine.build = None
                elif mine is build:  # else the user's own is there
                    del module.__dict__["forward"]
                del self._placed[path]
        for path, share in shares.items():
            module = modules[path]
            if path not in self._placed and not can_compile(module):
                build, mine = self.build(module, share), module.__dict__.get("forward")
                if isinstance(mine, Route):
                    mine.build = build
                else:
                    module.__dict__["forward"] = build
                self._placed[path] = module, share, build
        return self._placed.keys() == shares.keys()

    def route(self, module: nn.Module) -> None:
        """Let builds of a module be placed while it is being called already."""
        if not can_compile(module):
            if "forward" not in module.__dict__:  # else a job before this one left its own there
                module.__dict__["forward"] = Route(module.forward)
            self._routed.append(module)

    def clear(self) -> None:
        """All modules as they were."""
        self.place({}, {})
        for module in self._routed:
            if isinstance(module.__dict__.get("forward"), Route):
                del module.__dict__["forward"]
        self._routed.clear()


class Route:
    """In place of a module's forward while a job lasts: it runs the build there is, if any.

    A module looks its forward up before its hooks are called, and those decide.
    """

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self.build: Forward | None = None
        update_wrapper(self, forward)  # who asks for its arguments is told those

    def __reduce__(self) -> Any:
        return Route, (self._forward,)  # a copy of the module is not the job's, and runs as it is

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run either."""
        return (self.build or self._forward)(*args, **kwargs)


def can_compile(module: nn.Module) -> str:
    """Why a module is not compiled on its own; empty if it may be."""
    if "forward" in module.__dict__ and not isinstance(module.__dict__["forward"], Route):
        return "its forward was replaced on the instance"
    if getattr(module, "_compiled_call_impl", None) is not None:
        return "it is compiled already"
    return ""


def _backend(name: str, share: float) -> Callable[[Any, Any], Any]:
    """A backend of its own for each share, with our partitioner."""
    partition = Partitioner(share)
    if name == "inductor":
        from torch._inductor.compile_fx import compile_fx

        # Small kernels side by side become one: where the host is late, launches are the time.
        patches: Any = {"custom_partitioner_fn": partition, "combo_kernels": True}
        return partial(compile_fx, config_patches=patches)
    if name == "eager":  # the same partition with nothing compiled: for tests
        return aot_autograd(
            fw_compiler=boxed_nop,
            bw_compiler=boxed_nop,
            partition_fn=partition,
            decompositions=select_decomp_table,
        )
    raise InputError(f"no backend {name!r}: inductor, or eager")


class Partitioner(CustomPartitionerFn):
    """torch's partitioner with a share of what a block could save, and draws left alone.

    [Note: draws] The partitioner runs random ops again like any other when it is given a share,
    and they then draw other numbers: gradients come out wrong without a word (pytorch 190758). So
    what was drawn is kept; with inductor that is a seed.
    """

    def __init__(self, share: float) -> None:
        self.share = max(share, LEAST_SHARE)

    def __call__(self, gm: Any, joint_inputs: Any, **kwargs: Any) -> Any:
        """Cut a joint graph into forward and backward."""
        for node in gm.graph.nodes:
            if _draws(node):
                _keep(node)
        with torch._functorch.config.patch(activation_memory_budget=self.share):
            return min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> Any:
        """What compiled code is filed under."""
        return f"legroom 1 {self.share}"


def _draws(node: Any) -> bool:
    """Whether a node of the graph draws random numbers."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    names = [a.name for a in node.target._schema.arguments]
    if "dropout_p" not in names:
        return True
    at = names.index("dropout_p")
    return bool(node.args[at] if at < len(node.args) else node.kwargs.get("dropout_p", 0.0))


def _keep(node: Any) -> None:
    """Have a node's results saved; those of several are nodes of their own."""
    parts = [user for user in node.users if user.target is operator.getitem]
    for one in parts or [node]:
        one.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _copied(function: Any) -> Any:
    """The same function with code of its own: dynamo keeps what it compiled with the code."""
    if not isinstance(function, FunctionType):
        return function
    code, names = function.__code__.replace(), function.__globals__
    made = FunctionType(code, names, function.__name__, function.__defaults__, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def allow_shapes() -> None:
    """Let one forward be compiled for many shapes; a higher limit of the user's stays."""
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, MOST_SHAPES)
