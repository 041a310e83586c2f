"""Record files: saved and loaded unchanged, or refused with the reason."""

import gzip
import json
from pathlib import Path

import pytest

from legroom.core.errors import InputError, RecordError
from legroom.core.outcome import Outcome
from legroom.memory.handmade import chain
from legroom.memory.trace import Step

STEP = chain(3, [10, 20, 30], num_saved=2, output_bytes=5, weight_bytes=7)


def as_dict(path: Path) -> dict[str, object]:
    loaded: dict[str, object] = json.loads(path.read_text())
    return loaded


@pytest.mark.parametrize("name", ["step.json", "step.json.gz"])
def test_a_record_comes_back_as_it_was(tmp_path: Path, name: str) -> None:
    path = STEP.save(tmp_path / name)
    assert path == tmp_path / name
    assert Step.load(path) == STEP
    assert Step.load(str(path)).saves == STEP.saves


def test_saving_leaves_one_file_and_replaces_the_old(tmp_path: Path) -> None:
    """The file appears in one move: no partial file stays, an old one is overwritten."""
    path = tmp_path / "step.json"
    path.write_text("old")
    STEP.save(path)
    assert Step.load(path) == STEP
    assert [p.name for p in tmp_path.iterdir()] == ["step.json"]


def test_the_same_record_gives_the_same_bytes(tmp_path: Path) -> None:
    one, two = STEP.save(tmp_path / "one.gz"), STEP.save(tmp_path / "two.gz")
    assert one.read_bytes() == two.read_bytes()


def test_the_header_says_kind_and_version(tmp_path: Path) -> None:
    head = as_dict(STEP.save(tmp_path / "step.json"))
    assert head["legroom"] == "step" and head["version"] == Step.version


def test_a_newer_format_asks_for_an_upgrade(tmp_path: Path) -> None:
    path = STEP.save(tmp_path / "step.json")
    path.write_text(json.dumps(as_dict(path) | {"version": Step.version + 1}))
    with pytest.raises(RecordError, match="upgrade legroom"):
        Step.load(path)


@pytest.mark.parametrize("version", [None, "1", 0, -1, 1.5])
def test_a_version_that_is_no_number_is_refused(tmp_path: Path, version: object) -> None:
    path = STEP.save(tmp_path / "step.json")
    path.write_text(json.dumps(as_dict(path) | {"version": version}))
    with pytest.raises(RecordError, match="no valid format version"):
        Step.load(path)


def test_a_file_of_another_kind_names_both(tmp_path: Path) -> None:
    outcome = Outcome(source="predicted", peak_bytes={"device": 1}, step_s=1.0)
    path = outcome.save(tmp_path / "outcome.json")
    with pytest.raises(RecordError, match="holds a 'outcome' record, wanted 'step'"):
        Step.load(path)


@pytest.mark.parametrize("text", ['{"a": 1}', "[1, 2]", "3"])
def test_a_foreign_file_is_no_legroom_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "foreign.json"
    path.write_text(text)
    with pytest.raises(RecordError, match="no legroom file"):
        Step.load(path)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_cut_file_is_damaged(tmp_path: Path, share: float) -> None:
    path = STEP.save(tmp_path / "step.json")
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(RecordError, match=r"step\.json is damaged"):
        Step.load(path)


def test_bytes_that_are_no_text_are_damaged(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    path.write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(RecordError, match="is damaged"):
        Step.load(path)


@pytest.mark.parametrize("keep", [0, 5, 40, -1])
def test_a_cut_gzip_file_is_damaged(tmp_path: Path, keep: int) -> None:
    path = STEP.save(tmp_path / "step.json.gz")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(RecordError, match="is damaged"):
        Step.load(path)


def test_a_gzip_name_on_plain_text_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "step.json.gz"
    path.write_text(STEP.to_json())
    with pytest.raises(RecordError, match="is damaged"):
        Step.load(path)


def test_a_flipped_bit_in_a_gzip_file_is_damaged(tmp_path: Path) -> None:
    """Whatever the inflater says of it, the user gets a RecordError that names the file."""
    path = STEP.save(tmp_path / "step.json.gz")
    data = bytearray(path.read_bytes())
    for i in range(10, len(data)):
        flipped = bytearray(data)
        flipped[i] ^= 0xFF
        path.write_bytes(flipped)
        with pytest.raises(RecordError, match="damaged"):
            Step.load(path)


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    head = json.loads(STEP.to_json())
    del head["body"]["ops"]
    with pytest.raises(RecordError, match="not a whole step record.*ops"):
        Step.from_bytes(json.dumps(head).encode())


def test_a_missing_body_is_refused() -> None:
    with pytest.raises(RecordError, match="not a whole step record"):
        Step.from_bytes(b'{"legroom": "step", "version": 1}')


def test_loading_checks_the_law(tmp_path: Path) -> None:
    head = json.loads(STEP.to_json())
    head["body"]["storages"][1][1] = -4
    path = tmp_path / "step.json.gz"
    path.write_bytes(gzip.compress(json.dumps(head).encode()))
    with pytest.raises(RecordError, match=r"storage 1 \(s0\.0\)"):
        Step.load(path)


def test_a_missing_file_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no step file at"):
        Step.load(tmp_path / "nowhere.json")


def test_a_folder_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read the step file"):
        Step.load(tmp_path)
