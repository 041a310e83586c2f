"""Run blocks again on behalf of the runner, and put what comes back into its entries."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from legroom.core.errors import StepError
from legroom.memory.mechanisms import recompute as again
from legroom.memory.mechanisms.entry import Entry, Handle, State
from legroom.memory.mechanisms.recompute import Frame, Held
from legroom.memory.mechanisms.tape import Diverged, Player, Tape
from legroom.memory.saved import StorageTable, is_ours, is_weight


class Replayer:
    """Brings dropped entries back; the three callbacks reach into the runner's other entries."""

    def __init__(
        self,
        device: torch.device,
        open_handle: Callable[[Handle], Tensor],
        done_with: Callable[[Entry], None],
        note_back: Callable[[Entry], None],
    ) -> None:
        self.device = device
        self.running = False
        self.seconds = 0.0
        """Host time of this step's replays."""
        self.whole: set[str] = set()
        """Blocks that ran again whole, though their plan was to skip ops."""
        self._open, self._done_with = open_handle, done_with
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
        if frame.tape is not None:
            if self._play(frame, frame.tape, missing):
                return
            self.whole.add(frame.how.name)
        args = again.map_args(self._open_arg, frame.args)
        again.replay(frame, self.device, args, self._catcher(frame, missing))

    def _play(self, frame: Frame, tape: Tape, missing: dict[int, Entry]) -> bool:
        """Run only the ops on the tape; False if they do not lead there."""
        if frame.whole or frame.how.wants - frame.sources.keys():
            return False
        entries = {entry.storage: entry for entry in missing.values()}

        def kept(storage: int) -> Tensor | None:
            source = frame.sources.get(storage)
            if isinstance(source, Handle):
                return self._open(source)
            return source.open() if source is not None else None

        try:
            with again.rewound(frame, self.device):
                player = Player(tape.calls, kept, lambda rank: self._open_arg(frame.held[rank]))
                back = player.play(frozenset(entries))
        except Diverged:
            return False
        for storage, entry in entries.items():
            self._put(frame, entry, back[storage])
        missing.clear()
        return True

    def _put(self, frame: Frame, entry: Entry, tensor: Tensor) -> None:
        if tensor.untyped_storage().nbytes() != entry.num_bytes:
            raise StepError(f"running {frame.how.name} again saved a tensor of another size")
        entry.flat, entry.state = tensor, State.HERE
        self._note_back(entry)

    def _catcher(self, frame: Frame, missing: dict[int, Entry]) -> Callable[[Tensor], None]:
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
            self._put(frame, entry, tensor.detach())
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
        if is_weight(tensor):
            return tensor
        return tensor.detach().requires_grad_(held.grad)

    def _release_sources(self, frame: Frame) -> None:
        for source in frame.sources.values():
            if isinstance(source, Handle):
                self._done_with(source.entry)
        frame.sources.clear()
