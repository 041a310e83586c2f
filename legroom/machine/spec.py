"""Tier, Link, Machine: what the hardware can do, as plain numbers."""

from importlib import resources
from pathlib import Path
from typing import Literal, Self

import msgspec

from legroom.core.errors import InputError, RecordError, UnknownName
from legroom.core.files import Record

PRESETS = resources.files("legroom.machine") / "presets"


class Tier(msgspec.Struct, frozen=True, kw_only=True):
    """A place for bytes: device, pinned, host or disk."""

    name: str
    num_bytes: int
    reserve_bytes: int = 0
    """Not to be planned with: the driver's context, the system's own needs."""


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """A one-way road between tiers that transfers wait for."""

    source: str
    target: str
    bytes_per_s: float
    latency_s: float = 0.0
    root: str = ""
    """Links with one root share the cap `Machine.duplex[root]` when busy together."""

    @property
    def name(self) -> str:
        """The link in words: "device->host"."""
        return f"{self.source}->{self.target}"


class Machine(Record, frozen=True, kw_only=True):
    """One machine: its tiers, its links and its rates."""

    kind = "machine"

    name: str
    device: Literal["cuda", "cpu"]
    origin: str
    """Where the numbers come from: "measured", or the sources of a preset."""
    tiers: tuple[Tier, ...]
    links: tuple[Link, ...]
    duplex: dict[str, float] = {}
    """Per root: bytes per second of all its links together."""
    matrix_flops: dict[str, float]
    """Matrix products, FLOP per second by dtype ("float32", "bfloat16", ...)."""
    vector_flops: float
    memory_bytes_per_s: float
    """Device memory, bytes read plus bytes written."""
    launch_s: float = 0.0
    """Least time of one op, however small."""
    pin_s_per_byte: float = 0.0
    """Cost of making host memory fit for direct copies."""
    contention: float = 0.0
    """Share of the compute rate that is lost while a link is busy."""
    cpu_worker_bytes_per_s: float = 0.0
    """Rate of one CPU thread over state bytes (for updates on the host)."""

    def tier(self, name: str) -> Tier | None:
        """The tier of that name, if the machine has it."""
        return next((t for t in self.tiers if t.name == name), None)

    def link(self, source: str, target: str) -> Link | None:
        """The road from one tier to another, if there is one."""
        return next((x for x in self.links if (x.source, x.target) == (source, target)), None)

    def route(self, tier: str) -> tuple[tuple[Link, ...], tuple[Link, ...]] | None:
        """Hops out to `tier` and back in, direct or by way of host; None if unreachable."""
        out, back = self.link("device", tier), self.link(tier, "device")
        if out and back:
            return (out,), (back,)
        hops = (self.link("device", "host"), self.link("host", tier))
        home = (self.link(tier, "host"), self.link("host", "device"))
        if all(hops) and all(home):
            return tuple(x for x in hops if x), tuple(x for x in home if x)
        return None

    def with_links(self, share: float) -> Self:
        """The same with links at this share of their rate."""
        links = tuple(
            msgspec.structs.replace(x, bytes_per_s=share * x.bytes_per_s) for x in self.links
        )
        duplex = {root: share * rate for root, rate in self.duplex.items()}
        return msgspec.structs.replace(self, links=links, duplex=duplex)

    def rate(self, dtype: str) -> float:
        """Matrix rate for a dtype; the float32 rate when that one is not known."""
        return self.matrix_flops.get(dtype, self.matrix_flops["float32"])

    def check(self) -> Self:
        """Tiers named once, links between known tiers, every rate above zero."""
        names = [t.name for t in self.tiers]
        if "device" not in names or len(set(names)) != len(names):
            raise RecordError(f"machine {self.name}: tiers must be distinct and hold 'device'")
        for tier in self.tiers:
            if tier.num_bytes <= 0 or not 0 <= tier.reserve_bytes <= tier.num_bytes:
                raise RecordError(f"machine {self.name}: tier {tier.name} has a size out of range")
        for link in self.links:
            if link.source not in names or link.target not in names:
                raise RecordError(f"machine {self.name}: link {link.name} joins an unknown tier")
            if link.bytes_per_s <= 0 or link.latency_s < 0:
                raise RecordError(f"machine {self.name}: link {link.name} has a rate out of range")
        rates = (*self.matrix_flops.values(), *self.duplex.values())
        if (
            "float32" not in self.matrix_flops
            or min((*rates, self.vector_flops, self.memory_bytes_per_s)) <= 0
        ):
            raise RecordError(f"machine {self.name}: needs a float32 rate, and rates above zero")
        return self


def preset_names() -> list[str]:
    """Names of the machines that come with legroom."""
    names = (p.name for p in PRESETS.iterdir())
    return sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml"))


def find_machine(name: "str | Path | Machine") -> Machine:
    """A machine by preset name, or by a file (.toml or a saved probe).

    Raises UnknownName for a name that is neither, RecordError for a damaged file.
    """
    if isinstance(name, Machine):
        return name.check()
    text = str(name)
    if text in preset_names():
        return _from_toml((PRESETS / f"{text}.toml").read_bytes(), text)
    path = Path(text)
    if path.suffix == ".toml" and path.exists():
        return _from_toml(path.read_bytes(), text)
    if path.exists() and path.is_file():
        return Machine.load(path)
    if path.suffix in (".toml", ".json", ".gz") or "/" in text:
        raise InputError(f"no machine file at {text}; presets: {', '.join(preset_names())}")
    raise UnknownName("machine", text, preset_names())


def _from_toml(data: bytes, origin: str) -> Machine:
    try:
        return msgspec.toml.decode(data, type=Machine).check()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RecordError(f"{origin} is not a whole machine: {error}") from None
