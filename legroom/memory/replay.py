"""Run blocks again on behalf of the runner, and hand out what comes back."""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from legroom.core.errors import StepError
from legroom.memory.mechanisms import recompute as again
from legroom.memory.mechanisms.entry import Dropped, Entry, Handle
from legroom.memory.mechanisms.recompute import Frame, Held
from legroom.memory.mechanisms.tape import Diverged, Player, Tape
from legroom.memory.saved import is_weight


class Replayer:
    """Brings dropped tensors back; the three callbacks reach into the runner's books."""

    def __init__(
        self,
        device: torch.device,
        open_handle: Callable[[Handle], Tensor],
        done_with: Callable[[Entry], None],
        note_back: Callable[[Dropped], None],
    ) -> None:
        self.device = device
        self.running = False
        self.seconds = 0.0
        """Host time of this step's replays."""
        self.whole: set[str] = set()
        """Blocks that ran again whole, though their plan was to skip ops."""
        self._open, self._done_with = open_handle, done_with
        self._note_back = note_back

    def replay(self, asked: Dropped) -> None:
        """Bring back a dropped tensor, and all else its block call dropped and still owes."""
        frame = asked.frame
        live = [one for one in (link() for link in frame.dropped) if one is not None]
        owed = [one for one in live if one.back is None and one.asked < asked.asked]
        missing = {one.index: one for one in (*owed, asked)}
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

    def _run(self, frame: Frame, missing: dict[int, Dropped]) -> None:
        if frame.tape is not None:
            if self._play(frame, frame.tape, missing):
                return
            self.whole.add(frame.how.name)
        opened = {id(held): self._open_arg(held) for held in frame.held}
        args = again.map_args(lambda x: opened[id(x)] if isinstance(x, Held) else x, frame.args)
        again.replay(frame, self.device, args, self._catcher(missing))

    def _play(self, frame: Frame, tape: Tape, missing: dict[int, Dropped]) -> bool:
        """Run only the ops on the tape; False if they do not lead there."""
        if frame.whole or frame.how.wants - frame.sources.keys():
            return False

        def kept(storage: int) -> Tensor | None:
            source = frame.sources.get(storage)
            if isinstance(source, Handle):
                return self._open(source)
            return source.open() if source is not None else None

        again.check_unchanged(frame, tape.is_unchanged())  # ops that are not run again do not count
        wanted = frozenset(one.storage for one in missing.values())
        try:
            with again.rewound(frame, self.device):
                player = Player(tape.calls, kept, lambda rank: self._open_arg(frame.held[rank]))
                back = player.play(wanted)
        except Diverged:
            return False
        with torch.no_grad():
            for one in missing.values():
                assert one.view is not None
                self._put(one, one.view.on(back[one.storage]))
        missing.clear()
        return True

    def _put(self, one: Dropped, tensor: Tensor) -> None:
        one.put(tensor)
        self._note_back(one)

    def _catcher(self, missing: dict[int, Dropped]) -> Callable[[Tensor], None]:
        """Takes each tensor the replay saves, by its number, until nothing is missing."""
        count = 0

        def catch(tensor: Tensor) -> None:
            nonlocal count
            one = missing.pop(count, None)
            count += 1
            if one is not None:
                self._put(one, tensor.detach())
                if not missing:
                    raise again.StopReplay

        return catch

    def _open_arg(self, held: Held) -> Tensor:
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
