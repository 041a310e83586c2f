"""Carry out a plan on a live model: install hooks, follow the step, take them out again."""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from legroom.core.errors import StepError
from legroom.memory.mechanisms import recompute as again
from legroom.memory.mechanisms.compress import decode, encode
from legroom.memory.mechanisms.entry import Entry, Handle, Kept, State
from legroom.memory.mechanisms.lanes import Lanes, Place
from legroom.memory.mechanisms.recompute import Frame, OpForm, RandomState
from legroom.memory.plan import sources
from legroom.memory.recorder import Recorder, in_backward
from legroom.memory.saved import StorageTable, ViewOf, flat_bytes, is_ours, weight_storages
from legroom.memory.script import IN_START, OUT_START, Row, Script


class Held:
    """An argument of a block, kept for its replay: by handle if we look after its storage."""

    __slots__ = ("grad", "handle", "kept")

    def __init__(self, tensor: Tensor) -> None:
        self.kept: Kept | None = Kept(tensor.detach())
        self.handle: Handle | None = None
        self.grad = tensor.requires_grad


class Runner:
    """Follows one model's steps with a script; decides nothing."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model, self.device = model, device
        self.lanes: Lanes | None = None
        self.weights = weight_storages([model])
        self.script: Script | None = None
        self.forms: dict[int, OpForm] = {}
        """Forms of the trace's ops, where a selective replay needs them."""
        self.recorder: Recorder | None = None
        self.deviation = ""
        """The first way in which the last step left its script; empty if it did not."""
        self.replayed_s = 0.0
        self._hooks: list[Any] = []
        self._owners: dict[int, weakref.ref[Entry]] = {}
        self._replaying = False
        self._barred: set[int] = set()
        self._reset()

    def _reset(self) -> None:
        self._table: StorageTable[weakref.ref[Entry]] = StorageTable()
        self._entries: dict[int, weakref.ref[Entry]] = {}
        self._ordinals: dict[int, int] = {}
        self._calls: dict[str, int] = {}
        self._block = -1
        self._frame: Frame | None = None
        self._position = 0
        self._due = 0

    # -- install -----------------------------------------------------------------------------

    def install(self, script: Script | None, lanes: Lanes | None, forms: dict[int, OpForm]) -> None:
        """Take up a script (None: follow nothing), with the lanes its moves go over."""
        self.remove()
        self.script, self.lanes, self.forms = script, lanes, forms
        self._owners.clear()
        self.weights = weight_storages([self.model])
        if script is None:
            return
        modules = dict(self.model.named_modules())
        for path in {b.module for b in script.step.blocks}:
            self._hook(path, modules[path])

    def _hook(self, path: str, module: nn.Module) -> None:
        def enter(mod: nn.Module, args: Any, kwargs: Any) -> None:
            if mod is module:
                self._enter(path, mod, args, kwargs)

        def leave(mod: nn.Module, args: Any, output: Any) -> None:
            if mod is module:
                self._leave()

        # Ours run innermost, so that the block is its forward and nothing else.
        self._hooks.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        self._hooks.append(
            module.register_forward_hook(leave, prepend=True, always_call=True)
        )

    def remove(self) -> None:
        """Take all hooks out of the model."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.script = None

    @contextlib.contextmanager
    def following(self, recorder: Recorder | None = None) -> Iterator[None]:
        """One step under the script; nothing is hooked when there is nothing to do."""
        self.recorder, self.deviation = recorder, ""
        self._reset()
        if recorder is None and (self.script is None or self.script.idle):
            yield
            return
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        try:
            with hooks:
                yield
        finally:
            self.recorder = None
            self._block, self._frame = -1, None

    # -- blocks ------------------------------------------------------------------------------

    def _enter(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._replaying or not torch.is_grad_enabled() or in_backward():
            return
        assert self.script is not None
        call = self._calls.get(path, 0)
        self._calls[path] = call + 1
        self._block = self.script.block_at.get((path, call), -2)
        variant = self.script.variants.get(self._block)
        if variant is None:
            self._frame = None
            return
        rows, cache = again.autocast_state()
        draws = any(self.script.step.ops[i].random for i in range(*self._span()))
        self._frame = Frame(
            block=self._block,
            name=self.script.step.blocks[self._block].name,
            module=module,
            args=tree_map(lambda x: Held(x) if isinstance(x, Tensor) else x, (args, kwargs)),
            rng=RandomState.take(self.device) if draws else None,
            autocast=rows,
            cache=cache,
            dropped=[],
            wants=frozenset(sources(self.script.step, self._block, variant)),
            sources={},
        )

    def _span(self) -> tuple[int, int]:
        assert self.script is not None
        block = self.script.step.blocks[self._block]
        return block.first, block.last + 1

    def _leave(self) -> None:
        if self._replaying or in_backward():
            return
        if self._frame is not None:
            for held in tree_leaves(self._frame.args):
                if isinstance(held, Held):
                    self._hand_over(held)
        self._block, self._frame = -1, None

    def _hand_over(self, held: Held) -> None:
        """Let an argument go if we hold its storage anyway, and it will leave the device."""
        assert held.kept is not None
        tensor = held.kept.tensor
        entry = self._entry_of(tensor)
        if entry is not None and entry.place is not None:
            held.handle = Handle(entry, ViewOf.of(tensor), held.kept.version)
            held.kept = None

    def _entry_of(self, tensor: Tensor) -> Entry | None:
        found = self._table.get(tensor.untyped_storage())
        return found() if found is not None else None

    # -- saved tensors -----------------------------------------------------------------------

    def _pack(self, tensor: Tensor) -> object:
        ours = not in_backward() and is_ours(tensor, self.device, self.weights)
        note = self.recorder.pack(tensor) if ours and self.recorder is not None else -1
        if not ours or self.script is None:
            return Kept(tensor, note)
        ordinal = self._ordinals.get(self._block, 0)
        self._ordinals[self._block] = ordinal + 1
        row = self._row(ordinal, tensor)
        if row is None:
            return Kept(tensor, note)
        self._advance(row.packed)
        entry = self._take(row, tensor, note)
        if entry is None:
            kept = Kept(tensor, note)
            self._offer(row.storage, kept)
            return kept
        handle = Handle(entry, ViewOf.of(tensor), tensor._version, row.unpacked, note)
        if entry.state is not State.DROPPED:
            self._offer(row.storage, handle)
        return handle

    def _offer(self, storage: int, packed: "Kept | Handle") -> None:
        """Keep a saved tensor at hand for its block's selective replay."""
        frame = self._frame
        if frame is not None and storage in frame.wants and storage not in frame.sources:
            frame.sources[storage] = packed
            if isinstance(packed, Handle):
                packed.entry.waiting += 1

    def _row(self, ordinal: int, tensor: Tensor) -> Row | None:
        """The row the script has for this save, if it is the one expected."""
        assert self.script is not None
        rows = self.script.rows.get(self._block, [])
        if ordinal < len(rows) and rows[ordinal].num_bytes == tensor.untyped_storage().nbytes():
            return rows[ordinal]
        if not self.deviation:
            where = self.script.step.blocks[self._block].name if self._block >= 0 else "the step"
            self.deviation = f"save {ordinal} of {where} differs from the trace"
        return None

    def _take(self, row: Row, tensor: Tensor, note: int) -> Entry | None:
        """The entry for a saved tensor's storage, new if this is its first save."""
        assert self.script is not None
        entry = self._entry_of(tensor)
        if entry is not None:
            return entry if entry.version == tensor._version else None
        with self._quiet():
            return self._new_entry(row, tensor, note)

    def _new_entry(self, row: Row, tensor: Tensor, note: int) -> Entry | None:
        script = self.script
        assert script is not None
        entry = Entry(row.storage, row.num_bytes, tensor._version)
        entry.note = self.recorder.saved[note].storage if self.recorder is not None else -1
        if row.storage in script.dropped and self._frame is not None:
            if script.dropped[row.storage] != self._frame.block:
                return None
            entry.state, entry.frame = State.DROPPED, self._frame
            self._frame.dropped.append(weakref.ref(entry))
        elif row.storage in script.moves:
            entry.flat = flat_bytes(tensor)
            move = script.moves[row.storage]
            entry.place = Place(move.tier, script.offsets[row.storage], row.num_bytes)
            if move.out_start <= row.packed:
                self._copy_out(entry)
        elif row.storage in script.codecs:
            flat = flat_bytes(tensor)
            with self._quiet(), torch.no_grad():
                entry.packed = encode(script.codecs[row.storage], flat, tensor.dtype)
            entry.state = State.SMALL
        else:
            return None
        link = weakref.ref(entry)
        self._table.put(tensor.untyped_storage(), link)
        self._entries[row.storage] = link
        return entry

    def _unpack(self, packed: Any) -> Tensor:
        if self.recorder is not None and packed.note >= 0:
            self.recorder.unpack(packed.note)
        if isinstance(packed, Kept):
            return packed.open()
        asked, packed.asked = packed.asked, packed.asked + 1
        if asked < len(packed.unpacked):
            self._advance(packed.unpacked[asked])
        tensor = self._open(packed)
        if asked == 0:
            packed.entry.waiting -= 1
        if packed.entry.waiting <= 0:
            self._let_go(packed.entry)
        return tensor

    def _open(self, handle: Handle) -> Tensor:
        """The tensor a handle stands for, its bytes brought back if need be."""
        entry = handle.entry
        self._bring(entry)
        assert entry.flat is not None
        with self._quiet(), torch.no_grad():
            return handle.view.on(entry.flat)

    def _bring(self, entry: Entry) -> None:
        if entry.state is State.DROPPED:
            self._replay(entry)
        elif entry.state is State.SMALL:
            assert entry.packed is not None
            with self._quiet():
                entry.flat, entry.state = decode(entry.packed, entry.num_bytes), State.HERE
            self._note_back(entry)
        elif entry.state is State.AWAY:
            self._copy_in(entry)
        if entry.state is State.COMING:
            self._wait(entry)
            entry.state = State.HERE

    def _let_go(self, entry: Entry) -> None:
        """Nobody waits for it: the tensor handed out last holds the bytes now."""
        if entry.state is State.LEAVING:
            self._wait(entry)
        if entry.place is not None and entry.state is not State.HERE:
            return
        if entry.place is not None:
            entry.flat, entry.state = None, State.AWAY
        elif entry.frame is not None:
            entry.flat, entry.state = None, State.DROPPED
        elif entry.packed is not None:
            entry.flat, entry.state = None, State.SMALL

    # -- copies ------------------------------------------------------------------------------

    def _advance(self, position: int) -> None:
        """Do what is due up to a position."""
        assert self.script is not None
        self._position = max(self._position, position)
        due = self.script.due
        while self._due < len(due) and due[self._due].position <= self._position:
            item = due[self._due]
            self._due += 1
            link = self._entries.get(item.storage)
            entry = link() if link is not None else None
            if entry is None:
                continue
            if item.rank == OUT_START:
                if entry.state is State.HERE and entry.ticket is None and entry.flat is not None:
                    self._copy_out(entry)
            elif item.rank == IN_START:
                if entry.state is State.AWAY and entry.waiting > 0:
                    self._copy_in(entry)
            elif entry.state is State.LEAVING:
                self._wait(entry)
                entry.flat, entry.state = None, State.AWAY

    def _copy_out(self, entry: Entry) -> None:
        assert self.lanes is not None and entry.place is not None and entry.flat is not None
        self._rescue(entry)
        with self._quiet():
            entry.ticket = self.lanes.copy_out(entry.flat, entry.place)
        entry.state = State.LEAVING
        self._owners[entry.storage] = weakref.ref(entry)

    def _rescue(self, entry: Entry) -> None:
        """A graph of an earlier step may still need what lies in this slot: fetch it first."""
        link = self._owners.get(entry.storage)
        owner = link() if link is not None else None
        if owner is not None and owner is not entry and owner.state is State.AWAY:
            self._copy_in(owner)
            self._wait(owner)
            owner.state, owner.place = State.HERE, None

    def _copy_in(self, entry: Entry) -> None:
        assert self.lanes is not None and entry.place is not None
        with self._quiet():
            entry.flat = torch.empty(entry.num_bytes, dtype=torch.uint8, device=self.device)
            self._note_back(entry)
            entry.ticket = self.lanes.copy_in(entry.place, entry.flat)
        entry.state = State.COMING

    def _note_back(self, entry: Entry) -> None:
        if self.recorder is not None and entry.note >= 0 and entry.flat is not None:
            self.recorder.adopt(entry.flat, entry.note)

    def _wait(self, entry: Entry) -> None:
        assert self.lanes is not None and entry.ticket is not None
        with self._quiet():
            self.lanes.wait(entry.ticket)
        entry.ticket = None

    @contextlib.contextmanager
    def _quiet(self) -> Iterator[None]:
        """Keep the runtime's own work out of a recording."""
        before = self.recorder.paused if self.recorder is not None else False
        if self.recorder is not None:
            self.recorder.paused = True
        try:
            yield
        finally:
            if self.recorder is not None:
                self.recorder.paused = before

    # -- replay ------------------------------------------------------------------------------

    def _replay(self, asked: Entry) -> None:
        """Bring back a dropped storage, and all else its block call dropped and still owes."""
        frame = asked.frame
        assert frame is not None
        live = [entry for entry in (link() for link in frame.dropped) if entry is not None]
        missing = {e.storage: e for e in live if e.state is State.DROPPED and e.waiting > 0}
        missing[asked.storage] = asked
        self._replaying = True
        try:
            with self._quiet():
                self._run_again(frame, missing)
        finally:
            self._replaying = False
            self._release_sources(frame)
        if missing:
            raise StepError(
                f"running {frame.name} again did not save the same tensors as the first time; "
                "its forward may depend on something that changed. Keep it out of the plan by "
                "naming the blocks to use (blocks=...), and please report the model."
            )

    def _run_again(self, frame: Frame, missing: dict[int, Entry]) -> None:
        mode, wanted = self._mode(frame), dict(missing)
        try:
            catch = self._catcher(frame, missing, mode)
            again.replay(frame, self.device, self._open_arg, catch, mode)
        except again.Diverged:
            self._barred.add(frame.block)
            for entry in wanted.values():
                entry.flat, entry.state = None, State.DROPPED
            missing.update(wanted)
            catch = self._catcher(frame, missing, None)
            again.replay(frame, self.device, self._open_arg, catch, None)

    def _catcher(
        self, frame: Frame, missing: dict[int, Entry], mode: "again.SelectiveMode | None"
    ) -> Callable[[Tensor], None]:
        assert self.script is not None
        rows, count = self.script.rows[frame.block], 0

        def catch(tensor: Tensor) -> None:
            nonlocal count
            if not is_ours(tensor, self.device, self.weights):
                return
            row = rows[count] if count < len(rows) else None
            count += 1
            entry = missing.get(row.storage) if row is not None else None
            if row is None or entry is None:
                return
            if tensor.untyped_storage().nbytes() != row.num_bytes:
                raise StepError(f"running {frame.name} again saved a tensor of another size")
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

    def _mode(self, frame: Frame) -> "again.SelectiveMode | None":
        """A mode that skips what the variant does not run, for a selective variant."""
        assert self.script is not None
        if not self.script.is_selective(frame.block) or frame.block in self._barred:
            return None
        if frame.wants - frame.sources.keys():
            return None
        block, variant = self.script.step.blocks[frame.block], self.script.variants[frame.block]
        forms = [self.forms[i] for i in range(block.first, block.last + 1)]
        runs = {i - block.first for i in variant.replays}

        def kept(storage: int) -> Tensor | None:
            source = frame.sources.get(storage)
            if isinstance(source, Handle):
                self._bring(source.entry)
                return source.entry.flat
            return flat_bytes(source.open()) if source is not None else None

        return again.SelectiveMode(forms, runs, kept)

    def _release_sources(self, frame: Frame) -> None:
        for source in frame.sources.values():
            if isinstance(source, Handle):
                source.entry.waiting -= 1
                if source.entry.waiting <= 0:
                    self._let_go(source.entry)
        frame.sources.clear()
