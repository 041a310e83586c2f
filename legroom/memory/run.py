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
from legroom.memory.mechanisms.entry import Entry, Handle, Kept, State, check_version
from legroom.memory.mechanisms.hooks import InnerHooks
from legroom.memory.mechanisms.lanes import Lanes, Place
from legroom.memory.mechanisms.mover import Mover
from legroom.memory.mechanisms.recompute import Frame, Held, forget_surroundings, open_frame
from legroom.memory.mechanisms.tape import paused
from legroom.memory.online import Evictor
from legroom.memory.ops import in_backward
from legroom.memory.recorder import Recorder
from legroom.memory.replay import Replayer
from legroom.memory.saved import (
    StorageTable,
    ViewOf,
    flat_bytes,
    has_storage,
    is_ours,
    weight_storages,
)
from legroom.memory.script import IN_START, OUT_START, Row, Script

_NOTHING = contextlib.nullcontext()


class Runner:
    """Follows one model's steps with a script; decides nothing."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model, self.device = model, device
        self.mover = Mover(device)
        self.script: Script | None = None
        self.recorder: Recorder | None = None
        self.weights = weight_storages([model])
        self.deviation = ""
        """The first way in which the last step left its script; empty if it did not."""
        self.evictor: Evictor | None = None
        """Decides as memory fills, where there is no script."""
        self.replayer = Replayer(device, self._open, self._done_with, self._note_back)
        self._hooks = InnerHooks()
        self._step = 0
        self._watch: contextlib.ExitStack | None = None
        self._reset()

    def _reset(self) -> None:
        self._step += 1
        self._table: StorageTable[weakref.ref[Entry]] = StorageTable()
        self._entries: dict[int, weakref.ref[Entry]] = {}
        self._ordinals: dict[int, int] = {}
        self._calls: dict[str, int] = {}
        self._block = -1
        self._depth = 0
        self._frame: Frame | None = None
        self._due = 0
        self._rows: list[Row] | None = []

    # -- install -----------------------------------------------------------------------------

    def install(self, script: Script | None, lanes: Lanes | None) -> None:
        """Take up a script (None: follow nothing), with the lanes its moves go over."""
        self.remove()
        self.script, self.evictor = script, None
        self.mover.use(lanes)
        self._find_weights()
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
        self._find_weights()

    def _find_weights(self) -> None:
        self.weights = self.replayer.weights = weight_storages([self.model])

    def remove(self) -> None:
        """Take all hooks out of the model."""
        self._hooks.remove()
        self.script = self.evictor = None

    @contextlib.contextmanager
    def following(self, recorder: Recorder | None = None) -> Iterator[None]:
        """One step under the script; nothing is hooked when there is nothing to do."""
        self.recorder, self.deviation = recorder, ""
        self.replayer.seconds = 0.0
        self._reset()
        self.mover.reset_counts()
        idle = self.script is None or self.script.idle
        if idle and recorder is None and self.evictor is None:
            yield
            return
        self._hooks.keep_innermost()
        self._enter_region(-1)
        try:
            with self._saving() if self._rows is not None else _NOTHING:
                yield
        finally:
            self._unwatch()
            self.recorder = None
            self._block, self._frame = -1, None

    def _enter_region(self, block: int) -> None:
        """From here on tensors are saved in a block, or outside of all (-1)."""
        self._block, script = block, self.script
        if self.recorder is not None or script is None:
            self._rows = script.rows.get(block, []) if script is not None else []
        else:
            self._rows = script.rows[block] if block in script.watched else None

    def _saving(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(self._pack, self._unpack)

    def _unwatch(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()

    def _quiet(self) -> contextlib.AbstractContextManager[Any]:
        """Keep the runtime's own work out of recordings and tapes."""
        tape = self._frame.tape if self._frame is not None else None
        modes = [mode for mode in (self.recorder, tape) if mode is not None]
        return paused(*modes) if modes else _NOTHING

    # -- blocks ------------------------------------------------------------------------------

    def _enter(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self.replayer.running or not torch.is_grad_enabled() or in_backward():
            return
        assert self.script is not None
        if self._block != -1:  # inside of another block, which the trace does not have
            self._depth += 1
            if self._frame is not None:
                self._frame.whole = True
            return
        call = self._calls.get(path, 0)
        self._calls[path] = call + 1
        outside = self._rows is not None
        self._enter_region(self.script.block_at.get((path, call), -2))
        if self._block == -2 and not self.deviation:
            self.deviation = f"{path} runs more often than in the trace"
        how = self.script.replays.get(self._block)
        self._watch = contextlib.ExitStack()
        if how is not None:
            with self._quiet():
                self._frame = open_frame(self._block, how, module, (args, kwargs), self.device)
        if self._rows is not None and not outside:
            self._watch.enter_context(self._saving())
        if self._frame is not None and self._frame.tape is not None:
            self._watch.enter_context(self._frame.tape)

    def _leave(self) -> None:
        if self.replayer.running or in_backward():
            return
        if self._depth:
            self._depth -= 1
            return
        self._unwatch()
        frame = self._frame
        if frame is not None:
            frame.forget_random(self.device)
            frame.whole |= self._ordinals.get(self._block, 0) != frame.how.num_saves
            frame.whole |= frame.tape is not None and frame.tape.close()
            for held in frame.held:
                self._hand_over(held)
        self._frame = None
        self._enter_region(-1)

    def _hand_over(self, held: Held) -> None:
        """Let an argument go if its storage will leave the device."""
        assert held.kept is not None
        tensor = held.kept.tensor
        entry = self._entry_of(tensor)
        if entry is not None and entry.place is not None:
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
        if self._rows is None or in_backward() or not is_ours(tensor, self.device, self.weights):
            return tensor, tensor._version
        note = self.recorder.pack(tensor) if self.recorder is not None else -1
        if self.evictor is not None:
            packed: object = self._pack_online(tensor, note)
        elif self.script is None:
            packed = Kept(tensor, note)
        else:
            packed = self._pack_planned(self.script, tensor, note)
        if self.recorder is not None:
            self.recorder.watch_saved(packed, note)
        return packed

    def _pack_planned(self, script: Script, tensor: Tensor, note: int) -> Kept | Handle:
        ordinal = self._ordinals.get(self._block, 0)
        self._ordinals[self._block] = ordinal + 1
        row = self._row(script, ordinal, tensor)
        if row is None:
            return Kept(tensor, note)
        self._advance(row.packed)
        storage, frame = row.storage, self._frame
        wanted = frame is not None and storage in frame.how.wants
        acted = storage in script.acted
        if not acted and not wanted:
            return Kept(tensor, note, row.unpacked, self._step)
        if (wanted or storage in script.dropped) and self._is_other(tensor, storage):
            return Kept(tensor, note, row.unpacked, self._step)
        entry = self._take(script, row, ordinal, tensor, note) if acted else None
        if entry is None:
            if wanted:  # detached, else the frame would hold the graph that holds the frame
                self._offer(storage, Kept(tensor.detach()))
            return Kept(tensor, note, row.unpacked, self._step)
        view, version = ViewOf.of(tensor), tensor._version
        handle = Handle(entry, view, version, note, row.unpacked, self._step)
        if wanted and entry.state is not State.DROPPED:
            self._offer(storage, handle)
        return handle

    def _pack_online(self, tensor: Tensor, note: int) -> Handle:
        """No script: hold the storage, and let the rule send away what was saved first."""
        assert self.evictor is not None
        entry = self._entry_of(tensor)
        if entry is None or entry.version != tensor._version:
            entry = Entry(-1, tensor.untyped_storage().nbytes(), tensor._version)
            entry.note = self.recorder.saved[note].storage if self.recorder is not None else -1
            with self._quiet():
                entry.flat, entry.source = flat_bytes(tensor), tensor.detach()
                self._table.put(tensor.untyped_storage(), weakref.ref(entry))
                self.evictor.add(entry, self.mover)
        return Handle(entry, ViewOf.of(tensor), tensor._version, note=note)

    def _row(self, script: Script, ordinal: int, tensor: Tensor) -> Row | None:
        """The row the script has for this save, if it is the one expected."""
        rows = self._rows or []
        if ordinal < len(rows) and rows[ordinal].num_bytes == tensor.untyped_storage().nbytes():
            return rows[ordinal]
        if self._frame is not None:
            self._frame.whole = True
        if not self.deviation:
            where = script.step.blocks[self._block].name if self._block >= 0 else "the step"
            self.deviation = f"save {ordinal} of {where} differs from the trace"
        return None

    def _is_other(self, tensor: Tensor, storage: int) -> bool:
        """Whether a tape knows a saved tensor as another one than the trace has there."""
        frame = self._frame
        if frame is None or frame.tape is None or frame.tape.is_storage(tensor, storage):
            return False
        frame.whole = True
        return True

    def _offer(self, storage: int, packed: Kept | Handle) -> None:
        """Keep a saved tensor at hand for its block's selective replay."""
        assert self._frame is not None
        if storage not in self._frame.sources:
            self._frame.sources[storage] = packed
            if isinstance(packed, Handle):
                packed.entry.waiting += 1

    def _take(
        self, script: Script, row: Row, ordinal: int, tensor: Tensor, note: int
    ) -> Entry | None:
        """The entry for a saved tensor's storage; None if it is to stay as it is."""
        storage = row.storage
        entry = self._entry_of(tensor)
        if entry is not None:
            return entry if entry.version == tensor._version else None
        frame = self._frame
        if storage in script.dropped and (
            frame is None or frame.whole or script.dropped[storage] != frame.block
        ):
            return None
        entry = Entry(storage, row.num_bytes, tensor._version)
        entry.ordinal = ordinal
        entry.note = self.recorder.saved[note].storage if self.recorder is not None else -1
        if storage in script.dropped:
            assert frame is not None
            entry.state, entry.frame = State.DROPPED, frame
            frame.dropped.append(weakref.ref(entry))
        else:
            with self._quiet():
                self._send(script, entry, row, tensor)
        link = weakref.ref(entry)
        self._table.put(tensor.untyped_storage(), link)
        self._entries[storage] = link
        return entry

    def _send(self, script: Script, entry: Entry, row: Row, tensor: Tensor) -> None:
        """Have a storage just saved moved or compressed, as the script says."""
        move = script.moves.get(row.storage)
        if move is not None:
            entry.flat, entry.source = flat_bytes(tensor), tensor.detach()
            entry.place = Place(move.tier, script.offsets[row.storage], row.num_bytes)
            if move.out_start <= row.packed:
                self.mover.copy_out(entry)
            return
        with torch.no_grad():
            codec = script.codecs[row.storage]
            entry.packed = encode(codec, flat_bytes(tensor), tensor.dtype)
        entry.state = State.SMALL

    def _unpack(self, packed: Kept | Handle | tuple[Tensor, int]) -> Tensor:
        if type(packed) is tuple:
            tensor, version = packed
            if tensor._version != version:
                check_version(tensor, version)
            return tensor
        assert isinstance(packed, Kept | Handle)
        if self.recorder is not None and packed.note >= 0:
            self.recorder.unpack(packed.note)
        asked, packed.asked = packed.asked, packed.asked + 1
        if asked < len(packed.unpacked) and packed.step == self._step:
            self._advance(packed.unpacked[asked])
        if isinstance(packed, Kept):
            return packed.open()
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
            if state is State.DROPPED:
                self.replayer.replay(entry)
            elif state is State.SMALL:
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

    def _done_with(self, entry: Entry) -> None:
        """One handle less waits; after the last, the tensors handed out hold the bytes."""
        entry.waiting -= 1
        if entry.waiting > 0 or entry.state is not State.HERE:
            return
        if entry.place is not None:
            entry.flat, entry.state = None, State.AWAY
        elif entry.frame is not None:
            entry.flat, entry.state = None, State.DROPPED
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
