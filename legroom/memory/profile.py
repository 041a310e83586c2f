"""Capture a step as a trace: with fake tensors on any machine, or from a real recorded step."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import msgspec
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from legroom.core.errors import LegroomError, StepError, forget_frames, in_short
from legroom.machine.spec import Machine
from legroom.memory.assemble import assemble_step, op_forms, same_calls, set_releases
from legroom.memory.blocks import find_blocks
from legroom.memory.escape import gradients_kept, let_go
from legroom.memory.fake import (
    fake_device,
    fake_hooks,
    fake_input,
    fake_weights,
    run_small_for_real,
    with_weights,
)
from legroom.memory.mechanisms.attributes import attributes_kept
from legroom.memory.mechanisms.recompute import undrawn
from legroom.memory.mechanisms.tape import OpForm
from legroom.memory.recorder import Recorder
from legroom.memory.roofline import update_time
from legroom.memory.saved import has_storage
from legroom.memory.timers import CpuTimer, CudaTimer
from legroom.memory.trace import Kind, Op, Phase, Step, Storage
from legroom.memory.update import Update, foresee_update, states_there
from legroom.memory.variants import with_variants

LossFn = Callable[[nn.Module, Any], Tensor]


class Visitor(Protocol):
    """Somebody who looks on while a step is captured with fake tensors."""

    def watching(self) -> AbstractContextManager[None]:
        """Around the step."""

    def look(self) -> None:
        """After it, with the model's weights still fake."""


@dataclass(frozen=True)
class StateRule:
    """What an optimizer keeps per parameter byte, and what its update takes on top."""

    copies: float
    scratch: float
    """Share of all parameter bytes that its update allocates for a moment."""


STATE_RULES = {
    "none": StateRule(0, 0),
    "sgd": StateRule(0, 0),
    "sgd-momentum": StateRule(1, 0),
    "adam": StateRule(2, 0),
    "adamw": StateRule(2, 0),
    "adamw-foreach": StateRule(2, 1),
}


class Capture(NamedTuple):
    """A trace, and the forms of its forward ops that selective replays need."""

    step: Step
    forms: dict[int, OpForm]


def capture_fake(
    model: nn.Module,
    batch: Any,
    loss_fn: LossFn,
    machine: Machine,
    *,
    device: torch.device | None = None,
    optimizer: str | Update = "none",
    blocks: Sequence[str] | None = None,
    signature: str = "",
    visitor: Visitor | None = None,
) -> Capture:
    """Trace forward, backward and update without allocating: times come from a roofline.

    The model and batch may be real, or on the meta device; neither is changed. Raises whatever
    the model raises on fake tensors (data-dependent control flow does).
    """
    device = device or fake_device(machine)
    with undrawn(device), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        weights = fake_weights(model, device)
        inputs = tree_map(lambda x: fake_input(x, device) if isinstance(x, Tensor) else x, batch)
        kept = attributes_kept(model.modules())
        with kept, mode, with_weights(model, weights):
            recorder = Recorder(model, device, run=run_small_for_real)
            watching = visitor.watching() if visitor else nullcontext()
            with watching, fake_hooks(recorder), recorder.watch_modules(), recorder:
                loss = loss_fn(model, inputs)
                if not isinstance(loss, Tensor):
                    raise StepError(f"loss_fn gave {type(loss).__name__}, not a tensor")
                with gradients_kept(loss):
                    loss.backward()  # type: ignore[no-untyped-call]
                del loss
            if visitor:
                visitor.look()
            _note_gradients(recorder, weights)
            chosen = find_blocks(recorder, blocks)
            draft = assemble_step(recorder, chosen, model=type(model).__name__, machine=machine)
            forms = op_forms(recorder)
        recorder.calls.clear()
        del inputs, weights, chosen
    if recorder.num_live():
        let_go(mode)
    update = optimizer if isinstance(optimizer, Update) else _by_rule(optimizer, draft)
    step = with_variants(_with_update(draft, update, machine, signature))
    return Capture(step, forms)


def capture_unseen(*args: Any, **kwargs: Any) -> Capture | None:
    """A step that has not run yet, from fake tensors; a warning where those cannot follow it."""
    try:
        return capture_fake(*args, **kwargs)
    except LegroomError:
        raise
    except Exception as error:  # whatever the model does that fake tensors cannot
        warnings.warn(
            f"legroom: cannot plan this step before running it ({in_short(error)}); it runs under "
            "the online rule and is planned once recorded",
            stacklevel=3,
        )
        forget_frames(error)
        return None


def capture_real(
    recorder: Recorder,
    timer: CudaTimer | CpuTimer,
    model: nn.Module,
    machine: Machine,
    *,
    like: Step | None = None,
    blocks: Sequence[str] | None = None,
    signature: str = "",
) -> Capture:
    """The trace of a step that was recorded as it ran, times and scratch measured.

    `like` is a fake trace of the same model: its blocks are used again, and it knows where tensors
    that came back for backward were done with, which a run that keeps them cannot show.
    """
    births = [0] * len(recorder.ops)
    for row in recorder.storages:
        if row.birth >= 0:
            births[row.birth] += row.num_bytes
    timer.fill(recorder.ops, births)
    set_releases(recorder, like)
    calls = same_calls(recorder, like) if like is not None else find_blocks(recorder, blocks)
    draft = assemble_step(
        recorder,
        calls,
        model=type(model).__name__,
        machine=machine,
        capture="real",
        signature=signature,
    )
    return Capture(with_variants(draft), op_forms(recorder))


def with_others(capture: Capture, found_bytes: int, known_bytes: int | None = None) -> Capture:
    """Count in what lay on the device before the step and is none of the step's own.

    `known_bytes` is what of the step was there already: all it did not make, if not given.
    """
    step = capture.step
    if known_bytes is None:
        known_bytes = sum(s.num_bytes for s in step.storages if s.birth < 0)
    if found_bytes <= known_bytes:
        return capture
    size, end = found_bytes - known_bytes, len(step.ops)
    other = Storage("other tensors on the device", size, Kind.OTHER, -1, end, end)
    step = msgspec.structs.replace(step, storages=(*step.storages, other)).check()
    return capture._replace(step=step)


def _note_gradients(recorder: Recorder, weights: dict[str, Tensor]) -> None:
    for name, tensor in weights.items():
        if tensor.grad is not None:
            recorder.name_storage(tensor.grad, f"{name}.grad", "gradient")


def _with_update(step: Step, update: Update, machine: Machine, signature: str) -> Step:
    """Append the optimizer's states and one op for its update.

    Scratch for one parameter is a tensor of that op; for all together, its workspace.
    """
    end = len(step.ops)
    grads = [i for i, s in enumerate(step.storages) if s.kind == Kind.GRADIENT]
    params = sum(step.storages[i].num_bytes for i in grads)
    sizes = {name: update.states.get(name, 0) for name in _params_of(step)}
    states = tuple(
        Storage(f"{name}.state", size, Kind.STATE, -1, end + 1, end + 1)
        for name, size in sizes.items()
        if size
    )
    scratch = (Storage("optimizer", update.single_bytes, Kind.TEMPORARY, end, end, end),)
    storages = tuple(
        Storage(
            s.name,
            s.num_bytes,
            s.kind,
            s.birth,
            _shift(s.release, end),
            _shift(s.death, end),
            s.dtype,
            s.done,
        )
        for s in step.storages
    )
    storages += scratch if update.single_bytes else ()
    op = Op(
        f"optimizer.{update.name}", "", Phase.UPDATE, -1,
        update_time(machine, params, sum(sizes.values())),
        tuple(grads), tuple(range(len(storages), len(storages) + len(states))),
        update.joint_bytes,
    )  # fmt: skip
    return Step(
        model=step.model, signature=signature, machine=step.machine, capture=step.capture,
        ops=(*step.ops, op), storages=(*storages, *states), saved=step.saved,
        blocks=step.blocks,
    ).check()  # fmt: skip


def _params_of(step: Step) -> dict[str, int]:
    """Bytes of gradients by the parameter's name."""
    rows = (s for s in step.storages if s.kind == Kind.GRADIENT)
    return {s.name.removesuffix(".grad"): s.num_bytes for s in rows}


def _by_rule(name: str, step: Step) -> Update:
    """What an optimizer known by its name alone keeps."""
    rule, params = STATE_RULES[name], _params_of(step)
    states = {param: int(size * rule.copies) for param, size in params.items()}
    return Update(name, states, 0, int(sum(params.values()) * rule.scratch))


def _shift(position: int, end: int) -> int:
    """What lasted to the end of the step lasts through the update as well."""
    return position + 1 if position >= end else position


def foreseen_update(
    optimizer: torch.optim.Optimizer | None, model: nn.Module, device: torch.device
) -> str | Update:
    """What an optimizer will keep and take; two states a weight where nobody can tell."""
    if optimizer is None:
        return "none"
    given = (optimizer, dict(model.named_parameters()), device)
    return foresee_update(*given) or states_there(*given) or "adamw"


def stand_in_loss(model: nn.Module, batch: Any) -> Tensor:
    """The model's own loss if it gives one, else a sum over all it returns."""
    return StandInLoss()(model, batch)


class StandInLoss:
    """The same, noting the bytes it would take to compute a usual loss of what was returned.

    Of a model with a loss of its own, those of what it returns beside that.
    """

    COPIES = 3
    """Cross entropy holds its input's logarithms, and two gradients of that size, in float32."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """Run the model."""
        args, kwargs = batch
        output = model(*args, **kwargs)
        loss = getattr(output, "loss", None)
        plain = dict(output) if isinstance(output, Mapping) else output
        found = [x for x in tree_leaves(plain) if isinstance(x, Tensor) and x.requires_grad]
        if isinstance(loss, Tensor):  # the caller may hold the rest on
            self.num_bytes = sum(x.numel() * x.element_size() for x in found if x is not loss)
            return loss
        if not found:
            raise StepError("the model returned nothing that needs a gradient")
        self.num_bytes = self.COPIES * sum(4 * x.numel() for x in found)
        return torch.stack([x.float().sum() for x in found]).sum()


def name_states(
    recorder: Recorder, model: nn.Module, states: Iterable[tuple[str, Tensor]] = ()
) -> None:
    """Tell a recorder which storages are gradients and optimizer states."""
    for name, param in model.named_parameters():
        if param.is_leaf and param.grad is not None:
            recorder.name_storage(param.grad, f"{name}.grad", "gradient")
    for name, state in states:
        recorder.name_storage(state, name, "state")


@contextmanager
def naming_gradients(recorder: Recorder, model: nn.Module) -> Iterator[None]:
    """Tell a recorder of gradients as they come: they may be gone when the step ends."""

    def note(name: str, param: Tensor) -> None:
        if param.grad is not None:
            recorder.name_storage(param.grad, f"{name}.grad", "gradient")

    params = ((name, p) for name, p in model.named_parameters() if p.requires_grad and p.is_leaf)
    hooks = [
        p.register_post_accumulate_grad_hook(partial(note, name))  # type: ignore[no-untyped-call]
        for name, p in params
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def held_bytes(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    device: torch.device,
    batch: Any = (),
) -> int:
    """Bytes on the device of a model, its gradients, its optimizer's states now, and a batch."""
    grads = [p.grad for p in model.parameters() if p.is_leaf]
    leaves = (*model.parameters(), *model.buffers(), *grads, *tree_leaves(batch))
    return _bytes_on(device, leaves) + state_bytes(optimizer, device)


def state_bytes(optimizer: torch.optim.Optimizer | None, device: torch.device) -> int:
    """Bytes on the device of an optimizer's states now."""
    return _bytes_on(device, tree_leaves(dict(optimizer.state) if optimizer else {}))


def _bytes_on(device: torch.device, leaves: Iterable[Any]) -> int:
    tensors = (x for x in leaves if isinstance(x, Tensor) and has_storage(x))
    return sum(x.nbytes for x in tensors if x.device.type == device.type)
