"""Pools of objects by size class, never split (as SwapAdvisor's, Huang et al. 2020).

Sizes that are next to each other share a class; its objects are as large as the largest of them,
and as many as ever live at once. An object that is free is taken by any block of its class, the
lowest first. The paper finds classes by genes, together with what is moved; here every size starts
as a class of its own, and the two neighbours whose union saves most become one, for as long as any
saves. Blocks of different sizes share memory only that way.
"""

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from legroom.memory.pool.lives import Life, moments
from legroom.memory.pool.place import ALLOCATORS, Pool


class Class(NamedTuple):
    """Sizes that share objects."""

    object_bytes: int
    changes: npt.NDArray[np.int32]
    """By moment, whether a block comes or goes."""
    num_objects: int
    """As many as live at once."""

    @property
    def num_bytes(self) -> int:
        """Of all its objects."""
        return self.object_bytes * self.num_objects

    def joined(self, other: "Class") -> "Class":
        """Both as one."""
        return _class(max(self.object_bytes, other.object_bytes), self.changes + other.changes)


@ALLOCATORS.register("size_class")
def size_class(lives: Sequence[Life]) -> Pool:
    """Objects by size class, as many as live at once; none is split."""
    order = moments(lives)
    classes = _joined(_by_size(lives, order))
    edges, starts = [row.object_bytes for row in classes], _starts(classes)
    kinds = np.searchsorted(edges, [life.num_bytes for life in lives]).tolist()
    free: list[list[int]] = [list(range(row.num_objects)) for row in classes]
    objects = [0] * len(lives)
    for is_start, i in order:
        if is_start:
            objects[i] = heappop(free[kinds[i]])
        else:
            heappush(free[kinds[i]], objects[i])
    rows = zip(kinds, objects, strict=True)
    addresses = tuple(starts[kind] + edges[kind] * number for kind, number in rows)
    return Pool(addresses, starts[-1])


def _class(object_bytes: int, changes: npt.NDArray[np.int32]) -> Class:
    return Class(object_bytes, changes, int(changes.cumsum().max(initial=0)))


def _by_size(lives: Sequence[Life], order: Sequence[tuple[bool, int]]) -> list[Class]:
    """A class for each size, the smallest first."""
    changes: dict[int, npt.NDArray[np.int32]] = {
        size: np.zeros(len(order), dtype=np.int32) for size in {x.num_bytes for x in lives}
    }
    for moment, (is_start, i) in enumerate(order):
        changes[lives[i].num_bytes][moment] = 1 if is_start else -1
    return [_class(size, changes[size]) for size in sorted(changes)]


def _joined(classes: list[Class]) -> list[Class]:
    """Neighbours as one, those first that save most, for as long as any saves."""
    unions = [_union(classes, i) for i in range(len(classes) - 1)]
    while unions:
        best = max(range(len(unions)), key=lambda i: unions[i][0])
        if unions[best][0] <= 0:
            break
        classes[best : best + 2] = [unions.pop(best)[1]]
        for i in (best - 1, best):
            if 0 <= i < len(unions):
                unions[i] = _union(classes, i)
    return classes


def _union(classes: Sequence[Class], i: int) -> tuple[int, Class]:
    """What a class and the next would save as one, and that."""
    union = classes[i].joined(classes[i + 1])
    return classes[i].num_bytes + classes[i + 1].num_bytes - union.num_bytes, union


def _starts(classes: Sequence[Class]) -> list[int]:
    """Where each begins, and the end of the last."""
    return [0, *np.cumsum([row.num_bytes for row in classes], dtype=np.int64).tolist()]
