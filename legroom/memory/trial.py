"""Trials: run one block alone in one build after the other, and measure each.

A trial gives the block what a step gave it: the same shapes and layouts, with other numbers where
gradients flow. Nothing of the model is left changed: no gradients, no statistics, no random state.
"""

import contextlib
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map

from legroom.core.errors import forget_frames, in_short
from legroom.memory.builds import GIVEN, OWN, RESULT, Build, Save
from legroom.memory.mechanisms.attributes import attributes_kept
from legroom.memory.mechanisms.compiled import Compiler, can_compile
from legroom.memory.mechanisms.hooks import shield
from legroom.memory.memo import Memo
from legroom.memory.sample import Sample
from legroom.memory.saved import (
    StorageTable,
    is_ours,
    weight_storages,
)
from legroom.memory.timers import SPAN, CpuClock, CudaClock, Spans, memory_reports, reports_peak
from legroom.memory.verify import Snapshot

SHARES = (1.0, 0.7, 0.4, 0.2, 0.0)
"""Of what a block could save, for the partitioner to keep."""
ROUNDS = 5
HEAT_S = 0.3
ALIKE = 0.02
"""Builds that differ in bytes by less, as a share of the most that any saves, are one."""


Way = tuple[float, str, Callable[..., Any]]
"""A number to tell it by, a name, and what runs in place of the block's forward."""
Found = list[tuple[float, Build]]
"""Builds with the numbers of their ways."""


def build_ways(compiler: Compiler, module: nn.Module, shares: Iterable[float]) -> Iterator[Way]:
    """A module compiled to keep one share after the other."""
    for share in shares:
        yield share, f"keep {share:.0%}", compiler.build(module, share)


def shares_by(need: float) -> list[float]:
    """Shares for a block to keep, the closest to what fits first: the time may not do for all."""
    return sorted(SHARES, key=lambda share: (abs(share - need), share))


class Subject(NamedTuple):
    """A block to try."""

    sample: Sample
    ways: Iterator[Way] | Callable[[Found], Iterator[Way]]
    """What to try, or a function of what was found, which grows meanwhile."""
    weight: float = 1.0
    """The more, the sooner it is tried in another way."""


def try_all(
    model: nn.Module,
    device: torch.device,
    subjects: Iterable[Subject],
    limit_s: float = math.inf,
    remember: bool = False,
) -> list[Found]:
    """Of each subject the builds worth having, one way after the other until the time is over.

    Each is tried in one way, and then a subject's turn comes by its weight over the number of ways
    tried. One of which some way breaks has no builds, and is named in a warning. With `remember`,
    what was measured in other processes counts, and is kept for others.
    """
    tries = [_Tries(model, device, subject) for subject in subjects]
    for one in tries if remember else ():
        one.memo = Memo.of(one.sample, device)
    until = time.perf_counter() + limit_s
    going = list(tries)
    while going and time.perf_counter() < until:
        one = max(going, key=lambda one: (not one.turns, one.weight / (one.turns + 1)))
        if not one.next():
            going.remove(one)
    return [worth_having(one.found) for one in tries]


class _Tries:
    """The ways of one block, one after the other."""

    def __init__(self, model: nn.Module, device: torch.device, subject: Subject) -> None:
        self.model, self.device = model, device
        self.sample, ways, self.weight = subject
        self.turns = 0
        self.found: Found = []
        self.ways = ways(self.found) if callable(ways) else ways
        self.memo = Memo(None)

    def next(self) -> bool:
        """Try one more; whether there may be others."""
        self.turns += 1
        module = self.sample.module
        keep, why = Snapshot(module, self.device), can_compile(module)
        try:
            with attributes_kept(module.modules()), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the compiler's own
                way = None if why else next(self.ways, None)
                if way is not None:
                    with contextlib.suppress(torch.OutOfMemoryError):
                        self.found.append((way[0], self._build(way)))
        except Exception as error:  # whatever a compiler may raise
            why = in_short(error)
            forget_frames(error)
        finally:
            keep.restore()
        if why:
            self.found.clear()
            warnings.warn(f"legroom: {self.sample.name} is not compiled: {why}", stacklevel=3)
        return not why and way is not None

    def _build(self, way: Way) -> Build:
        _, name, forward = way
        build = self.memo.get(name)
        if build is None:
            build = Trial(self.model, self.sample, forward, self.device).measure(name)
            self.memo.put(name, build)
        return build


def worth_having(found: Sequence[tuple[float, Build]]) -> Found:
    """Without those that a faster one beats in bytes as well, fastest first.

    What is held from forward to backward counts, and what either of them holds at most.
    """
    slack = ALIKE * max((build.saved_bytes for _, build in found), default=0)
    kept: Found = []
    for share, build in sorted(found, key=lambda x: x[1].seconds):
        if all(_saves_bytes(build, other, slack) for _, other in kept):
            kept.append((share, build))
    return kept


def _saves_bytes(build: Build, other: Build, slack: float) -> bool:
    return any(
        build.saved_bytes + mine < other.saved_bytes + theirs - slack
        for mine, theirs in (
            (0, 0),
            (build.forward_bytes, other.forward_bytes),
            (build.backward_bytes, other.backward_bytes),
        )
    )


class Trial:
    """Runs a forward alone, there and back."""

    def __init__(
        self, model: nn.Module, sample: Sample, forward: Callable[..., Any], device: torch.device
    ) -> None:
        self.sample, self.forward, self.device = sample, forward, device
        self.weights = weight_storages([model])
        self.params = [p for p in sample.module.parameters() if p.requires_grad]

    def measure(self, name: str) -> Build:
        """Warm it up, look at what it saves and holds, and take its time."""
        self._run()
        size, dtype, saves, forward_bytes, backward_bytes = self._look()
        there_s, back_s, host_s = self._time(self._heat())
        return Build(
            name=name,
            forward_s=there_s,
            backward_s=back_s,
            forward_bytes=forward_bytes,
            backward_bytes=backward_bytes,
            sizes=size,
            dtypes=dtype,
            saves=saves,
            host_s=host_s,
        )

    def _there(self, given: Any) -> list[Tensor]:
        args, kwargs = given
        with self.sample.casting(), torch.enable_grad():
            out = self.forward(*args, **kwargs)
        return [x for x in tree_leaves(out) if _wants_grad(x)]

    def _back(self, given: Any, results: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
        leaves = [x for x in tree_leaves(given) if _wants_grad(x)]
        found = torch.autograd.grad(results, [*leaves, *self.params], grads, allow_unused=True)
        return [x for x in found if x is not None]

    def _run(self) -> None:
        given = self.sample.inputs()
        results = self._there(given)
        self._back(given, results, [torch.ones_like(x) for x in results])

    def _look(self) -> tuple[tuple[int, ...], tuple[str, ...], tuple[Save, ...], int, int]:
        """Sizes and dtypes of what it saves of its own, all saves, and bytes on the side.

        As in a step, nobody but autograd holds what goes in and comes out.
        """
        saved, watch = _Saved(self.device, self.weights), Watch(self.device)
        with watch.session():
            leaves = self.sample.inputs()
            given = tree_map(lambda x: x.clone() if _wants_grad(x) else x, leaves)
            with watch.stretch() as there, saved.hooks():
                results = self._there(given)
            rows = saved.rows(given, results)
            kept = saved.let_go()
            grads = [torch.ones_like(x) for x in results]
            came = sum(x.untyped_storage().nbytes() for x in grads)
            loss = torch.stack([(x * g).sum() for x, g in zip(results, grads, strict=True)]).sum()
            del given, results
            with watch.stretch() as back:
                found = self._back(leaves, [loss], [torch.ones_like(loss)])
        made = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in found}
        behind = back.peak - came - sum(storage.nbytes() for storage in made.values())
        same = (storage for storage in made.values() if kept.get(storage))
        twice = sum(storage.nbytes() for storage in same)  # saved as it will be
        return (*rows, max(0, there.peak - there.left), max(-twice, behind))

    def _heat(self) -> float:
        """Keep a card busy for a while: one at rest is faster at first than it stays.

        How long the host took for one run.
        """
        started, host_s = time.perf_counter(), HEAT_S
        while self.device.type == "cuda" and time.perf_counter() - started < HEAT_S:
            begin = time.perf_counter()
            self._run()
            host_s = min(host_s, time.perf_counter() - begin)
            torch.cuda.synchronize(self.device)
        return host_s

    def _time(self, host_s: float) -> tuple[float, float, float]:
        """Seconds there and back, and of the host for both: medians of rounds in a row."""
        given = self.sample.inputs()
        clock = CudaClock(ROUNDS * host_s) if self.device.type == "cuda" else CpuClock()
        for _ in range(ROUNDS):
            clock.mark()
            results = self._there(given)
            clock.mark()
            grads = [torch.ones_like(x) for x in results]
            clock.mark()
            self._back(given, results, grads)
            del results, grads
        clock.mark()
        there, _, back = _medians(clock.spans())
        host_there, _, host_back = _medians(clock.host_spans())
        return there, back, host_there + host_back


def _medians(spans: list[float]) -> tuple[float, ...]:
    """Of rounds of three spans each."""
    return tuple(median(spans[i::3]) for i in range(3))


def _wants_grad(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


class _Saved:
    """The tensors a forward saves, of those that a plan can act on."""

    def __init__(self, device: torch.device, weights: StorageTable[bool]) -> None:
        self.device, self.weights = device, weights
        self.tensors: list[Tensor] = []

    def hooks(self) -> saved_tensors_hooks:
        """Note each; autograd keeps it, without a history that may lead to who saved it."""
        return saved_tensors_hooks(*shield(self._pack, lambda tensor: tensor))

    def _pack(self, tensor: Tensor) -> Tensor:
        if is_ours(tensor, self.device, self.weights):
            self.tensors.append(tensor)
        return tensor if tensor.is_leaf else tensor.detach()

    def rows(
        self, given: Any, results: list[Tensor]
    ) -> tuple[tuple[int, ...], tuple[str, ...], tuple[Save, ...]]:
        """Sizes and dtypes of storages of the block's own, and all saves."""
        known: StorageTable[tuple[str, int]] = StorageTable()
        for where, tree in ((RESULT, results), (GIVEN, given)):
            tensors = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
            for rank, tensor in enumerate(tensors):
                if known.get(tensor.untyped_storage()) is None or where == GIVEN:
                    known.put(tensor.untyped_storage(), (where, rank))
        sizes: list[int] = []
        dtypes: list[str] = []
        saves = []
        for tensor in self.tensors:
            storage = tensor.untyped_storage()
            place = known.get(storage)
            if place is None:
                place = (OWN, len(sizes))
                known.put(storage, place)
                sizes.append(storage.nbytes())
                dtypes.append(str(tensor.dtype).removeprefix("torch."))
            saves.append(Save(*place, storage.nbytes()))
        return tuple(sizes), tuple(dtypes), tuple(saves)

    def let_go(self) -> StorageTable[bool]:
        """Hold nothing on; the storages, to be known again: others may come to lie there."""
        table: StorageTable[bool] = StorageTable()
        while self.tensors:
            table.put(self.tensors.pop().untyped_storage(), True)
        return table


@dataclass
class Level:
    """Bytes above what was there."""

    peak: int = 0
    left: int = 0


class Watch:
    """Counts bytes in stretches of one session.

    A CPU's allocator reports what is given back only if it also saw it taken: hence the session.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stretches: dict[str, Level] = {}

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """Levels are known when it ends."""
        if self.device.type == "cuda":
            yield
            return
        reports: list[tuple[int, int]] = []
        spans: Spans = {}
        with memory_reports(reports, spans):
            yield
        for name, level in self._stretches.items():
            start, end = spans[name]
            rows = [row for row in reports if start <= row[0] <= end]
            level.peak, level.left = reports_peak(rows), sum(n for _, n in rows)

    @contextlib.contextmanager
    def stretch(self) -> Iterator[Level]:
        """The most bytes held at once while something runs, and those that stay."""
        level = Level()
        if self.device.type == "cuda":
            before = torch.cuda.memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            yield level
            level.peak = torch.cuda.max_memory_allocated(self.device) - before
            level.left = torch.cuda.memory_allocated(self.device) - before
            return
        name = f"{SPAN}{len(self._stretches)}"
        self._stretches[name] = level
        with torch.profiler.record_function(name):
            yield level
