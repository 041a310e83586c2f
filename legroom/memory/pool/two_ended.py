"""Online: long-lived blocks from the low end, short-lived from the high (Dymem and FlashNeuron).

Both papers part one pool so that what stays is not scattered among what goes: Dymem by mobility
(HPDC 2020), FlashNeuron by whether a tensor is offloaded (Bae et al. 2021). Here a block is
long-lived if it is there as backward begins, or as the update does: weights, what is kept for
backward, gradients. What is moved or run again, and all temporaries, are short-lived. Each end is
best fit and grows towards the other; the pool is what both take at the worst moment. Left out:
Dymem's space apart for small tensors that are never moved, and its order of forks that makes
frees at the high end a stack; FlashNeuron's blocks of 4 KiB.
"""

from collections.abc import Sequence

from legroom.memory.pool.best_fit import OpenEnd
from legroom.memory.pool.lives import Life, moments
from legroom.memory.pool.place import ALLOCATORS, Pool


@ALLOCATORS.register("two_ended")
def two_ended(lives: Sequence[Life]) -> Pool:
    """Online: long-lived blocks from the low end, short-lived ones from the high end."""
    low, high = OpenEnd(), OpenEnd()
    offsets, most = [0] * len(lives), 0
    for is_start, i in moments(lives):
        end, num_bytes = low if lives[i].lasts else high, lives[i].num_bytes
        if is_start:
            offsets[i] = end.take(num_bytes)
            most = max(most, low.num_bytes + high.num_bytes)
        else:
            end.give(offsets[i], num_bytes)
    rows = zip(lives, offsets, strict=True)
    return Pool(tuple(x if a.lasts else most - x - a.num_bytes for a, x in rows), most)
