"""The trace of a step that runs builds.

A compiled block is one op in forward and one in backward. What it saves in between, how long both
take and what they hold on the side was measured for each build, so a step with other builds is
another trace: the eager one with each such block's ops taken out and those two put in.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from legroom.memory.builds import GIVEN, OWN, RESULT, Build, Save
from legroom.memory.host import host_weight
from legroom.memory.trace import Block, Kind, Op, Phase, Saved, Step, Storage

Choice = Mapping[int, Build]
"""A build for each block that runs compiled."""


class Rebuilt(NamedTuple):
    """Another trace, and where the ops and storages of the first went."""

    step: Step
    ops: dict[int, int]
    storages: dict[int, int]


def rebuilt(step: Step, choice: Choice) -> Rebuilt:
    """The step with the chosen blocks compiled; those without a backward stay as they are."""
    return _Rewriter(step, choice).rewrite()


@dataclass
class _Site:
    """Where a compiled block lies in the old trace and in the new one."""

    build: Build
    forward: range
    backward: list[int]
    at: int = -1
    back_at: int = -1

    def __contains__(self, op: int) -> bool:
        return op in self.forward or op in self._set

    def __post_init__(self) -> None:
        self._set = set(self.backward)


class _Rewriter:
    def __init__(self, step: Step, choice: Choice) -> None:
        self.step = step
        behind: dict[int, list[int]] = {}
        for i, op in enumerate(step.ops):
            if op.phase == Phase.BACKWARD and op.block in choice:
                behind.setdefault(op.block, []).append(i)
        spans = {b: range(step.blocks[b].first, step.blocks[b].last + 1) for b in choice}
        self.sites = {b: _Site(choice[b], spans[b], behind[b]) for b in choice if b in behind}
        self.site_of = {
            i: b for b, site in self.sites.items() for i in (*site.forward, *site.backward)
        }
        self.op_at: dict[int, int] = {}
        """New index of each op that stays, and of each compiled block's two."""
        self.position: list[int] = []
        """New position of each old one."""
        self.storage_at: dict[int, int] = {}
        self.later: dict[int, list[tuple[int, int]]] = {}
        """Storages that change hands: from which op on another one stands for them."""
        self.storages: list[Storage] = []
        self.rows: list[Saved] = []
        self.own: dict[int, list[int]] = {}

    def rewrite(self) -> Rebuilt:
        """The new trace."""
        self._number_ops()
        self._keep_storages()
        self._save()
        self._end_lives()
        step = msgspec.structs.replace(
            self.step,
            ops=tuple(self._ops()),
            storages=tuple(self.storages),
            saved=tuple(self.rows),
            blocks=tuple(self._block(b, block) for b, block in enumerate(self.step.blocks)),
            host_s=self._host_s(),
            root=None,
        )
        stay = {i: at for i, at in self.op_at.items() if i not in self.site_of}
        return Rebuilt(step.check(), stay, self.storage_at)

    def _number_ops(self) -> None:
        count = 0
        for i in range(len(self.step.ops)):
            b = self.site_of.get(i)
            site = self.sites[b] if b is not None else None
            first = site is None or i in (site.forward[0], site.backward[0])
            self.position.append(count)
            if not first:
                assert site is not None
                self.op_at[i] = site.at if i in site.forward else site.back_at
                self.position[-1] = max(count - 1, 0)
                continue
            if site is not None and i == site.forward[0]:
                site.at = count
            elif site is not None:
                site.back_at = count
            self.op_at[i] = count
            count += 1
        self.count = count
        self.position.append(count)

    # -- storages ----------------------------------------------------------------------------

    def _keep_storages(self) -> None:
        """Take over what is seen outside of compiled blocks."""
        seen, self.handed = self._seen_outside(), self._find_handed()
        for s, storage in enumerate(self.step.storages):
            if storage.birth in self.site_of and s not in seen:
                continue
            birth = self.op_at.get(storage.birth, -1)
            moved = (self._last(storage.release), self._last(storage.death))
            done = self._last(storage.done) if storage.done >= 0 else -1
            release, death = (max(at, birth) for at in moved)
            self.storage_at[s] = len(self.storages)
            self.storages.append(
                msgspec.structs.replace(
                    storage, birth=birth, release=release, death=max(death, release), done=done
                )
            )
            self._hand_on(s)

    def _hand_on(self, s: int) -> None:
        """A gradient that eager blocks add to in place is another one after a compiled block."""
        for first, back_at in self.handed.get(s, ()):
            last = self.later[s][-1][1] if s in self.later else self.storage_at[s]
            storage = self.storages[last]
            if storage.birth >= back_at or storage.death <= back_at:
                continue
            self.storages[last] = msgspec.structs.replace(storage, death=back_at, release=back_at)
            self.later.setdefault(s, []).append((first, len(self.storages)))
            self.storages.append(msgspec.structs.replace(storage, birth=back_at))

    def _find_handed(self) -> dict[int, list[tuple[int, int]]]:
        """Storages that backwards of compiled blocks change, with the first op and its new place.

        Those made before, for a while, by others.
        """
        handed: dict[int, list[tuple[int, int]]] = {}
        for site in sorted(self.sites.values(), key=lambda x: x.back_at):
            written = dict.fromkeys(s for i in site.backward for s in self.step.ops[i].writes)
            for s in written:
                storage = self.step.storages[s]
                if storage.kind == Kind.TEMPORARY and storage.birth not in site:
                    handed.setdefault(s, []).append((site.backward[0], site.back_at))
        return handed

    def _last(self, position: int) -> int:
        """New index of the op a storage's life ends in; the end of the step stays that."""
        end = len(self.step.ops)
        return self.count if position >= end else self.position[max(position, 0)]

    def _seen_outside(self) -> set[int]:
        step, seen = self.step, set()
        for i, op in enumerate(step.ops):
            for s in (*op.reads, *op.writes):
                if self.site_of.get(i) != self.site_of.get(step.storages[s].birth):
                    seen.add(s)
        for b, block in enumerate(step.blocks):
            for s in block.inputs:
                if self.site_of.get(step.storages[s].birth) != b:
                    seen.add(s)
        for row in step.saved:
            if row.block not in self.sites:
                seen.add(row.storage)
        end = len(step.ops)
        lasting = (s for s, x in enumerate(step.storages) if x.death >= end or x.kind in _LASTING)
        return seen.union(lasting)

    # -- saved tensors -----------------------------------------------------------------------

    def _save(self) -> None:
        for row in self.step.saved:
            if row.block not in self.sites:
                unpacked = tuple(self.position[p] for p in row.unpacked)
                packed = self.position[row.packed]
                storage = self.storage_at[row.storage]
                self.rows.append(Saved(storage, row.block, row.ordinal, packed, unpacked))
        for b, site in self.sites.items():
            self._save_built(b, site)
        self.rows.sort(key=lambda row: (row.packed, row.block, row.ordinal))

    def _save_built(self, b: int, site: _Site) -> None:
        """Rows of a build, with storages for what it saves of its own."""
        name, build = self.step.blocks[b].module, site.build
        self.own[b] = []
        for k, (size, dtype) in enumerate(zip(build.sizes, build.dtypes, strict=True)):
            self.own[b].append(len(self.storages))
            self.storages.append(
                Storage(
                    f"{name}: saved {k}", size, Kind.ACTIVATION, site.at, site.at, site.back_at,
                    dtype, site.back_at,
                )
            )  # fmt: skip
        left = {where: self._outer(b, where) for where in (GIVEN, RESULT)}
        met: dict[tuple[str, int], int | None] = {}
        for ordinal, save in enumerate(build.saves):
            if save.where == OWN:
                found: int | None = self.own[b][save.rank]
            else:
                place = (save.where, save.rank)
                found = met[place] = met[place] if place in met else self._match(save, left)
            if found is not None:
                self.rows.append(Saved(found, b, ordinal, site.at + 1, (site.back_at,)))

    def _outer(self, b: int, where: str) -> list[int]:
        """Storages that a block was given, or that it returned."""
        if where == GIVEN:
            return [self.storage_at[s] for s in self.step.blocks[b].inputs if s in self.storage_at]
        site = self.sites[b]
        made = (s for s, x in enumerate(self.step.storages) if x.birth in site.forward)
        return [self.storage_at[s] for s in made if s in self.storage_at]

    def _match(self, save: Save, left: dict[str, list[int]]) -> int | None:
        """The storage a save lies in, by its size; the first of several, which is then taken."""
        sized = [s for s in left[save.where] if self.storages[s].num_bytes == save.num_bytes]
        if len(sized) > 1:
            left[save.where].remove(sized[0])
        return sized[0] if sized else None

    def _end_lives(self) -> None:
        """What eager blocks saved and builds do not may go earlier; what they do save stays."""
        was_saved = {row.storage for row in self.step.saved if row.block in self.sites}
        uses: dict[int, int] = {}
        ticks = sorted({p for row in self.rows for p in row.unpacked})
        for row in self.rows:
            last = max((*row.unpacked, row.packed))
            if row.block not in self.sites and row.unpacked:  # until its node in autograd is done
                after = bisect_right(ticks, last)
                last = max(last, (ticks[after] if after < len(ticks) else self.count) - 1)
            uses[row.storage] = max(uses.get(row.storage, -1), last)
        touched = self._last_touch()
        saved = {row.storage for row in self.rows if row.block in self.sites}
        before = {self.storage_at[s] for s in was_saved & self.storage_at.keys()}
        for at in sorted(before | saved.difference(*self.own.values())):
            storage = self.storages[at]
            if storage.birth < 0 or storage.death >= self.count:
                continue
            death = max(uses.get(at, -1), touched.get(at, -1), storage.birth)
            release = min(storage.release, death)
            kind = Kind.ACTIVATION if at in saved else storage.kind
            self.storages[at] = msgspec.structs.replace(
                storage, kind=kind, death=death, release=max(release, storage.birth - 1), done=-1
            )

    def _last_touch(self) -> dict[int, int]:
        """Last op that reads or writes each storage outside of what it is saved for."""
        last: dict[int, int] = {}
        for i, op in enumerate(self.step.ops):
            site = self.sites.get(self.site_of.get(i, -1))
            if site is not None and i not in site.forward:
                continue
            for s in (*op.reads, *op.writes):
                if s in self.storage_at:
                    last[self.storage_at[s]] = self.op_at[i]
        return last

    # -- ops and blocks ----------------------------------------------------------------------

    def _ops(self) -> Iterable[Op]:
        for i, op in enumerate(self.step.ops):
            b = self.site_of.get(i)
            if b is None:
                reads, writes = self._mapped(op.reads, i), self._mapped(op.writes, i)
                yield msgspec.structs.replace(op, reads=reads, writes=writes)
            elif i == self.sites[b].forward[0]:
                yield self._forward_op(b, self.sites[b])
            elif i == self.sites[b].backward[0]:
                yield self._backward_op(b, self.sites[b])

    def _host_s(self) -> float:
        """The host's time for what stays eager, and for the builds; 0 where it is not a matter."""
        if not self.step.host_s:
            return 0.0
        weights = [host_weight(op) for op in self.step.ops]
        stay = sum(w for i, w in enumerate(weights) if i not in self.site_of)
        built = sum(site.build.host_s for site in self.sites.values())
        return self.step.host_s * stay / sum(weights) + built

    def _mapped(self, storages: Iterable[int], at: int) -> tuple[int, ...]:
        """New numbers of storages, as the op at this old place knows them."""
        found = (self._now(s, at) for s in storages if s in self.storage_at)
        return tuple(dict.fromkeys(found))

    def _now(self, s: int, at: int) -> int:
        since = [new for first, new in self.later.get(s, ()) if first <= at]
        return since[-1] if since else self.storage_at[s]

    def _alive(self, storages: Iterable[int], at: int) -> tuple[int, ...]:
        rows = ((s, self.storages[s]) for s in storages)
        return tuple(s for s, x in rows if x.birth <= at <= x.death)

    def _forward_op(self, b: int, site: _Site) -> Op:
        build, path = site.build, self.step.blocks[b].module
        ops = [self.step.ops[i] for i in site.forward]
        reads = self._mapped((s for op in ops for s in op.reads), site.forward[0])
        writes = (*self._outer(b, RESULT), *self.own[b])
        return Op(
            f"{path} ({build.name})", path, Phase.FORWARD, b, build.forward_s,
            self._alive((s for s in reads if s not in writes), site.at), writes,
            build.forward_bytes, sum(op.flops for op in ops),
        )  # fmt: skip

    def _backward_op(self, b: int, site: _Site) -> Op:
        build, path = site.build, self.step.blocks[b].module
        ops = [self.step.ops[i] for i in site.backward]
        saved = [row.storage for row in self.rows if row.block == b]
        before, after = site.backward[0] - 1, site.backward[0]
        seen = self._mapped((s for op in ops for s in op.reads), before)
        reads = dict.fromkeys((*saved, *seen))
        writes = self._mapped((s for op in ops for s in op.writes), after)
        made = tuple(s for s in writes if self.storages[s].birth == site.back_at)
        changed = tuple(s for s in writes if s not in made and s not in saved)
        return Op(
            f"{path} ({build.name})", path, Phase.BACKWARD, b, build.backward_s,
            self._alive((s for s in reads if s not in made), site.back_at),
            self._alive((*made, *changed), site.back_at),
            build.backward_bytes, sum(op.flops for op in ops),
        )  # fmt: skip

    def _block(self, b: int, block: Block) -> Block:
        inputs = self._mapped(block.inputs, block.first)
        site = self.sites.get(b)
        if site is None:
            first, last = self.op_at[block.first], self.op_at[block.last]
            return msgspec.structs.replace(
                block, first=first, last=last, inputs=inputs, variants=()
            )
        return msgspec.structs.replace(
            block,
            first=site.at,
            last=site.at,
            inputs=inputs,
            variants=(),
            barred="it is compiled, and its builds say what runs again",
            build=site.build.name,
        )


_LASTING = (Kind.WEIGHT, Kind.STATE, Kind.GRADIENT, Kind.INPUT, Kind.OTHER)
