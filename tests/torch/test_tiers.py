"""Slabs, files and lanes grow with what scripts need."""

from typing import Any

import pytest
import torch

from legroom.memory import tiers
from legroom.memory.tiers import STAGING_BYTES, Tiers


class Room:
    """In place of a slab or a file: its size alone."""

    def __init__(self, *args: Any, **_: Any) -> None:
        self.num_bytes = next(x for x in reversed(args) if isinstance(x, int))

    def close(self) -> None:
        """Nothing to give back."""


class FakeLanes:
    """In place of lanes: what there is room for."""

    def __init__(self, slab: Room | None, disk: Room | None, staging_bytes: int) -> None:
        self.host = slab.num_bytes - staging_bytes if slab else 0
        self.disk = disk.num_bytes if disk else 0

    def close(self) -> None:
        """No threads to end."""


def test_bytes_staged_for_the_disk_are_no_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lanes are used again only if they hold what the next script asks for, staging aside."""
    monkeypatch.setattr(tiers, "Slab", Room)
    monkeypatch.setattr(tiers, "DiskFile", Room)
    monkeypatch.setattr(tiers, "make_lanes", lambda _, **kwargs: FakeLanes(**kwargs))
    owner = Tiers(torch.device("cuda", 0), "anywhere")
    mib = 1 << 20
    asked = [(1, 1), (STAGING_BYTES // mib, 0), (2, 8), (80, 0), (80, 9)]
    for host, disk in asked:
        lanes: Any = owner.lanes_for({"host": host * mib, "disk": disk * mib})
        assert lanes.host >= host * mib and lanes.disk >= disk * mib
    assert owner.lanes_for({"host": mib}) is owner.lanes
    assert owner.lanes_for({}) is None
