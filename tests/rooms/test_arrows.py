"""Which room may import which, and who may import torch; read from the source, not by running."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / "legroom").rglob("*.py"))

MAY_IMPORT_TORCH = (
    "legroom/ahead.py",
    "legroom/api.py",
    "legroom/examples/*",
    "legroom/integrations/*",
    "legroom/machine/probe.py",
    "legroom/memory/blocks.py",
    "legroom/memory/assemble.py",
    "legroom/memory/device.py",
    "legroom/memory/fake.py",
    "legroom/memory/fitting.py",
    "legroom/memory/forecast.py",
    "legroom/memory/history.py",
    "legroom/memory/layout.py",
    "legroom/memory/job.py",
    "legroom/memory/calibrate.py",
    "legroom/memory/escape.py",
    "legroom/memory/kinds.py",
    "legroom/memory/mechanisms/*",
    "legroom/memory/measure.py",
    "legroom/memory/memo.py",
    "legroom/memory/online.py",
    "legroom/memory/ops.py",
    "legroom/memory/profile.py",
    "legroom/memory/raw.py",
    "legroom/memory/recorder.py",
    "legroom/memory/relief.py",
    "legroom/memory/replay.py",
    "legroom/memory/region.py",
    "legroom/memory/run.py",
    "legroom/memory/sample.py",
    "legroom/memory/saved.py",
    "legroom/memory/signature.py",
    "legroom/memory/strays.py",
    "legroom/memory/tiers.py",
    "legroom/memory/timers.py",
    "legroom/memory/trial.py",
    "legroom/memory/update.py",
    "legroom/memory/verify.py",
    "legroom/memory/workshop.py",
    "legroom/nn/*",
)
MAY_IMPORT_TORCH_INSIDE_FUNCTIONS = ("legroom/cli/*",)

FORBIDDEN = {
    "legroom/memory/policies/*": ("legroom.memory.mechanisms", "legroom.memory.run"),
    "legroom/memory/simulate*.py": ("legroom.memory.mechanisms", "legroom.memory.run"),
    "legroom/memory/mechanisms/*": ("legroom.memory.policies", "legroom.memory.simulate"),
    "legroom/memory/*": (
        "legroom.ahead",
        "legroom.api",
        "legroom.cli",
        "legroom.integrations",
        "legroom.views",
    ),
    "legroom/machine/*": (
        "legroom.ahead",
        "legroom.api",
        "legroom.cli",
        "legroom.integrations",
        "legroom.memory",
        "legroom.views",
    ),
}
ALLOWED = {
    "legroom/core/*": ("legroom.core",),
    "legroom/machine/spec.py": ("legroom.core",),
    "legroom/views/*": (
        "legroom.core",
        "legroom.machine.spec",
        "legroom.memory.actions",
        "legroom.memory.plan",
        "legroom.memory.shipped",
        "legroom.memory.trace",
        "legroom.views",
    ),
}


def name_of(path: Path) -> str:
    """The path inside the repository: "legroom/memory/plan.py"."""
    return path.relative_to(ROOT).as_posix()


def dotted(path: Path) -> str:
    """The module's name: "legroom.memory.plan"."""
    return name_of(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def matches(path: Path, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name_of(path), pattern) for pattern in patterns)


def within(module: str, rooms: tuple[str, ...]) -> bool:
    return any(module == room or module.startswith(room + ".") for room in rooms)


def is_module(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def full_name(path: Path, node: ast.ImportFrom) -> str:
    """What a `from ... import` names, with leading dots made absolute."""
    if not node.level:
        return node.module or ""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)[: -node.level]
    return ".".join([*parts, *([node.module] if node.module else [])])


def imports_of(path: Path, *, lazy: bool = True) -> Iterator[tuple[int, str]]:
    """Line and module of each import; those for type checkers alone are left out."""
    todo: list[ast.AST] = [ast.parse(path.read_text())]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = full_name(path, node)
            parts = [f"{base}.{alias.name}" for alias in node.names]
            yield from ((node.lineno, part if is_module(part) else base) for part in parts)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            todo.extend(node.orelse)
        elif lazy or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            todo.extend(ast.iter_child_nodes(node))


def ours(path: Path) -> Iterator[tuple[int, str]]:
    return ((line, name) for line, name in imports_of(path) if within(name, ("legroom",)))


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_no_arrow_points_the_wrong_way(path: Path) -> None:
    """Policies and simulators know no mechanism, mechanisms no policy, and no room its users."""
    banned = tuple(r for p, rooms in FORBIDDEN.items() if matches(path, (p,)) for r in rooms)
    wrong = [f"line {line}: {name}" for line, name in ours(path) if within(name, banned)]
    assert not wrong, f"{name_of(path)} may not import {wrong}"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_closed_rooms_import_only_their_own(path: Path) -> None:
    """The core imports the core; views read records and nothing else."""
    for pattern, rooms in ALLOWED.items():
        if matches(path, (pattern,)):
            wrong = [f"line {line}: {name}" for line, name in ours(path) if not within(name, rooms)]
            assert not wrong, f"{name_of(path)} may import only {rooms}, not {wrong}"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_only_marked_files_import_torch(path: Path) -> None:
    """Records, policies, simulators and views are free of torch; the command imports it late."""
    if matches(path, MAY_IMPORT_TORCH):
        return
    lazy = not matches(path, MAY_IMPORT_TORCH_INSIDE_FUNCTIONS)
    lines = [line for line, name in imports_of(path, lazy=lazy) if within(name, ("torch",))]
    assert not lines, f"{name_of(path)} imports torch in lines {lines}"


def test_unmarked_modules_import_with_torch_absent() -> None:
    """Every module that is not marked imports on a machine without torch, one after another."""
    free = [dotted(path) for path in MODULES if not matches(path, MAY_IMPORT_TORCH)]
    assert "legroom.memory.plan" in free
    code = "\n".join(
        [
            "import importlib, sys",
            "sys.modules['torch'] = None",
            "for name in sys.argv[1:]:",
            "    try: importlib.import_module(name)",
            "    except ImportError as error: sys.exit(f'{name}: {error}')",
        ]
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *free], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_the_reader_of_imports_sees_all_forms(tmp_path: Path) -> None:
    """Plain, from, relative and late imports are seen; those for type checkers are not."""
    path = ROOT / "legroom" / "memory" / "plan.py"
    node = ast.parse("from .trace import Step").body[0]
    assert isinstance(node, ast.ImportFrom)
    assert full_name(path, node) == "legroom.memory.trace"
    source = tmp_path / "sample.py"
    source.write_text(
        "from typing import TYPE_CHECKING\n"
        "from legroom.memory import trace, missing\n"
        "if TYPE_CHECKING:\n    import torch\n"
        "def late():\n    import torch.nn\n"
    )
    eager = {name for _, name in imports_of(source, lazy=False)}
    assert eager == {"typing", "legroom.memory", "legroom.memory.trace"}
    assert {name for _, name in imports_of(source)} == {*eager, "torch.nn"}
