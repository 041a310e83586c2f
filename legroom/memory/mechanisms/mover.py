"""Copy entries out and back over the lanes, and remember who owns which slot."""

import weakref

import torch

from legroom.memory.mechanisms.entry import Entry, State, check_version
from legroom.memory.mechanisms.lanes import Lanes


class Mover:
    """Moves single entries when told to; counts the bytes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.lanes: Lanes | None = None
        self.in_turn = False
        """Let each copy end before anything else runs: for ops timed on the cores it would take."""
        self.out_bytes: dict[str, int] = {}
        self.in_bytes: dict[str, int] = {}
        self._owners: dict[tuple[str, int], weakref.ref[Entry]] = {}

    def use(self, lanes: Lanes | None) -> None:
        """Go over these lanes, with other places, from now on; what is still out comes back."""
        self.evacuate()
        if lanes is not None:
            self.lanes = lanes

    def evacuate(self) -> None:
        """Bring everything back that some graph still needs, and forget all places."""
        for link in self._owners.values():
            entry = link()
            if entry is not None:
                self._bring_home(entry)
        self._owners.clear()

    def reset_counts(self) -> None:
        """Count bytes from zero."""
        self.out_bytes, self.in_bytes = {}, {}

    def copy_out(self, entry: Entry) -> None:
        """Begin to send an entry to its place."""
        assert self.lanes is not None and entry.place is not None and entry.flat is not None
        self._rescue(entry)
        self._check_version(entry)
        entry.ticket = self.lanes.copy_out(entry.flat, entry.place)
        entry.state = State.LEAVING
        if self.in_turn:
            self.lanes.drain()
        place = entry.place
        self._owners[place.tier, place.offset] = weakref.ref(entry)
        self.out_bytes[place.tier] = self.out_bytes.get(place.tier, 0) + place.num_bytes

    def leave(self, entry: Entry) -> None:
        """Wait for the copy out and let go of the source."""
        self._wait(entry)
        self._check_version(entry)
        entry.flat = entry.source = None
        entry.state = State.AWAY

    def copy_in(self, entry: Entry) -> None:
        """Take room on the device and begin to fetch an entry into it."""
        assert self.lanes is not None and entry.place is not None
        entry.flat = torch.empty(entry.num_bytes, dtype=torch.uint8, device=self.device)
        entry.ticket = self.lanes.copy_in(entry.place, entry.flat)
        entry.state = State.COMING
        if self.in_turn:
            self.lanes.drain()
        tier = entry.place.tier
        self.in_bytes[tier] = self.in_bytes.get(tier, 0) + entry.num_bytes

    def arrive(self, entry: Entry) -> None:
        """Wait for the copy in."""
        self._wait(entry)
        entry.state = State.HERE

    def stay(self, entry: Entry) -> None:
        """It is needed while its copy out is under way: the source is still here."""
        self._wait(entry)
        self._check_version(entry)
        entry.source, entry.state = None, State.HERE

    def _wait(self, entry: Entry) -> None:
        assert self.lanes is not None and entry.ticket is not None
        self.lanes.wait(entry.ticket)
        entry.ticket = None

    def _check_version(self, entry: Entry) -> None:
        """Note a change in place before the copy was complete: the bytes may be a mix."""
        if entry.source is not None and entry.spoiled is None:
            try:
                check_version(entry.source, entry.version)
            except RuntimeError as error:
                entry.spoiled = error

    def _rescue(self, entry: Entry) -> None:
        """A graph of an earlier step may still need what lies in this slot: fetch it first."""
        assert entry.place is not None
        link = self._owners.get((entry.place.tier, entry.place.offset))
        owner = link() if link is not None else None
        if owner is not None and owner is not entry:
            self._bring_home(owner)

    def _bring_home(self, entry: Entry) -> None:
        """Fetch an entry if it is out, and give up its place."""
        if entry.state is State.LEAVING:
            self.stay(entry)
        if entry.state is State.AWAY:
            self.copy_in(entry)
        if entry.state is State.COMING:
            self.arrive(entry)
        entry.place = None
