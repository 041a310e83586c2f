"""Run blocks again on behalf of the runner, and put what comes back into its entries."""

import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from legroom.core.errors import StepError
from legroom.memory.mechanisms import recompute as again
from legroom.memory.mechanisms.entry import Entry, Handle, State
from legroom.memory.mechanisms.recompute import Frame, Held, OpForm, SelectiveMode
from legroom.memory.saved import StorageTable, flat_bytes, is_ours
from legroom.memory.script import Script


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
        self.whole: set[int] = set()
        """Blocks whose selective replay met another op than traced: they run again whole."""
        self._bring, self._open, self._done_with = bring, open_handle, done_with
        self._note_back = note_back
        self._script: Script | None = None
        self._forms: dict[int, OpForm] = {}
        self._weights: StorageTable[bool] = StorageTable()

    def use(
        self, script: Script | None, forms: dict[int, OpForm], weights: StorageTable[bool]
    ) -> None:
        """Replay by this script from now on."""
        self._script, self._forms, self._weights = script, forms, weights
        self.whole.clear()

    def replay(self, asked: Entry) -> None:
        """Bring back a dropped storage, and all else its block call dropped and still owes."""
        frame = asked.frame
        assert frame is not None
        live = [entry for entry in (link() for link in frame.dropped) if entry is not None]
        missing = {e.storage: e for e in live if e.state is State.DROPPED and e.waiting > 0}
        missing[asked.storage] = asked
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
            self.whole.add(frame.block)
            for entry in wanted.values():
                entry.flat, entry.state = None, State.DROPPED
            missing.update(wanted)
            args = tree_map(self._open_arg, frame.args)
            again.replay(frame, self.device, args, self._catcher(frame, missing, None), None)

    def _catcher(
        self, frame: Frame, missing: dict[int, Entry], mode: SelectiveMode | None
    ) -> Callable[[Tensor], None]:
        """Takes each tensor the replay saves, by its number, until nothing is missing."""
        assert self._script is not None
        rows, count = self._script.rows[frame.block], 0

        def catch(tensor: Tensor) -> None:
            nonlocal count
            if not is_ours(tensor, self.device, self._weights):
                return
            row = rows[count] if count < len(rows) else None
            count += 1
            entry = missing.get(row.storage) if row is not None else None
            if row is None or entry is None:
                return
            if tensor.untyped_storage().nbytes() != row.num_bytes:
                raise StepError(f"running {frame.how.name} again saved a tensor of another size")
            with mode.off() if mode is not None else contextlib.nullcontext():
                entry.flat, entry.state = flat_bytes(tensor.detach()), State.HERE
            self._note_back(entry)
            del missing[row.storage]
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
        return tensor.detach().requires_grad_(held.grad)

    def _mode(self, frame: Frame) -> SelectiveMode | None:
        """A mode that skips what the variant does not run, for a selective variant."""
        how = frame.how
        if how.runs is None or frame.block in self.whole or how.wants - frame.sources.keys():
            return None

        def kept(storage: int) -> Tensor | None:
            source = frame.sources.get(storage)
            if isinstance(source, Handle):
                self._bring(source.entry)
                return source.entry.flat
            return flat_bytes(source.open()) if source is not None else None

        forms = [self._forms[i] for i in range(how.first, how.first + how.num_ops)]
        return SelectiveMode(forms, how.runs, kept)

    def _release_sources(self, frame: Frame) -> None:
        for source in frame.sources.values():
            if isinstance(source, Handle):
                self._done_with(source.entry)
        frame.sources.clear()
