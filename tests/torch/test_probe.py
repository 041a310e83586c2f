"""The probe on a CPU: plausible numbers, nothing left behind, settings as they were."""

import errno
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch")

from legroom.core.errors import InputError, TierError  # noqa: E402
from legroom.machine import drive  # noqa: E402
from legroom.machine import probe as probing  # noqa: E402
from legroom.machine.probe import cached_probe, probe  # noqa: E402
from legroom.machine.spec import Machine, find_machine  # noqa: E402

MIB = 2**20


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """This machine, probed once for the whole file."""
    return probe("cpu", directory=str(tmp_path_factory.mktemp("probe")), quick=True)


def test_a_cpu_is_a_device_with_a_disk_below(measured: Machine) -> None:
    """RAM is the device tier, the disk the lower one, one road each way."""
    assert measured.check() is measured
    assert measured.device == "cpu"
    assert measured.origin == "measured"
    assert measured.name.startswith("cpu-") and measured.name.endswith("c")
    assert [tier.name for tier in measured.tiers] == ["device", "disk"]
    assert [link.name for link in measured.links] == ["device->disk", "disk->device"]
    assert measured.route("disk") is not None


def test_measured_numbers_are_plausible(measured: Machine) -> None:
    """Orders of magnitude that any machine of this century keeps."""
    assert measured.matrix_flops.keys() >= {"float32", "bfloat16"}
    assert all(1e8 < rate < 1e15 for rate in measured.matrix_flops.values())
    assert 1e8 < measured.vector_flops < 1e15
    assert 1e8 < measured.memory_bytes_per_s < 1e13
    assert 1e-8 < measured.launch_s < 1e-2
    assert 1e7 < measured.cpu_worker_bytes_per_s < 1e12
    for link in measured.links:
        assert 1e6 < link.bytes_per_s < 1e12
        assert 0 < link.latency_s < 1
        assert measured.duplex[link.root] >= link.bytes_per_s


def test_a_probe_can_be_saved_and_found(measured: Machine, tmp_path: Path) -> None:
    """A measured machine is a record like any other."""
    assert find_machine(measured.save(tmp_path / "here.json")) == measured


def test_the_probe_leaves_everything_as_it_was(tmp_path: Path) -> None:
    """No file, no change to threads, random state or grad mode; progress only rises to 1."""
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    told: list[tuple[str, float]] = []
    probe("cpu", directory=str(tmp_path), quick=True, progress=lambda *news: told.append(news))
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    assert torch.is_grad_enabled()
    shares = [share for _, share in told]
    assert shares == sorted(shares) and shares[0] == 0.0 and told[-1] == ("done", 1.0)


def test_a_directory_that_cannot_be_written_is_a_tier_error(tmp_path: Path) -> None:
    """A path below a plain file fails for every user, root included."""
    blocker = tmp_path / "file"
    blocker.write_text("not a directory")
    with pytest.raises(TierError, match="choose another directory"):
        probe("cpu", directory=str(blocker / "below"), quick=True)
    with pytest.raises(TierError, match="nowhere"):
        probe("cpu", directory=str(tmp_path / "nowhere"), quick=True)


def test_a_full_disk_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Running out of space in mid-measurement says what was needed and cleans up."""

    def full(handle: int, data: object, offset: int) -> int:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(TierError, match="needs 64.0 MiB free"):
        probe("cpu", directory=str(tmp_path), quick=True)
    assert list(tmp_path.iterdir()) == []


def test_a_failure_of_ours_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is raised in mid-measurement, the scratch file is gone."""

    def broken(self: object) -> float:
        raise RuntimeError("broken")

    monkeypatch.setattr(drive._Drive, "_latency_s", broken)
    with pytest.raises(RuntimeError, match="broken"):
        probe("cpu", directory=str(tmp_path), quick=True)
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_direct_io_is_measured_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where direct I/O is refused, buffered writes with a flush take its place."""
    flushes: list[int] = []
    monkeypatch.setattr(drive, "_go_direct", lambda handle: False)
    monkeypatch.setattr(os, "fsync", flushes.append)
    rates = drive.drive_rates(str(tmp_path), 16 * MIB)
    assert min(rates) > 0 and rates.both >= max(rates.there, rates.back)
    assert len(flushes) == 10  # one first pass, then three each of write, read and both
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("device", ["nope", "meta", "cpu:1x", "cuda:99"])
def test_a_device_that_is_not_here_is_refused(device: str) -> None:
    """A wrong device name is the user's error, and names what can be used."""
    with pytest.raises(InputError, match="'cpu'"):
        probe(device)


def test_the_cache_serves_a_later_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured once; then read, with tiers as they are now; a damaged file is measured anew."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = cached_probe("cpu")
    (path,) = (tmp_path / "legroom").iterdir()
    assert path.name == f"machine-{first.name}-{torch.__version__}.json"

    measure = probing.probe
    calls: list[str | None] = []

    def counted(device: str | None = None, **given: Any) -> Machine:
        calls.append(device)
        return measure(device, **given)

    monkeypatch.setattr(probing, "probe", counted)
    again = cached_probe("cpu")
    assert calls == []
    assert (again.links, again.matrix_flops) == (first.links, first.matrix_flops)
    path.write_text("{")
    anew = cached_probe("cpu")
    assert calls == ["cpu"]
    assert Machine.load(path) == anew


def test_each_drive_is_measured_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory on another drive has rates and room of its own; one that is not there is told."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    asked: list[str | None] = []

    def told(device: str, *, directory: str, quick: bool) -> Machine:
        asked.append(directory)
        return msgspec.structs.replace(find_machine("l4"), name=probing._name(torch.device("cpu")))

    monkeypatch.setattr(probing, "probe", told)
    other, stat = tmp_path / "other", os.stat
    other.mkdir()

    def drives(path: object, *args: object, **kwargs: object) -> object:
        moved = str(path) == str(other)
        return SimpleNamespace(st_dev=-1) if moved else stat(path, *args, **kwargs)  # type: ignore[call-overload]

    monkeypatch.setattr(probing.os, "stat", drives)
    for directory in (None, str(other), str(other), str(tmp_path)):
        cached_probe("cpu", directory)
    assert asked == [tempfile.gettempdir(), str(other)]
    with pytest.raises(TierError, match="nowhere"):
        cached_probe("cpu", str(tmp_path / "nowhere"))


def test_a_cache_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a cache the machine is measured, and nothing is said."""
    (tmp_path / "file").write_text("not a directory")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert cached_probe("cpu").device == "cpu"
