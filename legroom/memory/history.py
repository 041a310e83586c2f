"""History: what CUDA's allocator was asked for while a step ran, in order.

A plan is laid out by the tensors of its trace. The allocator sees more: what libraries take, what
compiled code takes inside of a block, and the order of it all.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from legroom.memory.arena import Event

MOST_ENTRIES = 1 << 18
NOT_THERE = (AttributeError, KeyError, RuntimeError, TypeError)
"""What calls that torch does not promise may raise; then there is no history."""


@contextlib.contextmanager
def recorded(device: torch.device, into: list[Event]) -> Iterator[None]:
    """Note what is taken and given back; nothing where the user has a history recorded already."""
    if getattr(torch._C, "_cuda_isHistoryEnabled", bool)():
        yield
        return
    record: Any = torch.cuda.memory._record_memory_history
    with contextlib.suppress(*NOT_THERE):
        record("all", context=None, max_entries=MOST_ENTRIES, clear_history=True)
    try:
        yield
    finally:
        with contextlib.suppress(*NOT_THERE):
            traces = torch.cuda.memory._snapshot(device)["device_traces"]
            stream = torch.cuda.current_stream(device).cuda_stream
            into.extend(events_of(traces[device.index or 0], stream))
        with contextlib.suppress(*NOT_THERE):
            record(None)


def events_of(entries: Iterable[Mapping[str, Any]], stream: int) -> Iterator[Event]:
    """Blocks of one stream that come, and go if they were seen to come."""
    here: dict[int, tuple[int, int]] = {}
    count = 0
    for entry in entries:
        action, address = entry["action"], entry.get("addr", 0)
        if action == "alloc" and entry["stream"] == stream:
            here[address] = count, entry["size"]
            yield True, *here[address]
            count += 1
        elif action == "free_completed" and address in here:
            yield False, *here.pop(address)
