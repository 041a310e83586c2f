"""Forecast: what builds of a block will take on a machine that is not there.

The block is traced with fake tensors and cut by torch's partitioner as its builds are. What the
compiler makes of such a graph is then guessed: ops with arithmetic of note are kernels of their
own, everything between two of them runs as one, and only what leaves such a kernel lies in memory.
"""

import contextlib
import copy
import operator
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch._inductor.lowering  # decompositions look for it
from torch import Tensor, nn
from torch._functorch.aot_autograd import aot_function
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from legroom.core.errors import forget_frames, in_short
from legroom.machine.spec import Machine
from legroom.memory.builds import GIVEN, OWN, RESULT, Build, Save
from legroom.memory.fake import fake_weights, with_weights
from legroom.memory.mechanisms.compiled import Partitioner
from legroom.memory.mechanisms.recompute import undrawn
from legroom.memory.ops import count_flops, is_silent
from legroom.memory.roofline import op_time
from legroom.memory.sample import Sample
from legroom.memory.saved import SMALL_BYTES
from legroom.memory.trial import Found, worth_having

JOINED = {
    *("sum", "mean", "amax", "amin", "var_mean", "var", "any", "all", "argmax", "prod"),
    *("clone", "full", "full_like", "iota", "empty", "cat", "convert_element_type", "copy_"),
}
"""Ops that are not pointwise, or not said to be, and still run in one kernel with those."""
SPARSE = {"embedding", "gather", "index", "index_select"}
"""Ops that read no more than they write."""


Shares = Sequence[float] | Callable[[Found], Iterable[float]]
"""What to forecast, or a function of what was, which grows meanwhile."""


class _Cut(Exception):
    """The block was cut: nothing is to run."""


class _Halves(NamedTuple):
    """A block's forward and backward as graphs."""

    share: float
    there: Graph
    back: Graph
    num_outputs: int
    """Of forward, before what it saves."""


def forecast(sample: Sample, shares: Shares, machine: Machine) -> Found:
    """The builds worth having of a block, in the fake mode that the sample was taken in.

    None of one that cannot be traced, which is named in a warning.
    """
    why = "recurrent layers are not compiled"
    if not any(isinstance(m, nn.RNNBase) for m in sample.module.modules()):
        try:
            return worth_having(_forecasts(sample, shares, machine))
        except Exception as error:  # whatever tracing a model may raise
            why = in_short(error)
            forget_frames(error)
    warnings.warn(f"legroom: no forecast of {sample.name} compiled: {why}", stacklevel=2)
    return []


def foresee(sample: Sample, shares: Shares, machine: Machine, device: torch.device) -> Found:
    """The same of a call that was sampled with real tensors."""
    with undrawn(device), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        weights = fake_weights(sample.module, device)
        with mode, with_weights(sample.module, weights):
            return forecast(sample, shares, machine)


def forecast_loss(
    sample: Sample, head: nn.Linear, ways: Iterable[tuple[int, str]], machine: Machine
) -> Found:
    """The loss of a language model, in these numbers of chunks: three products for each chunk.

    Between them one kernel makes gradients of logits in their place; those of the hidden states
    and of the weight are what is left, and backward scales them.
    """
    hidden, weight = sample.args[0][0], head.weight
    num_rows, dtype = hidden.size.numel() // hidden.size[-1], _cast_dtype(sample, hidden.dtype)
    logits = num_rows * len(weight)
    sizes = (hidden.size.numel() * hidden.dtype.itemsize, weight.nbytes)
    name = str(dtype).removeprefix("torch.")
    product_s = op_time(machine, 2 * logits * hidden.size[-1], logits * dtype.itemsize, name)
    between_s = op_time(machine, 0, 2 * logits * dtype.itemsize, name)
    found = []
    for k, words in ways:
        added_s = k * op_time(machine, 0, 3 * weight.nbytes, name) if k > 1 else 0.0
        build = Build(
            name=words,
            forward_s=3 * product_s + between_s + added_s + 4 * k * machine.launch_s,
            backward_s=op_time(machine, 0, 2 * sum(sizes), name),
            forward_bytes=-(-logits // k) * dtype.itemsize + (weight.nbytes if k > 1 else 0),
            backward_bytes=-sum(sizes),
            sizes=sizes,
            dtypes=tuple(str(x).removeprefix("torch.") for x in (hidden.dtype, weight.dtype)),
            saves=tuple(Save(OWN, rank, size) for rank, size in enumerate(sizes)),
        )
        found.append((float(k), build))
    return worth_having(found)


def _cast_dtype(sample: Sample, dtype: torch.dtype) -> torch.dtype:
    """What a product is computed in."""
    casts = [cast for _, enabled, cast, _ in sample.autocast if enabled]
    return casts[0] if casts and dtype == torch.float32 else dtype


def _forecasts(sample: Sample, shares: Shares, machine: Machine) -> Found:
    leaves, tree = tree_flatten(sample.inputs())
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    weights = dict((*sample.module.named_parameters(), *sample.module.named_buffers()))
    found: Found = []
    wanted: list[bool] = []

    def run(*flat: Tensor) -> list[Tensor]:
        held, given = flat[: len(weights)], iter(flat[len(weights) :])
        filled = [next(given) if isinstance(x, Tensor) else x for x in leaves]
        args, kwargs = tree_unflatten(filled, tree)
        with with_weights(sample.module, dict(zip(weights, held, strict=True))):
            out = sample.module.forward(*args, **kwargs)
        tensors_out = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        wanted[:] = [x.requires_grad for x in tensors_out]
        return tensors_out

    def cut(joint: Any, inputs: Any, **kwargs: Any) -> Any:
        for share in shares(found) if callable(shares) else shares:
            there, back = Partitioner(share)(copy.deepcopy(joint), inputs, **kwargs)
            halves = _Halves(share, there.graph, back.graph, kwargs["num_fwd_outputs"])
            found.append((share, _build(halves, len(weights), wanted, machine)))
        raise _Cut

    traced = aot_function(
        run, fw_compiler=_never, partition_fn=cut, decompositions=select_decomp_table()
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.suppress(_Cut))
        stack.enter_context(sample.casting())
        stack.enter_context(torch.enable_grad())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # of torch's own
        traced(*weights.values(), *tensors)
    return found


def _never(gm: Any, example_inputs: Any) -> Any:
    raise AssertionError("nothing is compiled for a forecast")


def _build(halves: _Halves, num_weights: int, wanted: list[bool], machine: Machine) -> Build:
    there = _Kernels(halves.there, machine)
    sizes, dtypes, saves = _saves(there, halves.num_outputs, num_weights, wanted)
    weights = {there.root(n) for n in there.inputs[:num_weights]}
    held = {n.name: there.root(n) for n in there.outputs[halves.num_outputs :] if _is_node(n)}
    back = _Kernels(halves.back, machine, {name: root.name for name, root in held.items()})
    stay = {name for name, root in held.items() if root in weights}
    return Build(
        name=f"keep {halves.share:.0%}",
        forward_s=there.seconds,
        backward_s=back.seconds,
        forward_bytes=there.peak(),
        backward_bytes=back.peak([n for n in back.inputs if n.name not in stay]),
        sizes=sizes,
        dtypes=dtypes,
        saves=saves,
    )


def _saves(
    there: "_Kernels", num_outputs: int, num_weights: int, wanted: list[bool]
) -> tuple[tuple[int, ...], tuple[str, ...], tuple[Save, ...]]:
    """Sizes and dtypes of storages of the block's own, and all saves, as a trial sees them."""
    weights = {there.root(n) for n in there.inputs[:num_weights]}
    results = there.outputs[num_outputs - len(wanted) : num_outputs]
    results = [x for x, wants in zip(results, wanted, strict=True) if wants]
    known: dict[Node, tuple[str, int]] = {}
    for rank, node in enumerate(results):
        known.setdefault(there.root(node), (RESULT, rank))
    for rank, node in enumerate(there.inputs[num_weights:]):
        known[there.root(node)] = (GIVEN, rank)
    sizes: list[int] = []
    dtypes: list[str] = []
    saves: list[Save] = []
    for node in there.outputs[num_outputs:]:
        root = there.root(node) if _is_node(node) else None
        if root is None or root in weights or _size(root) <= SMALL_BYTES:
            continue
        if root not in known:
            known[root] = (OWN, len(sizes))
            sizes.append(_size(root))
            dtypes.append(str(root.meta["val"].dtype).removeprefix("torch."))
        saves.append(Save(*known[root], _size(root)))
    return tuple(sizes), tuple(dtypes), tuple(saves)


def _is_node(value: Any) -> bool:
    return isinstance(value, Node)


def _size(node: Node) -> int:
    value = node.meta.get("val")
    return value.untyped_storage().nbytes() if isinstance(value, Tensor) else 0


class _Kernels:
    """What a compiler would make of a graph.

    `shown` names, for each input that is saved, the node whose memory it is: several may be views
    of one.
    """

    def __init__(
        self, graph: Graph, machine: Machine, shown: Mapping[str, str] | None = None
    ) -> None:
        self.nodes: list[Node] = list(graph.nodes)
        self.machine = machine
        self.inputs = [n for n in self.nodes if n.op == "placeholder"]
        self.outputs: list[Any] = list(self.nodes[-1].args[0])  # type: ignore[arg-type]
        self._roots: dict[Node, Node] = {}
        first: dict[str, Node] = {}
        for node in self.inputs:
            place = (shown or {}).get(node.name)
            if place is not None and first.setdefault(place, node) is not node:
                self._roots[node] = first[place]
        self._stage: dict[Node, int] = {}
        """How many kernels of note must have run: what has the same number runs as one."""
        for node in self.nodes[:-1]:
            if node.op == "call_function":
                self._place(node)
        self.kept = self._find_kept()
        self.seconds = sum(self._times())

    def root(self, node: Node) -> Node:
        """The node whose memory this one shows."""
        return self._roots.get(node, node)

    def _place(self, node: Node) -> None:
        shown = [self.root(n) for n in node.all_input_nodes]
        if _shows(node) and shown:
            self._roots[node] = shown[0]
            return
        before = (self._stage.get(n, 0) + _alone(n) for n in shown)
        self._stage[node] = max(before, default=0)

    def _find_kept(self) -> set[Node]:
        """Nodes whose values lie in memory: those that other kernels read, or whoever comes after.

        Those that are given lie there, too.
        """
        kept = {n for n in self._stage if _alone(n) or _part_of_alone(n)}
        kept |= {self.root(n) for n in self.outputs if isinstance(n, Node)}
        for node, stage in self._stage.items():
            for n in map(self.root, node.all_input_nodes):
                if n in self._stage and (_alone(node) or self._stage[n] != stage):
                    kept.add(n)
        return kept

    def _lies(self, node: Node) -> bool:
        return node in self.kept or node not in self._stage

    def _times(self) -> Iterator[float]:
        joint: dict[int, dict[Node, int]] = {}
        """By stage, what the kernel between two of note reads and writes."""
        for node, stage in self._stage.items():
            read = {n: _size(n) for n in map(self.root, node.all_input_nodes)}
            if _name(node) in SPARSE or _is_part(node):
                read = {}
            if _part_of_alone(node):
                continue
            if not _alone(node):
                traffic = joint.setdefault(stage, {})
                traffic |= {n: size for n, size in read.items() if self._lies(n)}
                traffic |= {node: _size(node)} if node in self.kept else {}
                continue
            value = node.meta.get("val")
            first = next((x for x in tree_leaves(value) if isinstance(x, Tensor)), None)
            written = sum(x.nbytes for x in tree_leaves(value) if isinstance(x, Tensor))
            dtype = str(first.dtype).removeprefix("torch.") if first is not None else ""
            yield op_time(self.machine, _flops(node), sum(read.values()) + written, dtype)
        for traffic in joint.values():
            yield op_time(self.machine, 0, sum(traffic.values()), "")

    def peak(self, freed: Iterable[Node] = ()) -> int:
        """Most bytes held on top of what was there, and of what is left after.

        Some inputs are freed with their last use.
        """
        last: dict[Node, int] = {}
        for i, node in enumerate(self.nodes[:-1]):
            for n in node.all_input_nodes:
                last[self.root(n)] = i
        lasting = {self.root(n) for n in self.outputs if isinstance(n, Node)}
        ends: dict[int, list[Node]] = {}
        for node, i in last.items():
            if node not in lasting:
                ends.setdefault(i, []).append(node)
        freed = {self.root(n) for n in freed}
        level = most = 0
        for i, node in enumerate(self.nodes[:-1]):
            if node in self.kept:
                level += _size(node)
                most = max(most, level)
            for gone in ends.get(i, ()):
                if gone in self.kept or gone in freed:
                    level -= _size(gone)
        left = sum(_size(n) for n in lasting if n in self.kept)
        return max(0, most - left)


def _is_part(node: Node) -> bool:
    return node.target is operator.getitem


def _part_of_alone(node: Node) -> bool:
    """Whether a node is one of several results of a kernel of its own."""
    return _is_part(node) and _alone(node.all_input_nodes[0])


def _name(node: Node) -> str:
    packet = getattr(node.target, "_overloadpacket", None)
    return packet.__name__ if packet is not None else ""


def _shows(node: Node) -> bool:
    """Whether a node shows another one's memory in some other form."""
    if _is_part(node):
        return _shows(node.all_input_nodes[0])
    return isinstance(node.target, torch._ops.OpOverload) and is_silent(node.target)


def _alone(node: Node) -> bool:
    """Whether a node is a kernel of its own."""
    if node.op != "call_function" or _is_part(node) or _shows(node):
        return False
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise not in tags and _name(node) not in JOINED | SPARSE


def _flops(node: Node) -> float:
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    packet = getattr(node.target, "_overloadpacket", None)
    return count_flops(packet, args, kwargs, node.meta["val"])
