"""Workshop: compiled blocks for a job, from samples of their calls to builds in place."""

import contextlib
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import torch
from torch import nn

from legroom.core.errors import BudgetError, InputError
from legroom.core.units import format_bytes, format_seconds
from legroom.machine.spec import Machine
from legroom.memory.builds import SAME, Build, Pace
from legroom.memory.device import Meter
from legroom.memory.fitting import Whole
from legroom.memory.forecast import forecast, forecast_loss
from legroom.memory.kinds import Kind, Made, Outfit, rescaled
from legroom.memory.losshead import CALL, with_head
from legroom.memory.mechanisms.compiled import Compiler, allow_shapes, can_compile
from legroom.memory.mix import fitting_share, mixes
from legroom.memory.planner import LARGE, make_plan
from legroom.memory.profile import Capture
from legroom.memory.rebuild import Rebuilt
from legroom.memory.sample import Sample
from legroom.memory.simulate import Simulator
from legroom.memory.trace import ROOT, Step
from legroom.memory.trial import SHARES, Found, Subject, build_ways, shares_by, try_all
from legroom.memory.whole import is_worth, with_whole
from legroom.nn.head import Head, find_head

log = logging.getLogger("legroom")
Tried = dict[tuple[str, int], Found]
"""By module and call, the builds of a block with their shares."""
Rank = tuple[float, int]
"""Step time under a plan; without one, how many bytes are missing for it."""
TRIAL_S = 60.0
"""Time to try builds of blocks; what was not tried by then stays as it is."""
WHOLE_ON = ("cuda",)
"""Devices that ops wait for: there it pays to launch fewer."""
CHUNKS = (8, 1, 32, 4, 16, 2)
"""Of the loss of a language model."""
LOGITS = 8
"""Bytes for each of them that a loss in full holds, at the least."""
GAPS = (1.0, 0.5, 0.25)
"""Shares of the largest tensor inside of compiled blocks that are left to the allocator, if any.

A whole model has the device for itself, and leaves smaller gaps: not the first of them.
"""
TIMID = 1.1
"""An eager step may take so many times as long as one in builds that no such room is left for."""
MANY = 32
"""Chunks to begin with where logits in full do not fit."""


class Workshop:
    """Tries builds of a model's blocks, chooses among them, and puts them in place."""

    def __init__(self, model: nn.Module, device: torch.device, backend: str = "") -> None:
        self.model, self.device = model, device
        self.compiler = Compiler(backend)
        self._modules = dict(model.named_modules())
        self._samples: dict[str, dict[int, Sample]] = {}
        """For each signature, a call of one block of each group."""
        self._tried: dict[str, Tried] = {}
        self._wholes: dict[str, Whole] = {}
        """The same for the model itself."""
        self.head_path, self.head = _find_head(model, fused=self.compiler.backend == "inductor")
        self._losses: dict[str, Sample] = {}
        """For each signature, what the loss of a language model was given."""
        self._looks: list[bool] = []
        """Not empty once somebody but the loss looked at logits."""
        allow_shapes()

    @contextlib.contextmanager
    def sampling(self, step: Step, given: Any = None) -> Iterator[None]:
        """Note how the first block of each group is called while a step runs.

        `given` is what the model itself is called with, where it may be compiled as one.
        """
        samples = self._samples.setdefault(step.signature, {})
        if given is not None and self.head is None and self.device.type in WHOLE_ON:
            sample = Sample.take("the whole model", self.model, given, self.device)
            self._wholes[step.signature] = Whole(self.model, self.device, sample)
        with contextlib.ExitStack() as stack:
            for block in step.blocks:
                if block.call == 0:
                    hook = self._sampler(samples, block.group, block.name)
                    module = self._modules[block.module]
                    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
                    stack.callback(handle.remove)
            if self.head is not None and self.head.free:
                note = partial(self._sample_loss, step.signature)
                stack.enter_context(self.head.watched(note, self._looks))
            try:
                yield
            except BaseException:  # the step will be run again
                self._losses.pop(step.signature, None)
                raise

    def _sample_loss(self, signature: str, call: Any) -> None:
        assert self.head is not None
        given = ((call.hidden,), call.terms)
        sample = Sample.take(f"the loss of {self.head_path}", self.head.head, given, self.device)
        if self._losses.setdefault(signature, sample) is not sample:
            self._looks.append(True)  # it is asked for twice in a step: leave it alone

    def _sampler(self, samples: dict[int, Sample], group: int, name: str) -> Any:
        def sample(module: nn.Module, args: Any, kwargs: Any) -> None:
            if group not in samples and torch.is_grad_enabled():
                samples[group] = Sample.take(name, module, (args, kwargs), self.device)

        return sample

    def make(
        self,
        captured: Made,
        like: Step,
        machine: Machine,
        budget: Mapping[str, int],
        policy: str,
        pace: Pace = SAME,
    ) -> Made:
        """The step with the mix of builds that is fastest under the budget; as it is if that is."""
        started, now = time.perf_counter(), Simulator(captured.capture.step, machine)
        tried = self._tried_for(like, fitting_share(now, budget["device"]))
        took_s = time.perf_counter() - started
        tried = {k: [(n, b.at(pace)) for n, b in found] for k, found in tried.items()}
        capture = rescaled(captured.capture, pace.ops, captured.capture.step.host_s * pace.host)
        captured = captured._replace(capture=capture)
        best, best_rank = captured, _rank(capture.step, machine, budget, policy)
        for step in self._steps(capture.step, tried):
            options = self._options(step, tried)
            for made in mixes(step, machine, budget["device"], options) if options else ():
                rank = _rank(made.step, machine, budget, policy)
                if rank < best_rank:
                    best, best_rank = self._made(captured, made, tried), rank
        whole = self._wholes.get(like.signature)
        able = whole is not None and not can_compile(self.model)
        if whole and able and is_worth(best.capture.step, capture.step.root, best_rank[0]):
            started = time.perf_counter()
            whole.try_builds(self.compiler, Simulator(capture.step, machine), budget["device"])
            took_s += time.perf_counter() - started
            _log(whole.sample, whole.found)
            for share, build in whole.found:
                made = with_whole(capture.step, build.at(pace))
                rank = _rank(made.step, machine, budget, policy)
                if rank < best_rank:
                    best = Made(_with_forms(captured, made), Outfit({ROOT: share}))
                    best_rank = rank
                    self.compiler.route(self.model)
        return best._replace(seconds=took_s, step_s=best_rank[0], missing_bytes=best_rank[1])

    def dress(
        self,
        kind: Kind,
        like: Step,
        machine: Machine,
        meter: Meter,
        budget: Mapping[str, int],
        policy: str,
    ) -> None:
        """Have a recorded kind run in the best builds, with room for what they take inside."""
        assert kind.capture is not None
        kind.plain, plain = kind.capture, Made(kind.capture, kind.base)
        make = partial(self.make, plain, like, machine, policy=policy)
        best = make(meter.usable(budget))
        kind.wear(best)
        slack = meter.slack
        gaps = GAPS[1:] if ROOT in best.outfit.shares else GAPS
        for share in gaps if best.outfit.shares else ():
            if not meter.leave(int(share * kind.unseen_bytes), budget["device"]):
                return
            made = make(meter.usable(budget))
            if made.outfit.shares and not made.missing_bytes:
                return kind.wear(made)
            meter.slack = slack  # then as much as there was
            if not made.missing_bytes and made.step_s < TIMID * best.step_s:
                return kind.wear(made)  # eager, where all is known
        if best.outfit.shares and kind.unseen_bytes >= LARGE * budget["device"]:
            step_s, missing = _rank(plain.capture.step, machine, meter.usable(budget), policy)
            if not missing:  # slower, but a large tensor that finds no gap would end the job
                kind.wear(plain._replace(seconds=best.seconds, step_s=step_s))

    def remake(self, kind: Kind, machine: Machine, budget: Mapping[str, int], policy: str) -> None:
        """Choose builds anew by what was learned since."""
        if kind.plain is None or kind.capture is None:
            return
        plain, pace = Made(kind.plain, kind.base), kind.pace
        made = self.make(plain, kind.plain.step, machine, budget, policy, pace)
        if made.outfit != kind.outfit:
            kind.wear(made, pace)

    def _steps(self, step: Step, tried: Tried) -> Iterator[Step]:
        """The step as it is, and with its loss as a block."""
        yield step
        usable = self.head is not None and self.head.free and not self._looks
        if (self.head_path, CALL) in tried and usable:
            marked = with_head(step, self.head_path)
            if marked is not None:
                yield marked

    def _made(self, captured: Made, made: Rebuilt, tried: Tried) -> Made:
        shares, chunks, blocks = {}, captured.outfit.chunks, []
        for block in made.step.blocks:
            if block.build:
                found = tried[block.module, block.call]
                number, build = next(x for x in found if x[1].name == block.build)
                block = msgspec.structs.replace(block, price=_price(build, found[0][1]))
                if (block.module, block.call) == (self.head_path, CALL):
                    chunks = int(number)
                else:
                    shares[block.module] = number
            blocks.append(block)
        step = msgspec.structs.replace(made.step, blocks=tuple(blocks))
        return Made(_with_forms(captured, made._replace(step=step)), Outfit(shares, chunks))

    def _tried_for(self, like: Step, need: float) -> Tried:
        """The builds of each block that was sampled, tried once for each signature.

        `need` is about the share that blocks will have to keep.
        """
        samples = self._samples.pop(like.signature, {})
        if samples:
            groups = sorted(samples)
            subjects = [self._subject(samples[g], _weight(like, g), need) for g in groups]
            subjects += self._loss_subject(like.signature)
            log.info("compiling %d kinds of block in several builds", len(subjects))
            remember = self.compiler.backend == "inductor"
            found = try_all(self.model, self.device, subjects, TRIAL_S, remember)
            for subject, builds in zip(subjects, found, strict=True):
                _log(subject.sample, builds)
            self._file(like, dict(zip(groups, found, strict=False)), found[len(groups) :])
        return self._tried.get(like.signature, {})

    def expect(self, like: Step, machine: Machine) -> None:
        """Count on builds as they are forecast, for a step that was sampled with fake tensors."""
        samples, loss = self._samples.pop(like.signature, {}), []
        found = {group: forecast(sample, SHARES, machine) for group, sample in samples.items()}
        if self.head is not None and like.signature in self._losses and not self._looks:
            sample = self._losses.pop(like.signature)
            ways = [(k, _in_chunks(k)) for k in CHUNKS]
            loss.append(forecast_loss(sample, self.head.head, ways, machine))
        self._file(like, found, loss)

    def _file(self, like: Step, by_group: Mapping[int, Found], loss: Sequence[Found]) -> None:
        self._tried[like.signature] = tried = {
            (b.module, b.call): by_group[b.group] for b in like.blocks if b.group in by_group
        }
        if loss:
            tried[self.head_path, CALL] = loss[0]

    def _subject(self, sample: Sample, weight: float, need: float) -> Subject:
        ways = build_ways(self.compiler, sample.module, shares_by(need))
        return Subject(sample, ways, weight)

    def _loss_subject(self, signature: str) -> list[Subject]:
        sample, head = self._losses.pop(signature, None), self.head
        if sample is None or head is None or self._looks:
            return []
        ways = ((k, _in_chunks(k), partial(head.loss, chunks=k)) for k in CHUNKS)
        logits = sample.args[0][0].size[:-1].numel() * len(head.head.weight)
        return [Subject(sample, ways, LOGITS * logits)]

    def _options(self, step: Step, tried: Tried) -> dict[int, list[Build]]:
        """Builds for each block; none for modules that are called more than once."""
        several = {b.module for b in step.blocks if b.call > 0} - {self.head_path}
        options = {}
        for i, block in enumerate(step.blocks):
            found = tried.get((block.module, block.call))
            replaced = can_compile(self._modules[block.module]) and block.module != self.head_path
            if found and block.module not in several and not replaced:
                options[i] = [build for _, build in found]
        return options

    def clear(self) -> None:
        """All modules as they were, for good."""
        self.place(Outfit())
        self.compiler.clear()

    def least(self) -> Outfit:
        """What needs least memory of what can be had before anything was tried."""
        return Outfit(chunks=MANY) if self.head is not None else Outfit()

    def place(self, outfit: Outfit) -> bool:
        """Have these modules run their builds, and all others as they are.

        Whether that was done: not where the user has put another forward or loss in place.
        """
        done = self.compiler.place(self._modules, outfit.shares)
        if self.head is not None:
            self.head.put(outfit.chunks)
        return done and (self.head.chunks if self.head is not None else 0) == outfit.chunks


def _with_forms(captured: Made, made: Rebuilt) -> Capture:
    """A step with other builds, and what its eager ops look like."""
    forms = {}
    for i, form in captured.capture.forms.items():
        if i in made.ops:
            moved = tuple(made.storages.get(s, -1) for s in form.storages)
            forms[made.ops[i]] = form._replace(storages=moved)
    return Capture(made.step, forms)


def _rank(step: Step, machine: Machine, budget: Mapping[str, int], policy: str) -> Rank:
    try:
        return make_plan(step, machine, budget, policy, quick=True).predicted.step_s, 0
    except BudgetError as error:
        return math.inf, error.missing_bytes


def _price(build: Build, fastest: Build) -> str:
    """What a build takes more, and holds less, than the fastest one of its block."""
    if build is fastest:
        return "the fastest"
    more_s = build.seconds - fastest.seconds
    held, theirs = (x.saved_bytes or x.forward_bytes for x in (build, fastest))
    if held == theirs:
        held, theirs = build.forward_bytes, fastest.forward_bytes
    return f"{format_seconds(more_s)} for {format_bytes(max(theirs - held, 0))} less"


def _weight(step: Step, group: int) -> int:
    """Bytes that all blocks of a group save."""
    ours = {b for b, block in enumerate(step.blocks) if block.group == group}
    storages = {row.storage for row in step.saved if row.block in ours}
    return sum(step.storages[s].num_bytes for s in storages)


def _log(sample: Sample, builds: Found) -> None:
    for _, build in builds:
        size, seconds = format_bytes(build.saved_bytes), format_seconds(build.seconds)
        log.info("%s, %s: saves %s, takes %s", sample.name, build.name, size, seconds)


def _in_chunks(k: int) -> str:
    return f"{k} chunk{'s' * (k > 1)}"


def _find_head(model: nn.Module, fused: bool) -> tuple[str, Head | None]:
    """The path of a language model's head, and the head; none if its loss has no chunks."""
    for root in model.modules():
        if hasattr(root, "loss_function"):
            with contextlib.suppress(InputError):
                head = find_head(root, fused)
                head.as_module = True
                return next(p for p, m in model.named_modules() if m is head.head), head
    return "", None
