"""Run blocks again on behalf of the runner, and put what comes back into its entries."""

import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from legroom.core.errors import StepError
from legroom.memory.mechanisms import recompute as again
from legroom.memory.mechanisms.entry import Entry, Handle, State
from legroom.memory.mechanisms.recompute import Frame, Held, SelectiveMode
from legroom.memory.saved import StorageTable, flat_bytes, is_ours


class Replayer:
    """Brings dropped entries back; the four callbacks reach into the runner's other entries."""

    def __init__(
        self,
        device: torch.device,
        bring: Callable[[Entry], None],
        open_handle: Callable[[Handle], Tensor],
        done_with: Callable[[Entry], None],
        note_back: Callable[[Entry], None],
    ) -> None:
        self.device = device
        self.running = False
        self.seconds = 0.0
        """Host time of this step's replays."""
        self.whole: set[str] = set()
        """Blocks whose selective replay met another op than traced: they run again whole."""
        self._bring, self._open, self._done_with = bring, open_handle, done_with
        self._note_back = note_back
        self.weights: StorageTable[bool] = StorageTable()

    def replay(self, asked: Entry) -> None:
        """Bring back a dropped storage, and all else its block call dropped and still owes."""
        frame = asked.frame
        assert frame is not None
        live = [entry for entry in (link() for link in frame.dropped) if entry is not None]
        missing = {e.ordinal: e for e in live if e.state is State.DROPPED and e.waiting > 0}
        missing[asked.ordinal] = asked
        self.running, started = True, time.perf_counter()
        try:
            self._run(frame, missing)
        finally:
            self.running = False
            self.seconds += time.perf_counter() - started
            self._release_sources(frame)
        if missing:
            raise StepError(
                f"running {frame.how.name} again did not save the same tensors as the first time; "
                "its forward may depend on something that changed. Keep it out of the plan by "
                "naming the blocks to use (blocks=...), and please report the model."
            )

    def _run(self, frame: Frame, missing: dict[int, Entry]) -> None:
        mode, wanted = self._mode(frame), dict(missing)
        try:
            args = tree_map(self._open_arg, frame.args)
            again.replay(frame, self.device, args, self._catcher(frame, missing, mode), mode)
        except again.Diverged:
            self.whole.add(frame.how.name)
            for entry in wanted.values():
                entry.flat, entry.state = None, State.DROPPED
            missing.update(wanted)
            args = tree_map(self._open_arg, frame.args)
            again.replay(frame, self.device, args, self._catcher(frame, missing, None), None)

    def _catcher(
        self, frame: Frame, missing: dict[int, Entry], mode: SelectiveMode | None
    ) -> Callable[[Tensor], None]:
        """Takes each tensor the replay saves, by its number, until nothing is missing."""
        count = 0

        def catch(tensor: Tensor) -> None:
            nonlocal count
            if not is_ours(tensor, self.device, self.weights):
                return
            ordinal, count = count, count + 1
            entry = missing.get(ordinal)
            if entry is None:
                return
            if tensor.untyped_storage().nbytes() != entry.num_bytes:
                raise StepError(f"running {frame.how.name} again saved a tensor of another size")
            with mode.off() if mode is not None else contextlib.nullcontext():
                entry.flat, entry.state = flat_bytes(tensor.detach()), State.HERE
            self._note_back(entry)
            del missing[ordinal]
            if not missing:
                raise again.StopReplay

        return catch

    def _open_arg(self, held: Any) -> Any:
        if not isinstance(held, Held):
            return held
        if held.kept is not None:
            tensor = held.kept.open()
        else:
            assert held.handle is not None
            tensor = self._open(held.handle)
        if isinstance(tensor, nn.Parameter):
            return tensor
        return tensor.detach().requires_grad_(held.grad)

    def _mode(self, frame: Frame) -> SelectiveMode | None:
        """A mode that skips what the variant does not run, for a selective variant."""
        how = frame.how
        ready = how.runs is not None and not how.wants - frame.sources.keys()
        if not how.forms or not ready or frame.whole or how.name in self.whole:
            return None
        assert how.runs is not None

        def kept(storage: int) -> Tensor | None:
            source = frame.sources.get(storage)
            if isinstance(source, Handle):
                self._bring(source.entry)
                return source.entry.flat
            return flat_bytes(source.open()) if source is not None else None

        return SelectiveMode(how.forms, how.runs, kept)

    def _release_sources(self, frame: Frame) -> None:
        for source in frame.sources.values():
            if isinstance(source, Handle):
                self._done_with(source.entry)
        frame.sources.clear()
