"""Measure this machine: its drive, its links, its compute. The result is a `Machine`.

Rates are medians of repeats after a warm run. The caller's settings hold (TF32, number of
threads) and are left as found, random state included; scratch files have no name on disk
while they are used, so that nothing is left behind however the probe ends.
"""

import mmap
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import psutil  # type: ignore[import-untyped, unused-ignore]
import torch
from torch.optim.adamw import adamw

from legroom.core.errors import InputError, RecordError, TierError
from legroom.core.files import cache_dir
from legroom.machine.drive import MIB, PAGE_BYTES, PairRates, disk_error, drive_rates
from legroom.machine.spec import Link, Machine, Tier

PINNED_SHARE = 0.5
"""Of host memory; the rest stays pageable for the system, the file cache and loaders."""
DISK_RESERVE_SHARE = 0.05
"""Of free disk; a full file system harms more than this job."""
NUM_STATE_ELEMENTS = 2**22
"""Of the update on the host: its four tensors are larger than most caches."""
CGROUP_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")

Progress = Callable[[str, float], None]


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    """How much work one measurement does."""

    repeats: int
    sample_s: float
    """A short call is repeated until a sample lasts about this long."""
    matrix_side: int
    memory_bytes: int
    copy_bytes: int
    disk_bytes: int


# Device memory of the probe: at most three square matrices of float32 and the matrix
# library's workspace (32 MiB), 224 MiB quick and 800 MiB full. Samples are short, since a card
# that does nothing but products for long lowers its clock, as it does not in a mixed step.
_QUICK = _Sizes(
    repeats=3,
    sample_s=0.01,
    matrix_side=4096,
    memory_bytes=96 * MIB,
    copy_bytes=64 * MIB,
    disk_bytes=64 * MIB,
)
_FULL = _Sizes(
    repeats=5,
    sample_s=0.02,
    matrix_side=8192,
    memory_bytes=384 * MIB,
    copy_bytes=256 * MIB,
    disk_bytes=512 * MIB,
)
_SIZES = {
    ("cuda", True): _QUICK,
    ("cuda", False): _FULL,
    ("cpu", True): replace(_QUICK, matrix_side=512, memory_bytes=32 * MIB),
    ("cpu", False): replace(_FULL, matrix_side=2048, memory_bytes=256 * MIB),
}


def probe(
    device: str | None = None,
    *,
    directory: str | None = None,
    quick: bool = False,
    progress: Progress | None = None,
) -> Machine:
    """Measure this machine with `device` ("cuda" if there is one) and the disk at `directory`.

    `progress` is told each stage and the share done. Raises InputError for a device that is
    not here, TierError when the directory cannot be written or the device has no room.
    """
    target = _target(device)
    place = directory or tempfile.gettempdir()
    tell = progress or (lambda stage, share: None)
    bench = _Bench(target, _SIZES[target.type, quick])
    try:
        with torch.no_grad(), torch.autocast(target.type, enabled=False):
            machine = _measure(bench, place, tell)
    except torch.OutOfMemoryError:
        raise TierError(
            f"{target} has no room for the probe itself: free some memory, or probe quick"
        ) from None
    finally:
        _release(target)
    tell("done", 1.0)
    return machine.check()


def cached_probe(device: str | None = None, directory: str | None = None) -> Machine:
    """A quick probe, one for each drive, kept in the user's cache; tiers are always read anew."""
    target, place = _target(device), directory or tempfile.gettempdir()
    tiers, path = _tiers(target, place), _cache_path(_name(target), place)
    try:
        if (machine := Machine.load(path)).name == _name(target):
            return msgspec.structs.replace(machine, tiers=tiers)
    except (InputError, RecordError):
        pass  # none yet, or damaged: measure
    machine = probe(str(target), directory=place, quick=True)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        machine.save(path)
    except OSError:
        pass  # a cache that cannot be written costs the next process a probe, no more
    return machine


def _cache_path(name: str, directory: str) -> Path:
    drive, usual = os.stat(directory).st_dev, os.stat(tempfile.gettempdir()).st_dev
    name += f"-{torch.__version__}" + ("" if drive == usual else f"-drive{drive}")
    return cache_dir() / f"machine-{name}.json"


def _target(device: str | None) -> torch.device:
    name = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if re.fullmatch(r"cpu|cuda(:\d+)?", name) is None:
        raise InputError(f"cannot probe the device {name!r}; use 'cpu', 'cuda' or 'cuda:1'")
    target = torch.device(name)
    if target.type == "cpu":
        return target
    if (target.index or 0) >= torch.cuda.device_count():
        raise InputError(f"no device {name!r} on this machine; 'cpu' is always there")
    index = torch.cuda.current_device() if target.index is None else target.index
    return torch.device("cuda", index)


def _name(target: torch.device) -> str:
    if target.type == "cpu":
        return f"cpu-{psutil.cpu_count() or 1}c"
    return re.sub(r"[^a-z0-9.]+", "-", torch.cuda.get_device_name(target).lower()).strip("-")


def _measure(bench: "_Bench", directory: str, tell: Progress) -> Machine:
    tiers = _tiers(bench.target, directory)
    tell("disk", 0.0)
    drive = drive_rates(directory, bench.sizes.disk_bytes)
    tell("matrix products", 0.4)
    matrix = bench.matrix_rates()
    tell("memory", 0.6)
    memory, vector = bench.memory_rate(), bench.vector_rate(matrix["float32"])
    tell("links", 0.7)
    links, duplex, pin_s = _cuda_links(bench, drive) if bench.cuda else _cpu_links(drive)
    tell("launches and updates", 0.9)
    return Machine(
        name=_name(bench.target),
        device="cuda" if bench.cuda else "cpu",
        origin="measured",
        tiers=tiers,
        links=links,
        duplex=duplex,
        matrix_flops=matrix,
        vector_flops=vector,
        memory_bytes_per_s=memory,
        launch_s=bench.launch_s(),
        pin_s_per_byte=pin_s,
        cpu_worker_bytes_per_s=_worker_rate(bench.sizes),
    )


# ---- tiers


def _tiers(target: torch.device, directory: str) -> tuple[Tier, ...]:
    ram, in_use = _host_bytes()
    disk = _disk_tier(directory)
    if target.type == "cpu":
        return Tier(name="device", num_bytes=ram, reserve_bytes=in_use), disk
    free, total = torch.cuda.mem_get_info(target)
    others = max(0, total - free - torch.cuda.memory_reserved(target))
    return (
        Tier(name="device", num_bytes=total, reserve_bytes=others),
        Tier(name="host", num_bytes=ram, reserve_bytes=in_use),
        Tier(name="pinned", num_bytes=int(ram * PINNED_SHARE)),
        disk,
    )


def _host_bytes() -> tuple[int, int]:
    """Bytes of RAM this process may reach, and how many of them are taken."""
    memory = psutil.virtual_memory()
    total = min(memory.total, _cgroup_limit() or memory.total)
    available = min(memory.available, total - psutil.Process().memory_info().rss)
    return total, total - max(0, available)


def _cgroup_limit() -> int | None:
    """The container's memory limit: the machine's RAM is no promise inside one."""
    for name in CGROUP_LIMITS:
        path = Path("/sys/fs/cgroup", name)
        text = path.read_text().strip() if path.is_file() else ""
        if text.isdigit():
            return int(text)
    return None


def _disk_tier(directory: str) -> Tier:
    try:
        free = psutil.disk_usage(directory).free
    except OSError as error:
        raise disk_error(directory, error) from None
    if free <= 0:
        raise TierError(f"the disk at {directory} is full; choose another directory")
    return Tier(name="disk", num_bytes=free, reserve_bytes=int(free * DISK_RESERVE_SHARE))


# ---- compute


class _Bench:
    """Times work on one device."""

    def __init__(self, target: torch.device, sizes: _Sizes) -> None:
        self.target, self.sizes = target, sizes
        self.cuda = target.type == "cuda"

    def seconds(self, work: Callable[[], object], calls: int = 0) -> float:
        """Median time of one call; `calls` per sample, or as many as fill a sample."""
        work()
        once = self._sample(work, 1)
        calls = calls or max(1, min(100, int(self.sizes.sample_s / max(once, 1e-9))))
        return median(self._sample(work, calls) for _ in range(self.sizes.repeats))

    def _sample(self, work: Callable[[], object], calls: int) -> float:
        self._wait()
        start = time.perf_counter()
        for _ in range(calls):
            work()
        self._wait()
        return (time.perf_counter() - start) / calls

    def _wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.target)

    def matrix_rates(self) -> dict[str, float]:
        """FLOP per second of a large square product, by dtype."""
        dtypes = [torch.float32]
        if not self.cuda or torch.cuda.is_bf16_supported(including_emulation=False):
            dtypes.append(torch.bfloat16)
        if self.cuda:
            dtypes.append(torch.float16)
        return {str(d).removeprefix("torch."): self._matrix_rate(d) for d in dtypes}

    def _matrix_rate(self, dtype: torch.dtype) -> float:
        _release(self.target)
        side = self.sizes.matrix_side
        # A generator of our own leaves the caller's random state alone; random numbers,
        # since a card that multiplies zeros runs cooler and faster than it will in use.
        dice = torch.Generator(self.target).manual_seed(0)
        left, right = (
            torch.randn(side, side, generator=dice, device=self.target, dtype=dtype)
            for _ in range(2)
        )
        out = torch.empty_like(left)
        return 2 * side**3 / self.seconds(lambda: torch.mm(left, right, out=out))

    def vector_rate(self, float32_rate: float) -> float:
        """FLOP per second of the vector units: a product in full float32 uses only these."""
        settings = torch.backends.cuda.matmul
        if not self.cuda or settings.fp32_precision != "tf32":
            return float32_rate
        settings.fp32_precision = "ieee"
        try:
            return self._matrix_rate(torch.float32)
        finally:
            settings.fp32_precision = "tf32"

    def memory_rate(self) -> float:
        """Bytes per second, read plus written, of a copy within the device."""
        _release(self.target)
        num_bytes = self.sizes.memory_bytes
        source = torch.ones(num_bytes // 4, dtype=torch.float32, device=self.target)
        target = torch.empty_like(source)
        return 2 * num_bytes / self.seconds(lambda: target.copy_(source))

    def launch_s(self) -> float:
        """Time of one tiny op among many."""
        value = torch.zeros(1, dtype=torch.float32, device=self.target)
        return self.seconds(lambda: value.add_(1.0), calls=500)


def _worker_rate(sizes: _Sizes) -> float:
    """One CPU thread's rate over parameter, gradient and both Adam states, each counted once."""
    tensors = [torch.zeros(NUM_STATE_ELEMENTS, dtype=torch.float32) for _ in range(4)]
    param, grad, average, square = ([t] for t in tensors)
    steps = [torch.zeros((), dtype=torch.float32)]
    knobs: dict[str, Any] = {"beta1": 0.9, "beta2": 0.999, "lr": 1e-3, "weight_decay": 0.0}
    knobs |= {"eps": 1e-8, "amsgrad": False, "maximize": False, "fused": True}

    def update() -> None:
        adamw(param, grad, average, square, [], steps, **knobs)

    bench = _Bench(torch.device("cpu"), sizes)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return 4 * tensors[0].nbytes / bench.seconds(update)
    finally:
        torch.set_num_threads(before)


def _release(target: torch.device) -> None:
    """Hand the probe's device memory back, the matrix library's workspace included."""
    if target.type != "cuda":
        return
    torch.cuda.synchronize(target)
    getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()
    torch.cuda.empty_cache()


# ---- links

_Links = tuple[tuple[Link, ...], dict[str, float], float]


def _pair(near: str, far: str, root: str, rates: PairRates) -> tuple[Link, Link]:
    """The roads between two tiers, there and back."""
    late = rates.latency_s
    return (
        Link(source=near, target=far, bytes_per_s=rates.there, latency_s=late, root=root),
        Link(source=far, target=near, bytes_per_s=rates.back, latency_s=late, root=root),
    )


def _cpu_links(drive: PairRates) -> _Links:
    return _pair("device", "disk", "disk", drive), {"disk": drive.both}, 0.0


def _cuda_links(bench: _Bench, drive: PairRates) -> _Links:
    size, here = bench.sizes.copy_bytes, torch.cuda.device(bench.target)
    one, two, three = (_pinned(size) for _ in range(3))
    with one as (near, pin_1), two as (far, pin_2), three as (_, pin_3), here:
        bus = _copy_rates(bench, near, far)
    links = (*_pair("device", "host", "pcie", bus), *_pair("host", "disk", "disk", drive))
    pin_s = median((pin_1, pin_2, pin_3)) / size
    return links, {"pcie": bus.both, "disk": drive.both}, pin_s


@contextmanager
def _pinned(num_bytes: int) -> Iterator[tuple[torch.Tensor, float]]:
    """Fresh host memory, registered for direct copies, and the seconds that took.

    Registered here and not asked from torch, whose pinned allocator may hand out old memory
    (no cost to measure) and would keep ours.
    """
    slab = torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    start = time.perf_counter()
    code = int(runtime.cudaHostRegister(slab.data_ptr(), num_bytes, 0))
    seconds = time.perf_counter() - start
    if code != 0:
        raise TierError(f"host memory cannot be pinned (CUDA error {code})")
    try:
        yield slab, seconds
    finally:
        torch.cuda.synchronize()
        runtime.cudaHostUnregister(slab.data_ptr())


def _copy_rates(bench: _Bench, near: torch.Tensor, far: torch.Tensor) -> PairRates:
    """Rates of the link between device and pinned memory, alone and both ways at once."""
    _release(bench.target)
    source, sink = torch.zeros_like(near, device=bench.target), far.to(bench.target)
    new_stream: Any = torch.cuda.Stream
    streams = new_stream(bench.target), new_stream(bench.target)

    out = partial(near.copy_, source, non_blocking=True)
    back = partial(sink.copy_, far, non_blocking=True)

    def both() -> None:
        for stream, copy in zip(streams, (out, back), strict=True):
            with torch.cuda.stream(stream):
                copy()

    out_rate, in_rate = near.nbytes / bench.seconds(out), far.nbytes / bench.seconds(back)
    both_rate = 2 * near.nbytes / bench.seconds(both)
    one_page = partial(near[:PAGE_BYTES].copy_, source[:PAGE_BYTES], non_blocking=True)
    latency_s = bench.seconds(one_page, calls=1)
    return PairRates(out_rate, in_rate, max(both_rate, out_rate, in_rate), latency_s)
