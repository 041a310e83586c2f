"""Workshop: compiled blocks for a job, from samples of their calls to builds in place."""

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from legroom.core.errors import BudgetError
from legroom.core.units import format_bytes, format_seconds
from legroom.machine.spec import Machine
from legroom.memory.builds import Build, Rebuilt
from legroom.memory.mechanisms.compiled import Compiler, allow_shapes
from legroom.memory.mix import mixes
from legroom.memory.planner import make_plan
from legroom.memory.profile import Capture
from legroom.memory.trace import Step
from legroom.memory.trial import Sample, try_builds

log = logging.getLogger("legroom")
Tried = dict[tuple[str, int], list[tuple[float, Build]]]
"""By module and call, the builds of a block with their shares."""
Shares = dict[str, float]
"""Paths of compiled modules, and what their builds may keep."""


class Made(NamedTuple):
    """A step with builds chosen."""

    capture: Capture
    shares: Shares
    seconds: float = 0.0
    """How long it took to compile and try the builds."""


class Workshop:
    """Tries builds of a model's blocks, chooses among them, and puts them in place."""

    def __init__(self, model: nn.Module, device: torch.device, backend: str = "") -> None:
        self.model, self.device = model, device
        self.compiler = Compiler(backend)
        self._modules = dict(model.named_modules())
        self._samples: dict[str, dict[int, Sample]] = {}
        """For each signature, a call of one block of each group."""
        self._tried: dict[str, Tried] = {}
        allow_shapes()

    @contextlib.contextmanager
    def sampling(self, step: Step) -> Iterator[None]:
        """Note how the first block of each group is called while a step runs."""
        samples = self._samples.setdefault(step.signature, {})
        handles = []
        for block in step.blocks:
            if block.call == 0:
                hook = self._sampler(samples, block.group, block.name)
                module = self._modules[block.module]
                handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _sampler(self, samples: dict[int, Sample], group: int, name: str) -> Any:
        def sample(module: nn.Module, args: Any, kwargs: Any) -> None:
            if group not in samples and torch.is_grad_enabled():
                samples[group] = Sample.take(name, module, (args, kwargs), self.device)

        return sample

    def make(
        self, capture: Capture, like: Step, machine: Machine, budget: Mapping[str, int], policy: str
    ) -> Made:
        """The step with the mix of builds that is fastest under the budget; eager if that is."""
        started = time.perf_counter()
        tried = self._tried_for(like)
        took_s = time.perf_counter() - started
        options = self._options(capture.step, tried)
        best, best_s = Made(capture, {}), _planned_s(capture.step, machine, budget, policy)
        if not options:
            return best
        shares = {build: share for found in tried.values() for share, build in found}
        plain = {b: [build for _, build in found] for b, found in options.items()}
        for made in mixes(capture.step, machine, budget["device"], plain):
            seconds = _planned_s(made.step, machine, budget, policy)
            if seconds < best_s:
                best, best_s = _made(capture, made, shares, plain), seconds
        return best._replace(seconds=took_s)

    def _try(self, sample: Sample) -> list[tuple[float, Build]]:
        log.info("compiling %s in several builds", sample.name)
        found = try_builds(self.compiler, self.model, sample, self.device)
        for _, build in found:
            size, seconds = format_bytes(build.saved_bytes), format_seconds(build.seconds)
            log.info("%s, %s: saves %s, takes %s", sample.name, build.name, size, seconds)
        return found

    def _tried_for(self, like: Step) -> Tried:
        """The builds of each block that was sampled, tried once for each signature."""
        samples = self._samples.pop(like.signature, {})
        if samples:
            groups = {group: self._try(sample) for group, sample in samples.items()}
            self._tried[like.signature] = {
                (b.module, b.call): groups[b.group] for b in like.blocks if b.group in groups
            }
        return self._tried.get(like.signature, {})

    def _options(self, step: Step, tried: Tried) -> dict[int, list[tuple[float, Build]]]:
        """Builds for each block; none for modules that are called more than once."""
        several = {b.module for b in step.blocks if b.call > 0}
        options = {}
        for i, block in enumerate(step.blocks):
            found = tried.get((block.module, block.call))
            if found and block.module not in several:
                options[i] = found
        return options

    def place(self, shares: Shares) -> None:
        """Have these modules run their builds, and all others as they are."""
        self.compiler.place(self._modules, shares)


def _planned_s(step: Step, machine: Machine, budget: Mapping[str, int], policy: str) -> float:
    try:
        return make_plan(step, machine, budget, policy, quick=True).predicted.step_s
    except BudgetError:
        return float("inf")


def _made(
    capture: Capture, made: Rebuilt, shares: Mapping[Build, float], options: Mapping[int, Any]
) -> Made:
    chosen = {}
    for b, block in enumerate(made.step.blocks):
        if block.build:
            build = next(x for x in options[b] if x.name == block.build)
            chosen[block.module] = shares[build]
    forms = {}
    for i, form in capture.forms.items():
        if i in made.ops:
            moved = tuple(made.storages.get(s, -1) for s in form.storages)
            forms[made.ops[i]] = form._replace(storages=moved)
    return Made(Capture(made.step, forms), chosen)
