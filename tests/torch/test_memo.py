"""Trials that were made before are known again, and no others."""

from pathlib import Path

import pytest
import torch

from legroom.memory.builds import Build
from legroom.memory.mechanisms import compiled
from legroom.memory.mechanisms.compiled import Compiler
from legroom.memory.memo import Memo, describe
from legroom.memory.sample import Sample
from legroom.memory.trial import Subject, Trial, build_ways, try_all
from tests.torch.nets import Mlp, rows, stack
from tests.torch.support import CPU


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    monkeypatch.setattr("legroom.memory.trial.SHARES", (1.0, 0.0))


def sample(width: int = 64, length: int = 16) -> Sample:
    x = torch.randn(4, length, width, requires_grad=True)
    return Sample.take("0", Mlp(width), ((x,), {}), CPU)


def found(one: Sample) -> list[tuple[float, Build]]:
    subjects = [Subject(one, build_ways(Compiler(), one.module, (1.0, 0.0)))]
    return try_all(one.module, CPU, subjects, remember=True)[0]


def test_a_second_start_tries_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process, another model of the same form: the same builds, without a trial."""
    first = found(sample())

    def fails(self: Trial, name: str) -> Build:
        raise AssertionError("tried again")

    monkeypatch.setattr(Trial, "measure", fails)
    assert found(sample()) == first and first


def test_another_form_is_another_trial() -> None:
    """Other shapes, other settings, other modes, frozen weights."""
    base = describe(sample(), CPU)
    assert describe(sample(), CPU) == base
    others = [sample(length=8), sample(width=32), sample()]
    others[2].module.eval()
    frozen = sample()
    next(frozen.module.parameters()).requires_grad_(False)
    set_otherwise = sample()
    set_otherwise.module.heads = 7  # type: ignore[assignment]
    for other in (*others, frozen, set_otherwise):
        assert describe(other, CPU) != base


def test_what_cannot_be_known_again_is_not_kept(tmp_path: Path) -> None:
    """An argument that says no more of itself than its address."""
    x = rows().requires_grad_()
    one = Sample.take("0", stack(Mlp)[0], ((x,), {"extra": object()}), CPU)  # type: ignore[index]
    assert Memo.of(one, CPU).path is None
    assert not list(tmp_path.rglob("*.json"))


def test_a_damaged_file_is_tried_anew() -> None:
    """And written again."""
    one = sample()
    first = found(one)
    path = Memo.of(one, CPU).path
    assert path is not None
    path.write_text("not json")
    assert [share for share, _ in found(one)]
    assert len(Memo.of(one, CPU)._known) == 2 and first


def test_two_at_once_lose_nothing_of_each_other(tmp_path: Path) -> None:
    first, second = (Memo(tmp_path / "block.json") for _ in range(2))
    build = Build("keep 50%", 1.0, 2.0, 0, 0, (), (), ())
    first.put("forecast", build)
    second.put("keep 50%", build)
    both = Memo(tmp_path / "block.json")
    assert both.get("forecast") == both.get("keep 50%") == build
