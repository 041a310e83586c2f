"""Read a result file of memory_frontier.py: tables, who is faster within a cap, the figure."""

import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]

FAMILIES = {
    "eager": ("black", "o"),
    "checkpoint": ("tab:brown", "s"),
    "selective": ("tab:olive", "s"),
    "save_on_cpu": ("tab:gray", "v"),
    "offload_activations": ("tab:pink", "v"),
    "compile": ("tab:blue", "^"),
    "blocks": ("tab:green", "D"),
    "offload-compiled": ("tab:cyan", "v"),
    "legroom": ("tab:red", "o"),
    "legroom-eager": ("tab:orange", "o"),
}
"""The tools in the order they are shown, with their colour and marker."""
OURS = ("legroom", "legroom-eager")
COLUMNS = ("tool", "setting", "cap GiB", "reserved GiB", "ms", "of fastest", "best within the cap?")


# -- numbers -------------------------------------------------------------------------------------


def ran(rows: Iterable[Row]) -> list[Row]:
    """The rows of cases that got through."""
    return [row for row in rows if "error" not in row]


def fastest_uncapped(rows: Iterable[Row]) -> float:
    """Milliseconds of the fastest case without a cap; 0 if there is none."""
    return min((row["ms"] for row in ran(rows) if not row["cap_gib"]), default=0.0)


def best_peer(rows: Iterable[Row], cap_gib: float) -> Row | None:
    """The fastest peer whose reserved peak is within the cap; none if none is."""
    peers = (row for row in ran(rows) if row["tool"] not in OURS)
    within = (row for row in peers if row["reserved_gib"] <= cap_gib)
    return min(within, key=lambda row: row["ms"], default=None)


def wins(row: Row, rows: Iterable[Row]) -> bool:
    """Whether a case of ours kept its cap, and no peer within it is as fast."""
    peer = best_peer(rows, row["cap_gib"])
    return kept(row) and (peer is None or row["ms"] < peer["ms"])


def kept(row: Row) -> bool:
    """Whether a case got through within its cap."""
    return "error" not in row and row["reserved_gib"] <= row["cap_gib"]


def errors(rows: Iterable[Row], predicted: str, measured: str) -> dict[str, float]:
    """How far off each prediction was, by case: predicted over measured, less one."""
    ours = (row for row in ran(rows) if predicted in row and row.get(measured))
    return {_name(row): row[predicted] / row[measured] - 1 for row in ours}


# -- text ----------------------------------------------------------------------------------------


def tables(content: dict[str, Any]) -> str:
    """All there is in a result file, as markdown."""
    rows = list(content["rows"].values())
    parts = [f"{content.get('machine', '?')}, torch {content.get('torch', '?')}"]
    parts += [model_table(model, _of(rows, model)) for model in _models(rows)]
    parts += [summary(rows)]
    if content.get("largest"):
        parts.append(largest_table(list(content["largest"].values())))
    return "\n\n".join(part for part in parts if part)


def model_table(model: str, rows: list[Row]) -> str:
    """The cases of one model: peers as they are, ours from the largest cap down."""
    fastest = fastest_uncapped(rows)
    lines = [f"### {model}", "", *_head(COLUMNS)]
    order = list(FAMILIES)
    for row in sorted(rows, key=lambda r: (order.index(r["tool"]), -_size(r))):
        lines.append(_line([row["tool"], row["setting"], *_numbers(row, fastest, rows)]))
    return "\n".join(lines)


def _numbers(row: Row, fastest: float, rows: list[Row]) -> list[str]:
    cap = _short(row["cap_gib"]) if row["cap_gib"] else ""
    best = _verdict(row, rows) if row["tool"] in OURS and row["cap_gib"] else ""
    if "error" in row:
        return [cap, "", row["error"].replace("|", "/")[:60], "", best]
    share = f"{row['ms'] / fastest:.2f}" if fastest else ""
    return [cap, _short(row["reserved_gib"]), f"{row['ms']:.1f}", share, best]


def _verdict(row: Row, rows: list[Row]) -> str:
    peer = best_peer(rows, row["cap_gib"])
    if "error" not in row and not kept(row):
        return "no: over the cap"
    if peer is None:
        none = f"none of the {sum(r['tool'] not in OURS for r in rows)} others run fits"
        return f"yes: {none}" if wins(row, rows) else none
    words = f"{_tool(peer)} takes {peer['ms']:.1f}"
    if "error" not in row:
        words += f" ({(peer['ms'] / row['ms'] - 1) * 100:+.0f} %)"
    return f"{'yes' if wins(row, rows) else 'no'}: {words}"


def summary(rows: list[Row]) -> str:
    """Within how many caps each of ours is fastest, and how good its predictions are."""
    lines = []
    for tool in OURS:
        capped = [row for row in rows if row["tool"] == tool and row["cap_gib"]]
        won = sum(wins(row, _of(rows, row["model"])) for row in capped)
        if capped:
            lines.append(f"{tool} is faster than every peer within {won} of {len(capped)} caps.")
    for what, predicted, measured in (
        ("peak", "predicted_gib", "allocated_gib"),
        ("time", "predicted_ms", "ms"),
    ):
        found = errors(rows, predicted, measured)
        if found:
            worst = max(found, key=lambda name: abs(found[name]))
            median = statistics.median(map(abs, found.values()))
            lines.append(
                f"Predicted {what} over {len(found)} runs: off by {median:.1%} in the median, "
                f"{found[worst]:+.1%} at worst ({worst})."
            )
    return "\n".join(lines)


def largest_table(rows: list[Row]) -> str:
    """The largest batch of each tool within a cap, and what it does per second."""
    names = ("model", "tool", "cap GiB", "largest batch", "ms", "samples/s", "trials that broke")
    lines = ["### Largest batch", "", *_head(names)]
    for row in rows:
        rate = f"{row['batch'] / row['ms'] * 1e3:.1f}" if "ms" in row else ""
        cells = [row["model"], _tool(row), _short(row["cap_gib"]), str(row.get("batch", "?"))]
        broke = ", ".join(n for n, trial in row["trials"].items() if trial.get("broke"))
        lines.append(_line([*cells, f"{row['ms']:.1f}" if "ms" in row else "", rate, broke]))
    return "\n".join(lines)


def _head(names: Iterable[str]) -> list[str]:
    names = list(names)
    return [_line(names), _line("---" for _ in names)]


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _short(gib: float) -> str:
    return f"{gib:.1f}" if gib >= 1 else f"{gib:.4g}"


def _size(row: Row) -> float:
    size: float = row["cap_gib"] or row.get("reserved_gib", 0)
    return size


def _tool(row: Row) -> str:
    return f"{row['tool']} {row['setting']}".strip()


def _name(row: Row) -> str:
    return f"{row['model']}, {row['tool']} in {_short(row['cap_gib'])} GiB"


def _models(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(row["model"] for row in rows))


def _of(rows: Iterable[Row], model: str) -> list[Row]:
    return [row for row in rows if row["model"] == model]


# -- figure --------------------------------------------------------------------------------------


def draw(content: dict[str, Any], path: Path) -> None:
    """Time against peak as SVG: a panel per model, a line per tool.

    Needs matplotlib: pip install 'legroom[docs]'.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise SystemExit("--figure needs matplotlib: pip install 'legroom[docs]'") from error
    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "legroom"})
    from matplotlib import pyplot

    rows = ran(content["rows"].values())
    models = _models(rows)
    columns = min(len(models), 3)
    lines = -(-len(models) // columns)
    figure, axes = pyplot.subplots(
        lines, columns, figsize=(4.2 * columns, 3.4 * lines), squeeze=False
    )
    for axis, model in zip(axes.flat, models, strict=False):
        _panel(axis, model, _of(rows, model))
    for axis in axes.flat[len(models) :]:
        axis.set_axis_off()
    shown = {h: n for a in axes.flat for h, n in zip(*a.get_legend_handles_labels(), strict=True)}
    handles = {name: handle for handle, name in shown.items()}
    names = [family for family in FAMILIES if family in handles]
    figure.legend([handles[n] for n in names], names, loc="outside lower center", ncols=5)
    figure.tight_layout(rect=(0, 0.12 / lines, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _panel(axis: Any, model: str, rows: list[Row]) -> None:
    for family, (colour, marker) in FAMILIES.items():
        mine = sorted((row["reserved_gib"], row["ms"]) for row in rows if row["tool"] == family)
        if mine:
            heavy = 2.0 if family in OURS else 1.0
            axis.plot(*zip(*mine, strict=True), color=colour, marker=marker, label=family, lw=heavy)
    axis.set(title=model, xlabel="peak reserved, GiB", ylabel="ms per step", yscale="log")
    axis.set_xlim(left=0)
    axis.yaxis.set_major_formatter("{x:.0f}")
    axis.yaxis.set_minor_formatter("{x:.0f}")
    axis.tick_params(labelsize=8, which="both")
    axis.grid(alpha=0.3, which="both")
