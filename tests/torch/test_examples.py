"""The built-in jobs run on the CPU, the big ones build on meta, and users' own are found."""

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import legroom
from legroom.core.errors import InputError, UnknownName
from legroom.examples import EXAMPLES, Job, load_job
from legroom.examples.convnets import Grow
from legroom.examples.hub import HIDDEN, UNASKED
from legroom.examples.ranking import Pairs
from tests.torch.support import MACHINE, fitted, until_measured

SMALL = ["transformer", "convnet", "unet", "mlp", "lstm", "llama-tiny"]
BIG = {
    "llama-1b": 940_640_256,
    "resnet50": 25_557_032,
    "resnet152": 60_192_808,
    "gpt2": 124_439_808,
    "gpt2-large": 774_030_080,
    "llama-wide": 1_881_214_976,
    "moe": 933_880_832,
    "unet-512": 31_038_933,
    "vit-l16": 304_326_632,
    "vgg16": 138_357_544,
    "resnet200": 64_673_832,
    "inception": 23_834_568,
    "densenet": 7_978_856,
    "gpt2-medium": 354_823_168,
    "gpt2-xl": 1_557_611_200,
    "bert-base": 109_514_298,
    "bert-large": 335_174_458,
    "seq2seq": 160_015_616,
    "dlrm": 335_168_897,
}
TINY_DECODER = {"layers": 1, "dim": 128, "heads": 2, "vocab": 64, "batch": 1, "sequence": 16}


def num_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def tensors(batch: Any) -> list[torch.Tensor]:
    return list(batch.values() if isinstance(batch, dict) else batch)


def test_every_example_is_tested() -> None:
    assert sorted(EXAMPLES) == sorted([*SMALL, *BIG])


@pytest.mark.parametrize("name", SMALL)
def test_a_small_example_runs_a_step(name: str) -> None:
    """The loss is a finite scalar, and every parameter gets a finite gradient."""
    job = EXAMPLES[name]()
    loss = job.loss_fn(job.model, job.make_batch())
    loss.backward()
    assert loss.shape == () and math.isfinite(loss.item())
    for path, parameter in job.model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), path


@pytest.mark.parametrize("name", SMALL)
def test_an_example_is_the_same_each_time(name: str) -> None:
    """Weights and batches repeat, another seed gives another batch, the global RNG is untouched."""
    before = torch.get_rng_state()
    one, two = EXAMPLES[name](), EXAMPLES[name]()
    for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True):
        assert torch.equal(a, b)
    again = zip(tensors(one.make_batch(3)), tensors(two.make_batch(seed=3)), strict=True)
    assert all(torch.equal(a, b) for a, b in again)
    assert not torch.equal(tensors(one.make_batch(0))[0], tensors(one.make_batch(1))[0])
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("name", BIG)
def test_a_big_example_builds_on_meta(name: str) -> None:
    """It has the published number of parameters, and allocates none of them."""
    job = EXAMPLES[name](device="meta")
    assert num_parameters(job.model) == BIG[name]
    assert {t.device.type for t in (*job.model.parameters(), *tensors(job.make_batch()))} == {
        "meta"
    }


@pytest.mark.parametrize(
    "name", ["llama-1b", "llama-wide", "moe", "gpt2-large", "gpt2-xl", "bert-base"]
)
def test_a_big_language_model_is_in_bfloat16(name: str) -> None:
    model = EXAMPLES[name](device="meta").model
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("resnet50", {"batch": 2, "image": 64}),
        ("gpt2", {"layers": 1, "batch": 1, "sequence": 16}),
        ("llama-1b", TINY_DECODER),
        ("llama-wide", TINY_DECODER),
        ("moe", TINY_DECODER),
        ("gpt2-large", {"layers": 1, "dim": 64, "heads": 2, "batch": 1, "sequence": 16}),
        ("vit-l16", {"layers": 1, "dim": 64, "heads": 2, "batch": 2, "image": 32}),
        ("unet-512", {"width": 4, "depth": 2, "batch": 2, "image": 16}),
        ("transformer", {"layers": 1, "batch": 2, "sequence": 16, "dropout": 0.5}),
        ("vgg16", {"batch": 2, "image": 32}),
        ("resnet200", {"batch": 2, "image": 32}),
        ("inception", {"batch": 2, "image": 75}),
        ("densenet", {"layers": (2, 2), "growth": 8, "batch": 2, "image": 32}),
        ("gpt2-medium", {"layers": 1, "dim": 64, "heads": 2, "batch": 1, "sequence": 16}),
        ("gpt2-xl", {"layers": 1, "dim": 64, "heads": 2, "batch": 1, "sequence": 16}),
        ("bert-base", {"layers": 1, "dim": 64, "heads": 2, "batch": 2, "sequence": 16}),
        ("bert-large", {"layers": 1, "dim": 64, "heads": 2, "batch": 2, "sequence": 16}),
        ("seq2seq", {"layers": 3, "dim": 16, "vocab": 64, "batch": 2, "sequence": 5}),
        ("dlrm", {"tables": 3, "rows": 50, "dim": 16, "picks": 2, "batch": 8}),
    ],
)
def test_sizes_are_keywords(name: str, sizes: dict[str, Any]) -> None:
    """A big example made small runs a step on the CPU."""
    job = EXAMPLES[name](**sizes)
    loss = job.loss_fn(job.model, job.make_batch())
    loss.backward()
    assert math.isfinite(loss.item())


@pytest.mark.parametrize("name", ["resnet50", "unet-512", "densenet"])
def test_convolutions_are_channels_last(name: str) -> None:
    job = EXAMPLES[name](batch=2, image=32)
    images, _ = job.make_batch()
    kinds = (nn.Conv2d, nn.ConvTranspose2d)
    convolutions = [m.weight for m in job.model.modules() if isinstance(m, kinds)]
    for tensor in (images, *convolutions):
        assert tensor.is_contiguous(memory_format=torch.channels_last)


def test_a_grown_layer_keeps_what_came_in() -> None:
    """DenseNet: each layer's channels follow those before it."""
    layer = Grow(6, 4).eval()
    x = torch.randn(2, 6, 8, 8)
    assert layer(x).shape == (2, 10, 8, 8) and layer(x)[:, :6].equal(x)


def test_every_pair_is_multiplied_once() -> None:
    """DLRM: of one vector and those of three tables, six products."""
    pairs = Pairs(3, 5, 2)
    dense, rows = torch.randn(4, 2), torch.randint(5, (3, 4, 2))
    found = [dense, *(bag.weight[r].sum(1) for bag, r in zip(pairs.bags, rows, strict=True))]
    want = [(found[i] * found[j]).sum(1) for i in range(4) for j in range(i)]
    torch.testing.assert_close(pairs(dense, rows), torch.stack(want, 1))


def test_attention_looks_at_the_source_alone() -> None:
    """A translator's words depend on the words before them, and on the whole source."""
    model = EXAMPLES["seq2seq"](layers=3, dim=16, vocab=64, batch=2, sequence=6).model.eval()
    source, target = torch.randint(64, (2, 6)), torch.randint(64, (2, 6))
    other, later = source.clone(), target.clone()
    other[:, 5], later[:, 5] = (source[:, 5] + 1) % 64, (target[:, 5] + 1) % 64
    plain = model(source, target)
    torch.testing.assert_close(plain[:, :5], model(source, later)[:, :5], rtol=0, atol=0)
    assert not torch.equal(plain[:, 0], model(other, target)[:, 0])


def test_bert_guesses_hidden_tokens_alone() -> None:
    """About one in seven has a label, and none of those is shown."""
    batch = EXAMPLES["bert-base"](device="cpu", layers=1, dim=64, heads=2).make_batch()
    asked = batch["labels"] != UNASKED
    assert 1 / 8 < asked.float().mean() < 1 / 6
    assert batch["input_ids"][asked].eq(HIDDEN).all()


# -- users' own jobs -----------------------------------------------------------------------------

SOURCE = """
import torch
from torch import nn
from legroom.examples import Job
import beside

def loss_fn(model, batch):
    return model(batch).sum()

def triple(device="cpu", width=4):
    model = nn.Linear(width, beside.OUTPUTS, device=device)
    return model, lambda: torch.ones(2, width, device=device), loss_fn

def whole():
    return Job(nn.Linear(4, 1), lambda seed=0: torch.full((2, 4), float(seed)), loss_fn)

number = 3
def pair(): return nn.Linear(1, 1), loss_fn
def no_model(): return "model", loss_fn, loss_fn
def no_loss(): return nn.Linear(1, 1), loss_fn, None
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a user's file and a module beside it, as the working folder."""
    (tmp_path / "mine_own.py").write_text(SOURCE)
    (tmp_path / "beside.py").write_text("OUTPUTS = 1\n")
    (tmp_path / "lacking.py").write_text("import no_such_library\n")
    (tmp_path / "broken.py").write_text("def job(:\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


def test_a_built_in_name_gives_its_builder() -> None:
    assert load_job("mlp") is EXAMPLES["mlp"]


@pytest.mark.parametrize("where", ["mine_own", "mine_own.py", "./mine_own.py"])
def test_a_users_function_is_found(project: Path, where: str) -> None:
    """By module or by file; it may import what lies beside it, and gets device and sizes."""
    job = load_job(f"{where}:triple")(device="cpu", width=8)
    assert isinstance(job, Job)
    assert job.loss_fn(job.model, job.make_batch(seed=5)).shape == ()
    assert num_parameters(job.model) == 9


def test_a_users_function_gets_the_device(project: Path) -> None:
    job = load_job("mine_own:triple")(device="meta")
    assert next(job.model.parameters()).is_meta and job.make_batch().is_meta


def test_a_function_without_device_is_called_without(project: Path) -> None:
    job = load_job(f"{project / 'mine_own.py'}:whole")(device="cpu")
    assert job.make_batch(2).eq(2).all()


@pytest.mark.parametrize(
    ("name", "error", "says"),
    [
        ("transfomer", UnknownName, "Did you mean 'transformer'?"),
        ("mine_own:tripel", UnknownName, "Did you mean 'triple'?"),
        ("mine_own.py:tripel", UnknownName, "unknown function of mine_own.py 'tripel'"),
        ("mine_own.py", InputError, "names no function"),
        ("mine_own:", InputError, "names no function"),
        (":triple", InputError, "names no function"),
        ("nowhere:job", InputError, "cannot import 'nowhere'"),
        ("nowhere.py:job", InputError, "no file at nowhere.py"),
        ("..nowhere:job", InputError, "cannot import '..nowhere'"),
        ("lacking:job", InputError, "no_such_library"),
        ("lacking.py:job", InputError, "no_such_library"),
        ("broken.py:job", InputError, "cannot import broken.py"),
        ("broken:job", InputError, "cannot import 'broken'"),
        ("mine_own:number", InputError, "is a int, not a function"),
    ],
)
def test_a_bad_name_is_explained(project: Path, name: str, error: Any, says: str) -> None:
    with pytest.raises(error) as caught:
        load_job(name)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("pair", "returned a tuple of 2, wanted a Job, or (model, make_batch, loss_fn)"),
        ("loss_fn", "missing"),
        ("no_model", "the model is a str"),
        ("no_loss", "loss_fn is a NoneType"),
    ],
)
def test_a_wrong_return_is_explained(project: Path, name: str, says: str) -> None:
    """The builder says what came back, or which arguments the function still wants."""
    with pytest.raises(InputError) as caught:
        load_job(f"mine_own:{name}")()
    assert says in str(caught.value)


def test_a_missing_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match="pip install 'legroom"):
        EXAMPLES["llama-tiny"]()


@pytest.mark.filterwarnings("ignore:legroom. a step took")  # before it is recorded
@pytest.mark.parametrize("name", SMALL)
def test_the_peak_of_every_example_is_as_predicted(name: str) -> None:
    """Within 1 %, by the allocator's own reports."""
    example = EXAMPLES[name]()
    optimizer = torch.optim.AdamW(example.model.parameters(), lr=1e-4)
    batch, given = example.make_batch(), {"machine": MACHINE, "loss_fn": example.loss_fn}
    natural = legroom.estimate(example.model, batch, **given).device_bytes

    def step(job: Any) -> None:
        with job.step():
            example.loss_fn(example.model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    share = 1.6 if name == "lstm" else 0.7  # its kernel takes twice what fake tensors know
    budget = {"device": int(share * natural), "disk": 1 << 32}
    with fitted(example.model, "auto", optimizer=optimizer, budget=budget) as job:
        for i in range(6):
            job.meter.peaks = i > 2  # type: ignore[attr-defined]
            step(job)
        both = until_measured(job, lambda: step(job))
    measured = both.measured.device_bytes
    assert measured == pytest.approx(both.predicted.device_bytes, rel=0.01)
    assert measured <= budget["device"] + 1024
