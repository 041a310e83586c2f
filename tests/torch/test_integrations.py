"""Real trainers with and without the callback: the same losses and weights, bit for bit."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from legroom.core.errors import BudgetError, InputError
from legroom.machine.spec import Link, Machine, Tier

pytest.importorskip("transformers")
pytest.importorskip("lightning")

import lightning
import transformers

from legroom.integrations.huggingface import LegroomCallback as TrainerCallback
from legroom.integrations.lightning import LegroomCallback as LightningCallback

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*"),
]

DISK: dict[str, Any] = {"bytes_per_s": 1e9, "root": "disk"}
MACHINE = Machine(
    name="test-cpu",
    device="cpu",
    origin="made up",
    tiers=(Tier(name="device", num_bytes=8 << 30), Tier(name="disk", num_bytes=8 << 30)),
    links=(
        Link(source="device", target="disk", **DISK),
        Link(source="disk", target="device", **DISK),
    ),
    duplex={"disk": 1e9},
    matrix_flops={"float32": 5e10},
    vector_flops=5e10,
    memory_bytes_per_s=1e10,
)
VOCAB, LENGTH, BATCH = 96, 32, 4
LLAMA_BUDGET = 1_500_000
"""Of 1.96 MB, of which 0.57 are there before the step."""


def no_hooks(model: nn.Module) -> bool:
    """Nothing of ours is left in the model, nor in autograd."""
    x = torch.ones(3, requires_grad=True)
    saved = (x * x).grad_fn._saved_self  # type: ignore[union-attr]
    clean = all(not m._forward_pre_hooks and not m._forward_hooks for m in model.modules())
    return clean and saved.data_ptr() == x.data_ptr()


# -- transformers --------------------------------------------------------------------------------


class Failing(transformers.TrainerCallback):
    """Fails at a moment of its choice."""

    def __init__(self, moment: str) -> None:
        setattr(self, moment, self.fail)

    def fail(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("made to fail")


def llama() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def sentences(count: int) -> list[dict[str, Tensor]]:
    dice = torch.Generator().manual_seed(7)
    rows = [torch.randint(VOCAB, (LENGTH,), generator=dice) for _ in range(count)]
    return [{"input_ids": row, "labels": row.clone()} for row in rows]


def trainer(folder: Path, callbacks: list[Any], **options: Any) -> transformers.Trainer:
    options = {"max_steps": 5, "seed": 1, **options}
    args = transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=BATCH,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **options,
    )
    data = sentences(64)
    made = transformers.Trainer(
        llama(), args, train_dataset=data, eval_dataset=data[:8], callbacks=callbacks
    )
    made.remove_callback(transformers.PrinterCallback)
    return made


def history(run: transformers.Trainer) -> list[float]:
    """All losses, of training and evaluation, in order, and their gradients' norms."""
    keys = ("loss", "eval_loss", "grad_norm")
    return [row[key] for row in run.state.log_history for key in keys if key in row]


def same_weights(one: nn.Module, two: nn.Module) -> bool:
    pairs = zip(one.parameters(), two.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_accumulation_steps": 2},
        {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True},
    ],
    ids=["plain", "accumulated", "evaluated"],
)
def test_a_trainer_learns_the_same_under_a_budget(tmp_path: Path, options: Any) -> None:
    """Losses, gradient norms, evaluations and weights are those of the run with no callback."""
    plain = trainer(tmp_path, [], **options)
    plain.train()
    callback = TrainerCallback(LLAMA_BUDGET, machine=MACHINE)
    mine = trainer(tmp_path, [callback], **options)
    mine.train()
    assert history(mine) == history(plain) and len(history(mine)) >= 10
    assert same_weights(mine.model, plain.model)
    assert callback.job is not None and no_hooks(mine.model)
    for kind in callback.job.kinds.values():
        assert kind.recorded and kind.plan is not None and kind.plan.actions
        assert kind.plan.predicted.device_bytes <= LLAMA_BUDGET
    assert "fits in" in callback.job.report()


def test_each_micro_batch_is_a_step_of_its_own(tmp_path: Path) -> None:
    """The first finds no gradients, the second finds some: two kinds, seen equally often."""
    callback = TrainerCallback(LLAMA_BUDGET, machine=MACHINE)
    trainer(tmp_path, [callback], gradient_accumulation_steps=2).train()
    assert callback.job is not None
    visits = {"+grads" in key: kind.visits for key, kind in callback.job.kinds.items()}
    assert visits == {False: 5, True: 5}


def test_a_summary_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="legroom"):
        trainer(tmp_path, [TrainerCallback(LLAMA_BUDGET, machine=MACHINE)]).train()
    (line,) = [r.getMessage() for r in caplog.records if r.name == "legroom"]
    assert line.startswith("legroom: budget 1.43 MiB; predicted peak")


def test_a_budget_that_cannot_be_kept_stops_the_trainer(tmp_path: Path) -> None:
    """The refusal comes before the first forward; nothing of the step stays behind."""
    callback = TrainerCallback(100_000, machine=MACHINE)
    run = trainer(tmp_path, [callback])
    with pytest.raises(BudgetError, match="smallest budget"):
        run.train()
    callback.close()
    assert no_hooks(run.model)


@pytest.mark.filterwarnings("ignore:legroom. cannot plan")
def test_a_failed_forward_leaves_no_open_step(tmp_path: Path) -> None:
    """A Trainer does not say that it failed; the model does, and autograd is free at once."""
    callback = TrainerCallback(LLAMA_BUDGET, machine=MACHINE)
    run = trainer(tmp_path, [callback])

    def fail(*_: Any) -> None:
        raise RuntimeError("made to fail")

    handle = run.model.model.layers[2].mlp.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="made to fail"):
        run.train()
    handle.remove()
    x = torch.ones(3, requires_grad=True)
    assert (x * x).grad_fn._saved_self.data_ptr() == x.data_ptr()  # type: ignore[union-attr]
    callback.close()
    assert no_hooks(run.model)


def test_a_context_manager_closes_after_any_failure(tmp_path: Path) -> None:
    """After backward, with the step still open."""
    with TrainerCallback(LLAMA_BUDGET, machine=MACHINE) as callback:
        run = trainer(tmp_path, [callback, Failing("on_pre_optimizer_step")])
        with pytest.raises(RuntimeError, match="made to fail"):
            run.train()
    assert no_hooks(run.model)


def test_a_trainer_can_be_trained_again_after_a_failure(tmp_path: Path) -> None:
    """What the failed run left is closed when the next one begins."""
    callback = TrainerCallback(LLAMA_BUDGET, machine=MACHINE)
    failing = Failing("on_pre_optimizer_step")
    run = trainer(tmp_path, [callback, failing])
    with pytest.raises(RuntimeError, match="made to fail"):
        run.train()
    run.remove_callback(failing)
    run.train()
    assert no_hooks(run.model) and len(history(run)) >= 10


# -- lightning -----------------------------------------------------------------------------------


class Net(nn.Module):
    """Layers alike, so that there are blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(6))
        )
        self.head = nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))


class Child(lightning.LightningModule):
    """Calls a child of its own, and has no forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = Net()
        self.losses: list[float] = []

    def compute(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, index: int) -> Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.compute(x), y)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        x, y = batch
        self.losses.append(nn.functional.cross_entropy(self.compute(x), y).item())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-3)


class Itself(Child):
    """Calls itself, as the Lightning guide does."""

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def compute(self, x: Tensor) -> Tensor:
        return self(x)


class Fails(Child):
    """Fails in its third batch, after the forward."""

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = super().training_step(batch, index)
        if index == 2:
            raise RuntimeError("made to fail")
        return loss


class Misleading(Itself):
    """Has a forward, and does not use it."""

    def compute(self, x: Tensor) -> Tensor:
        return self.net(x)


NET_BUDGET = 1_200_000
"""Of 1.61 MB, of which 0.37 are there before the step."""


def train_net(module: Child, folder: Path, callbacks: list[Any], **options: Any) -> Child:
    dice = torch.Generator().manual_seed(3)
    x, y = torch.randn(6 * 256, 64, generator=dice), torch.randint(4, (6 * 256,), generator=dice)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=256)
    torch.manual_seed(1)
    lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=callbacks,
        **options,
    ).fit(module, data, data)
    return module


@pytest.mark.parametrize("kind", [Child, Itself])
@pytest.mark.parametrize(
    "options",
    [{}, {"accumulate_grad_batches": 2}, {"val_check_interval": 2, "limit_val_batches": 2}],
    ids=["plain", "accumulated", "validated"],
)
def test_lightning_learns_the_same_under_a_budget(
    tmp_path: Path, kind: type[Child], options: Any
) -> None:
    """Losses of training and validation, and the weights, dropout and all."""
    plain = train_net(kind(), tmp_path, [], **options)
    callback = LightningCallback(NET_BUDGET, machine=MACHINE)
    mine = train_net(kind(), tmp_path, [callback], **options)
    assert mine.losses == plain.losses and len(mine.losses) >= 6
    assert same_weights(mine, plain)
    assert callback.job is not None and no_hooks(mine)
    plans = [kind.plan for kind in callback.job.kinds.values() if kind.plan is not None]
    assert any(plan.actions for plan in plans)
    assert all(plan.predicted.device_bytes <= NET_BUDGET for plan in plans)


def test_the_module_can_be_named(tmp_path: Path) -> None:
    callback = LightningCallback(NET_BUDGET, machine=MACHINE, module="net")
    module = train_net(Misleading(), tmp_path, [callback])
    assert callback.job is not None and callback.job.model is module.net
    with pytest.raises(InputError, match="Did you mean 'net'"):
        train_net(Child(), tmp_path, [LightningCallback(NET_BUDGET, machine=MACHINE, module="ned")])


def test_a_module_that_is_never_called_is_said_so(tmp_path: Path) -> None:
    module = Misleading()
    with pytest.raises(InputError, match="did not call 'the module itself'.*'net'"):
        train_net(module, tmp_path, [LightningCallback(NET_BUDGET, machine=MACHINE)])
    assert no_hooks(module)


def test_an_exception_in_lightning_leaves_nothing_behind(tmp_path: Path) -> None:
    """Raised after the forward, in an open step."""
    module = Fails()
    with pytest.raises(RuntimeError, match="made to fail"):
        train_net(module, tmp_path, [LightningCallback(NET_BUDGET, machine=MACHINE)])
    assert no_hooks(module)


# -- neither -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("room", "library"), [("huggingface", "transformers"), ("lightning", "lightning")]
)
def test_a_missing_library_is_said_plainly(room: str, library: str) -> None:
    """The room itself imports; the file that needs the library says how to get it."""
    code = (
        f"import sys; sys.modules[{library!r}] = None\n"
        "import legroom.integrations\n"
        f"try: import legroom.integrations.{room}\n"
        "except ImportError as error: print(error)\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert f"needs {library}: pip install 'legroom[{library}]'" in done.stdout
