"""Carry out a plan on a live model: install hooks, follow the step, take them out again."""

import contextlib
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from legroom.memory.mechanisms.compress import decode, encode
from legroom.memory.mechanisms.entry import (
    Dropped,
    Entry,
    Handle,
    Kept,
    Packed,
    State,
    check_version,
)
from legroom.memory.mechanisms.hooks import InnerHooks, Saver, lift, shield
from legroom.memory.mechanisms.lanes import Lanes, Place
from legroom.memory.mechanisms.mover import Mover
from legroom.memory.mechanisms.recompute import Held, forget_surroundings, open_frame
from legroom.memory.mechanisms.tape import paused
from legroom.memory.online import Evictor
from legroom.memory.ops import in_backward
from legroom.memory.recorder import Recorder
from legroom.memory.region import OUTSIDE, UNKNOWN, Region
from legroom.memory.replay import Replayer
from legroom.memory.saved import (
    StorageTable,
    ViewOf,
    bare,
    flat_bytes,
    has_storage,
    hold,
    is_ours,
    weight_storages,
)
from legroom.memory.script import IN_START, OUT_START, Row, Script

_NOTHING = contextlib.nullcontext()


class Runner(Saver):
    """Follows one model's steps with a script; decides nothing."""

    def __init__(self, model: nn.Module, device: torch.device, shielded: bool = False) -> None:
        self.model, self.device = model, device
        pair = (self._pack, self._unpack)
        self._pair: tuple[Any, Any] = shield(*pair) if shielded else pair
        self.mover = Mover(device)
        self.script: Script | None = None
        self.recorder: Recorder | None = None
        self.weights = weight_storages([model])
        self.deviation = ""
        """The first way in which the last step left its script; empty if it did not."""
        self.evictor: Evictor | None = None
        """Decides as memory fills, where there is no script."""
        self.replayer = Replayer(device, self._open, self._done_with, self._note_replayed)
        self._hooks = InnerHooks()
        self._step = 0
        self._watch = contextlib.ExitStack()
        self._reset()

    def _reset(self) -> None:
        self._step += 1
        self._table: StorageTable[weakref.ref[Entry]] = StorageTable()
        self._entries: dict[int, weakref.ref[Entry]] = {}
        self._calls: dict[str, int] = {}
        self._depth = self._due = 0
        self._counted: list[bool] = []
        self._region = self._outside = Region(self.script, OUTSIDE, self.recorder is not None)

    # -- install -----------------------------------------------------------------------------

    def install(self, script: Script | None, lanes: Lanes | None) -> None:
        """Take up a script (None: follow nothing), with the lanes its moves go over."""
        self.remove()
        self.script, self.evictor = script, None
        self.mover.use(lanes)
        self.weights = weight_storages([self.model])
        forget_surroundings()
        if script is not None and not script.idle:
            modules = dict(self.model.named_modules())
            for path in {b.module for b in script.step.blocks}:
                self._hooks.add(modules[path], partial(self._enter, path), self._leave)

    def install_online(self, evictor: Evictor, lanes: Lanes) -> None:
        """Follow a rule instead of a script."""
        self.remove()
        self.evictor = evictor
        self.mover.use(lanes)
        self.weights = weight_storages([self.model])

    def remove(self) -> None:
        """Take all hooks out of the model."""
        self._hooks.remove()
        forget_surroundings()
        self.script = self.evictor = None

    @contextlib.contextmanager
    def following(self, recorder: Recorder | None = None) -> Iterator[None]:
        """One step under the script; nothing is hooked when there is nothing to do."""
        self.recorder, self.deviation = recorder, ""
        self.replayer.seconds = 0.0
        self._reset()
        self.mover.reset_counts()
        self.mover.in_turn = recorder is not None and self.device.type == "cpu"
        idle = self.script is None or self.script.idle
        if idle and recorder is None and self.evictor is None:
            yield
            return
        self._hooks.keep_innermost()
        try:
            # What a block was interrupted in is left first: `_leave` may not have been called.
            with self._saving() if self._outside.rows is not None else _NOTHING, self._watch:
                yield
        finally:
            self.recorder = None
            self._region = self._outside

    def _saving(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(*self._pair)

    def _quiet(self) -> contextlib.AbstractContextManager[Any]:
        """Keep the runtime's own work out of recordings and tapes."""
        tape = self._region.frame.tape if self._region.frame is not None else None
        modes = [mode for mode in (self.recorder, tape) if mode is not None]
        return paused(*modes) if modes else _NOTHING

    # -- blocks ------------------------------------------------------------------------------

    def _enter(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        counts = not self.replayer.running and torch.is_grad_enabled() and not in_backward()
        self._counted.append(counts)
        if not counts:
            return
        assert self.script is not None
        if self._region is not self._outside:  # inside of another block, as it was not in the trace
            self._depth += 1
            if self._region.frame is not None:
                self._region.frame.whole = True
            return
        call = self._calls.get(path, 0)
        self._calls[path] = call + 1
        block = self.script.block_at.get((path, call), UNKNOWN)
        region = Region(self.script, block, self.recorder is not None)
        how = self.script.replays.get(block)
        if how is not None:
            with self._quiet():
                region.frame = open_frame(how, module, (args, kwargs), self.device)
        if region.rows is not None and self._outside.rows is None:
            self._watch.enter_context(self._saving())
        elif region.rows is None and block != UNKNOWN:
            lift(*self._pair, self._watch)
        if region.frame is not None and region.frame.tape is not None:
            self._watch.enter_context(region.frame.tape)
        self._region = region

    def _leave(self) -> None:
        if not self._counted or not self._counted.pop():
            return
        if self._depth:
            self._depth -= 1
            return
        self._watch.close()
        region, self._region = self._region, self._outside
        frame = region.frame
        if frame is not None:
            frame.forget_random(self.device)
            frame.whole |= frame.tape is not None and frame.tape.close()
        if not region.close():
            self._stray(f"{region.name} does not save what it did in the trace")
        for held in frame.held if frame is not None else ():
            self._hand_over(held)

    def _stray(self, how: str) -> None:
        self.deviation = self.deviation or how

    def _hand_over(self, held: Held) -> None:
        """Let an argument go if its storage will leave the device."""
        assert held.kept is not None
        tensor = held.kept.tensor
        entry = self._entry_of(tensor)
        if entry is not None and entry.place is not None and entry.version == held.kept.version:
            held.handle = Handle(entry, ViewOf.of(tensor), held.kept.version)
            held.kept = None

    def _entry_of(self, tensor: Tensor) -> Entry | None:
        if not has_storage(tensor):
            return None
        found = self._table.get(tensor.untyped_storage())
        return found() if found is not None else None

    # -- saved tensors -----------------------------------------------------------------------

    def _pack(self, tensor: Tensor) -> object:
        """What autograd is to hold; the tensor with its version where there is nothing to do."""
        packed = self._region.skim(tensor)
        if packed is None:
            packed = self._pack_ours(tensor)
            self._region.learn()
        return packed

    def _pack_ours(self, tensor: Tensor) -> object:
        ours = self._region.sure or is_ours(tensor, self.device, self.weights)
        if not ours or (in_backward() and not self._region.sure):
            return hold(tensor)
        note = self.recorder.pack(tensor) if self.recorder is not None else -1
        if self.evictor is not None:
            packed: object = self._pack_online(bare(tensor, self.recorder is not None), note)
        elif self.script is None:
            packed = Kept(bare(tensor, self.recorder is not None), note)
        else:
            packed = self._pack_planned(self.script, tensor, note)
        if self.recorder is not None:
            self.recorder.watch_saved(packed, note)
        return packed

    def _pack_planned(self, script: Script, tensor: Tensor, note: int) -> object:
        region, frame = self._region, self._region.frame
        row = region.next_row(tensor.untyped_storage().nbytes())
        if row is None:
            self._stray(f"{region.name} saves another tensor than in the trace")
            return Kept(bare(tensor, self.recorder is not None), note)
        if script.due:
            self._advance(row.packed)
        storage, dropped = row.storage, row.storage in script.dropped
        wanted = frame is not None and storage in frame.how.wants
        other = (wanted or dropped) and region.is_other(tensor, storage)
        if dropped and frame is not None and not frame.whole:
            return Dropped(frame, region.index, tensor, storage, note, row.unpacked, self._step)
        tensor = bare(tensor, self.recorder is not None)
        stays = storage not in script.acted or dropped or other
        entry = None if stays else self._take(script, row, tensor, note)
        when = (note, row.unpacked, self._step)
        if entry is None:
            packed: Kept | Handle = Kept(tensor, *when)
        else:
            packed = Handle(entry, ViewOf.of(tensor), tensor._version, *when)
        if wanted and not other:
            self._offer(storage, packed if entry is not None else Kept(tensor))
        return packed

    def _pack_online(self, tensor: Tensor, note: int) -> Handle:
        """No script: hold the storage, and let the rule send away what was saved first."""
        assert self.evictor is not None
        entry = self._entry_of(tensor)
        if entry is None or entry.version != tensor._version:
            entry = Entry(-1, tensor.untyped_storage().nbytes(), tensor._version)
            entry.note = self.recorder.saved[note].storage if self.recorder is not None else -1
            with self._quiet():
                entry.flat, entry.source = flat_bytes(tensor), tensor
                self._table.put(tensor.untyped_storage(), weakref.ref(entry))
                self.evictor.add(entry, self.mover)
        return Handle(entry, ViewOf.of(tensor), tensor._version, note=note)

    def _offer(self, storage: int, packed: Kept | Handle) -> None:
        """Keep a saved tensor at hand for its block's selective replay."""
        assert self._region.frame is not None
        sources = self._region.frame.sources
        if storage not in sources:
            sources[storage] = packed
            if isinstance(packed, Handle):
                packed.entry.waiting += 1

    def _take(self, script: Script, row: Row, tensor: Tensor, note: int) -> Entry | None:
        """The entry for a saved tensor's storage; None if it is to stay as it is."""
        entry = self._entry_of(tensor)
        if entry is not None:
            return entry if entry.version == tensor._version else None
        entry = Entry(row.storage, row.num_bytes, tensor._version)
        entry.note = self.recorder.saved[note].storage if self.recorder is not None else -1
        with self._quiet():
            self._send(script, entry, row, tensor)
        link = weakref.ref(entry)
        self._table.put(tensor.untyped_storage(), link)
        self._entries[row.storage] = link
        return entry

    def _send(self, script: Script, entry: Entry, row: Row, tensor: Tensor) -> None:
        """Have a storage just saved moved or compressed, as the script says."""
        move = script.moves.get(row.storage)
        if move is not None:
            entry.flat, entry.source = flat_bytes(tensor), tensor
            entry.place = Place(move.tier, script.offsets[row.storage], row.num_bytes)
            if move.out_start <= row.packed:
                self.mover.copy_out(entry)
            if move.out_wait <= row.packed:  # what is due here may be done with, for saves before
                self.mover.leave(entry)
            return
        with torch.no_grad():
            entry.packed = encode(script.codecs[row.storage], flat_bytes(tensor), tensor.dtype)
        entry.state = State.SMALL

    def _unpack(self, packed: Kept | Handle | Dropped | tuple[Tensor, int]) -> Tensor:
        if type(packed) is tuple:
            tensor, version = packed
            if tensor._version != version:
                check_version(tensor, version)
            return tensor
        assert isinstance(packed, Packed)
        if self.recorder is not None and packed.note >= 0:
            self.recorder.unpack(packed.note)
        asked, packed.asked = packed.asked, packed.asked + 1
        if asked < len(packed.unpacked) and packed.step == self._step:
            self._advance(packed.unpacked[asked])
        if isinstance(packed, Dropped):
            if packed.back is None:
                with self._quiet():
                    self.replayer.replay(packed)
            return packed.take()
        if isinstance(packed, Kept):
            return packed.open()
        assert isinstance(packed, Handle)
        tensor = self._open(packed)
        if asked == 0:
            self._done_with(packed.entry)
        return tensor

    def _open(self, handle: Handle) -> Tensor:
        """The tensor a handle stands for, its bytes brought back if need be."""
        entry = handle.entry
        self._bring(entry)
        if entry.source is not None:
            check_version(entry.source, handle.version)
        if entry.spoiled is not None:
            raise entry.spoiled
        flat = entry.flat
        assert flat is not None
        if handle.view.is_of(flat):
            return flat
        with self._quiet(), torch.no_grad():
            return handle.view.on(flat)

    def _bring(self, entry: Entry) -> None:
        """See to it that an entry's bytes are on the device."""
        state = entry.state
        if state is State.HERE:
            return
        with self._quiet():
            if state is State.SMALL:
                assert entry.packed is not None
                entry.flat, entry.state = decode(entry.packed, entry.num_bytes), State.HERE
                self._note_back(entry)
            elif state is State.LEAVING:
                self.mover.stay(entry)
            else:
                if state is State.AWAY:
                    self._fetch(entry)
                self.mover.arrive(entry)

    def _fetch(self, entry: Entry) -> None:
        self.mover.copy_in(entry)
        self._note_back(entry)

    def _note_back(self, entry: Entry) -> None:
        if self.recorder is not None and entry.note >= 0 and entry.flat is not None:
            self.recorder.adopt(entry.flat, entry.note)

    def _note_replayed(self, one: Dropped) -> None:
        if self.recorder is not None and one.note >= 0 and one.back is not None:
            self.recorder.adopt(one.back, self.recorder.saved[one.note].storage)

    def _done_with(self, entry: Entry) -> None:
        """One handle less waits; after the last, the tensors handed out hold the bytes."""
        entry.waiting -= 1
        if entry.waiting > 0 or entry.state is not State.HERE:
            return
        if entry.place is not None:
            entry.flat, entry.state = None, State.AWAY
        elif entry.packed is not None:
            entry.flat, entry.state = None, State.SMALL

    def _advance(self, position: int) -> None:
        """Do what is due up to a position."""
        due = self.script.due if self.script is not None else ()
        while self._due < len(due) and due[self._due].position <= position:
            item = due[self._due]
            self._due += 1
            link = self._entries.get(item.storage)
            entry = link() if link is not None else None
            if entry is not None:
                with self._quiet():
                    self._do(item.rank, entry)

    def _do(self, rank: int, entry: Entry) -> None:
        if rank == OUT_START:
            if entry.state is State.HERE and entry.ticket is None and entry.flat is not None:
                self.mover.copy_out(entry)
        elif rank == IN_START:
            if entry.state is State.AWAY and entry.waiting > 0:
                self._fetch(entry)
        elif entry.state is State.LEAVING:
            self.mover.leave(entry)
