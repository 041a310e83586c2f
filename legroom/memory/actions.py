"""What a plan may do with storages and blocks: Recompute, Move, Compress, Park. The rest stays."""

import msgspec


class Recompute(msgspec.Struct, frozen=True, kw_only=True, tag="recompute"):
    """Run a block in one of its variants: drop some saved storages and bring them back."""

    block: int
    variant: str


class Move(msgspec.Struct, frozen=True, kw_only=True, tag="move"):
    """Send a saved storage to another tier and fetch it back, at four positions of the step."""

    storage: int
    tier: str
    out_start: int
    """The copy out may begin."""
    out_wait: int
    """The source's bytes are reusable from here on (the device waits for the copy)."""
    in_start: int
    """Room is taken and the copy back begins."""
    in_wait: int
    """First use: the device waits for the copy."""


class Compress(msgspec.Struct, frozen=True, kw_only=True, tag="compress"):
    """Store a saved storage in fewer bits until its first use."""

    storage: int
    codec: str
    """A name in CODECS."""


class Park(msgspec.Struct, frozen=True, kw_only=True, tag="park"):
    """Keep optimizer states on the host; they pass through the device while it updates."""

    params: tuple[str, ...]
    """Whose, in the order in which they are updated."""
    num_bytes: int
    wave_bytes: int
    """So many pass through together; all of a parameter's, however many they are."""
    window_bytes: int
    """Most of them on the device at once."""
    at_once: float = 1.0
    """Share of all parameters that are updated together, at most: what takes scratch then."""


class Codec(msgspec.Struct, frozen=True, kw_only=True):
    """Bits stored per element, on which dtypes, and whether that is exact."""

    bits: int
    dtypes: tuple[str, ...]
    exact: bool


ITEM_BYTES = {"bool": 1, "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
CODECS = {
    "bits": Codec(bits=1, dtypes=("bool",), exact=True),
    "bf16": Codec(bits=16, dtypes=("float32",), exact=False),
    "fp8": Codec(bits=8, dtypes=("float32", "bfloat16", "float16"), exact=False),
}

Action = Recompute | Move | Compress | Park


def compressed_bytes(codec: str, num_bytes: int, dtype: str) -> int:
    """Bytes a storage takes in a codec; raises KeyError for a dtype the codec does not know."""
    elements = num_bytes // ITEM_BYTES[dtype]
    return (elements * CODECS[codec].bits + 7) // 8
