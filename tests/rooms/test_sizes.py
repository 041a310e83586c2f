"""The code stays small: sizes of files and functions, a docstring each, plain ASCII."""

import ast
from pathlib import Path
from statistics import median, quantiles

import pytest

ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / "legroom").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
OTHERS = [ROOT / name for name in ("pyproject.toml", "Makefile", "scripts/check", "scripts/test")]

MAX_FILE_LINES = 400
MEDIAN_FUNCTION_LINES = 10
NINE_IN_TEN_FUNCTION_LINES = 35


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def function_lines() -> list[int]:
    """Lines of each function and method, from `def` to its end, docstring included."""
    return [
        (node.end_lineno or node.lineno) - node.lineno + 1
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_no_file_is_long(path: Path) -> None:
    """A file of more than 400 lines holds two ideas."""
    assert len(path.read_text().splitlines()) <= MAX_FILE_LINES


def test_the_median_function_is_short() -> None:
    """Half of all functions stay under ten lines."""
    assert median(function_lines()) < MEDIAN_FUNCTION_LINES


def test_nine_in_ten_functions_fit_a_screen() -> None:
    """Nine in ten functions stay under thirty-five lines."""
    assert quantiles(function_lines(), n=10)[-1] < NINE_IN_TEN_FUNCTION_LINES


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_every_module_says_what_it_holds(path: Path) -> None:
    """The first line of a module is a short sentence."""
    text = ast.get_docstring(ast.parse(path.read_text()))
    assert text, f"{name_of(path)} has no docstring"
    assert len(text.splitlines()[0]) <= 100


@pytest.mark.parametrize("path", [*MODULES, *TESTS, *OTHERS], ids=name_of)
def test_source_is_ascii(path: Path) -> None:
    """Code and comments are plain ASCII."""
    text = path.read_text(encoding="utf-8")
    wrong = [i for i, line in enumerate(text.splitlines(), 1) if not line.isascii()]
    assert not wrong, f"{name_of(path)} has other characters in lines {wrong}"


def test_every_folder_of_modules_is_a_package() -> None:
    """A folder with modules and no __init__.py would be left out of the wheel."""
    folders = {path.parent for path in MODULES}
    assert [name_of(f) for f in sorted(folders) if not (f / "__init__.py").exists()] == []
