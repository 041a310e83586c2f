"""The lower tiers of a running job: slabs and files, made once and as large as the plans need."""

import tempfile
from collections.abc import Callable, Mapping

import torch

from legroom.memory.mechanisms.disk import DiskFile
from legroom.memory.mechanisms.lanes import Lanes, make_lanes
from legroom.memory.mechanisms.pool import Slab

STAGING_BYTES = 64 << 20
"""Pinned room through which bytes pass between a CUDA device and the disk."""


class Tiers:
    """Owns the slab, the disk file and the lanes; grows them when a script needs more."""

    def __init__(
        self,
        device: torch.device,
        disk_dir: str | None,
        before_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.device = device
        self._before_close = before_close
        self.disk_dir = disk_dir or tempfile.gettempdir()
        self._slab: Slab | None = None
        self._disk: DiskFile | None = None
        self._lanes: Lanes | None = None
        self._staging = 0

    def lanes_for(self, room: Mapping[str, int]) -> Lanes | None:
        """Lanes with this much room per tier; None if there is nothing to move."""
        host, disk = room.get("host", 0), room.get("disk", 0)
        if not host and not disk:
            return None
        staging = STAGING_BYTES if disk and self.device.type == "cuda" else 0
        have_host = self._slab.num_bytes - self._staging if self._slab else 0
        have_disk = self._disk.num_bytes if self._disk else 0
        enough = have_host >= host and have_disk >= disk and self._staging >= staging
        if self._lanes is not None and enough:
            return self._lanes
        self.close()
        self._staging = staging
        if host + staging:
            self._slab = Slab(max(host, have_host) + staging, pin=self.device.type == "cuda")
        if disk:
            self._disk = DiskFile(self.disk_dir, max(disk, have_disk))
        self._lanes = make_lanes(
            self.device, slab=self._slab, disk=self._disk, staging_bytes=staging
        )
        return self._lanes

    @property
    def lanes(self) -> Lanes | None:
        """The lanes now open."""
        return self._lanes

    def drain(self) -> None:
        """Let every copy under way end, and let go of what they held."""
        if self._lanes is not None:
            self._lanes.drain()

    def close(self) -> None:
        """Finish all copies and give everything back."""
        if self._lanes is not None:
            self._before_close()
            self._lanes.close()
        if self._slab is not None:
            self._slab.close()
        if self._disk is not None:
            self._disk.close()
        self._lanes = self._slab = self._disk = None
