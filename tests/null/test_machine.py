"""Machines: presets load, files keep their law, routes lead out and back. No torch needed."""

from pathlib import Path

import msgspec
import pytest

from legroom.core.errors import InputError, RecordError, UnknownName
from legroom.machine.spec import PRESETS, Link, Machine, Tier, find_machine, preset_names

REQUIRED = {
    "h200",
    "h100-80g",
    "a100-40g",
    "a100-80g",
    "l4",
    "rtx4090",
    "rtx2080ti",
    "v100-16g",
    "v100-32g",
    "p100-16g",
    "titanx-12g",
    "optane-box",
    "a100-ssd",
    "v100-ssd",
}
GIB = 2**30


def small_machine(**changes: object) -> Machine:
    """A device, a host and a disk, with round numbers."""
    machine = Machine(
        name="small",
        device="cuda",
        origin="made up",
        tiers=(
            Tier(name="device", num_bytes=100),
            Tier(name="host", num_bytes=1000),
            Tier(name="disk", num_bytes=10_000),
        ),
        links=(
            Link(source="device", target="host", bytes_per_s=10.0, root="pcie"),
            Link(source="host", target="device", bytes_per_s=10.0, root="pcie"),
            Link(source="host", target="disk", bytes_per_s=2.0),
            Link(source="disk", target="host", bytes_per_s=3.0),
        ),
        duplex={"pcie": 15.0},
        matrix_flops={"float32": 1e3, "bfloat16": 4e3},
        vector_flops=1e3,
        memory_bytes_per_s=1e3,
    )
    return msgspec.structs.replace(machine, **changes)


def test_the_required_presets_are_there() -> None:
    """Every machine the documentation promises comes with legroom."""
    assert set(preset_names()) >= REQUIRED


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_keeps_the_law_and_is_plausible(name: str) -> None:
    """A preset carries its file's name, reaches each lower tier, and has rates of its century."""
    machine = find_machine(name)
    assert machine.name == name
    assert machine.origin
    for tier in machine.tiers:
        assert tier.num_bytes >= 10 * GIB
        if tier.name not in ("device", "pinned"):
            assert machine.route(tier.name) is not None
    for link in machine.links:
        assert 1e8 <= link.bytes_per_s <= 1e11
        assert 0 < link.latency_s <= 1e-2
        assert not link.root or link.root in machine.duplex
    assert 1e12 <= machine.vector_flops <= machine.rate("bfloat16")
    assert 5e10 <= machine.memory_bytes_per_s <= 5e12
    assert 1e-6 <= machine.launch_s <= 1e-5
    assert machine.cpu_worker_bytes_per_s > 1e9


@pytest.mark.parametrize("name", sorted(REQUIRED - {"optane-box"}))
def test_a_card_has_four_tiers_and_pins_a_share_of_host(name: str) -> None:
    """A GPU box has device, host, pinned and disk; pinned memory is part of host memory."""
    machine = find_machine(name)
    tiers = {tier.name: tier.num_bytes for tier in machine.tiers}
    assert machine.device == "cuda"
    assert set(tiers) == {"device", "host", "pinned", "disk"}
    assert tiers["pinned"] <= tiers["host"]
    assert 0 < machine.pin_s_per_byte < 1e-8


@pytest.mark.parametrize("name", preset_names())
def test_every_figure_of_a_preset_has_a_source(name: str) -> None:
    """Each tier, link and rate stands under a comment."""
    lines = (PRESETS / f"{name}.toml").read_text().splitlines()
    for before, line in zip(lines, lines[1:], strict=False):
        if line.startswith(("[[", "vector_", "memory_", "launch_", "pin_", "cpu_", "float")):
            assert before.startswith("#"), line


def test_the_h200_is_as_measured() -> None:
    """The H200 carries the measured rates: 55 GB/s each way, 89 both ways, 0.8 s per GiB."""
    machine = find_machine("h200")
    out, back = machine.link("device", "host"), machine.link("host", "device")
    assert out and back and out.bytes_per_s == back.bytes_per_s == 55e9
    assert machine.duplex["pcie"] == 89e9
    assert machine.pin_s_per_byte * GIB == pytest.approx(0.8, rel=0.01)
    assert machine.rate("bfloat16") == 790e12


def test_an_unknown_name_gets_the_nearest() -> None:
    """A misspelt preset is answered with the nearest one and the whole list."""
    with pytest.raises(UnknownName, match="Did you mean 'a100-40g'") as caught:
        find_machine("a100-40gb")
    assert set(caught.value.known) >= REQUIRED


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """A path that is not there is the user's error, with the path in it."""
    with pytest.raises(InputError, match="gone.toml"):
        find_machine(tmp_path / "gone.toml")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("m.toml", "name = "),
        ("m.toml", "name = 'half a machine'"),
        ("m.json", "{"),
        ("m.json", "[]"),
        ("m.json", '{"legroom": "plan", "version": 1, "body": {}}'),
        ("m.json", '{"legroom": "machine", "version": 1, "body": {"name": "half"}}'),
        ("m.json", '{"legroom": "machine", "version": 99, "body": {}}'),
    ],
)
def test_a_damaged_or_newer_file_is_refused(tmp_path: Path, name: str, text: str) -> None:
    """What cannot be read whole is never half used."""
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(RecordError, match=name):
        find_machine(path)


@pytest.mark.parametrize("name", ["m.json", "m.json.gz"])
def test_a_saved_machine_comes_back_the_same(tmp_path: Path, name: str) -> None:
    """Save and load are inverse, for a hand-made machine and for a preset."""
    for machine in (small_machine(), find_machine("h200")):
        path = machine.save(tmp_path / name)
        assert find_machine(path) == Machine.load(path) == machine
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_a_preset_file_is_an_example_for_users(tmp_path: Path) -> None:
    """A copy of a preset elsewhere loads by its path; a Machine passes through unchanged."""
    path = tmp_path / "mine.toml"
    path.write_bytes((PRESETS / "l4.toml").read_bytes())
    machine = find_machine(path)
    assert machine == find_machine("l4")
    assert find_machine(machine) is machine


def test_a_route_is_direct_or_by_way_of_host() -> None:
    """Out and back: one hop to host, two to disk, none to a tier that is not there."""
    machine = small_machine()
    out, back, down, up = machine.links
    assert machine.route("host") == ((out,), (back,))
    assert machine.route("disk") == ((out, down), (up, back))
    assert machine.route("tape") is None


def test_a_direct_link_is_preferred_and_a_one_way_street_is_no_route() -> None:
    """Peer links win over two hops; a tier one cannot come back from is unreachable."""
    machine = small_machine()
    away = Link(source="device", target="disk", bytes_per_s=5.0)
    home = Link(source="disk", target="device", bytes_per_s=5.0)
    assert small_machine(links=(*machine.links, away, home)).route("disk") == ((away,), (home,))
    assert small_machine(links=machine.links[:3]).route("disk") is None


def test_a_dtype_without_units_runs_at_the_float32_rate() -> None:
    """A rate that is not known is float32's."""
    assert small_machine().rate("bfloat16") == 4e3
    assert small_machine().rate("float16") == 1e3


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tiers": (Tier(name="host", num_bytes=1),)}, "'device'"),
        ({"tiers": (Tier(name="device", num_bytes=0),), "links": ()}, "tier device"),
        ({"tiers": (Tier(name="device", num_bytes=1),)}, "device->host"),
        ({"matrix_flops": {"bfloat16": 1.0}}, "float32"),
        ({"vector_flops": 0.0}, "above zero"),
        ({"duplex": {"pcie": -1.0}}, "above zero"),
    ],
)
def test_a_machine_that_breaks_its_law_names_the_row(changes: dict[str, object], said: str) -> None:
    """check() says which tier, link or rate is at fault."""
    with pytest.raises(RecordError, match=said):
        small_machine(**changes).check()


def test_slower_links_are_slower_together_too() -> None:
    """Each, and all of a root; nothing else changes."""
    machine = find_machine("h200")
    slower = machine.with_links(0.5)
    assert [x.bytes_per_s * 2 for x in slower.links] == [x.bytes_per_s for x in machine.links]
    assert slower.duplex["pcie"] * 2 == machine.duplex["pcie"]
    assert msgspec.structs.replace(slower, links=machine.links, duplex=machine.duplex) == machine
