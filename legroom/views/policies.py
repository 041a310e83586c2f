"""Policies side by side: tables of ratios over many budgets and of pools, and a figure."""

from collections.abc import Mapping, Sequence
from html import escape

from rich import box
from rich.table import Table
from rich.text import Text

from legroom.core.units import format_bytes

Lines = Mapping[str, Sequence[float | None]]
"""By policy: the step time at each budget against that with no budget; None where none fits."""

UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "bytes"))
WIDTH, HEIGHT = 860, 460
LEFT, RIGHT, TOP, BOTTOM = 56, 190, 30, 46
COLOURS = (
    "#1b6ca8", "#d1495b", "#3a7d44", "#b5651d", "#6a4c93", "#00798c",
    "#8d6a9f", "#606c38", "#9a031e", "#4a4e69",
)  # fmt: skip
DASHES = ("", "6 3", "2 3", "9 3 2 3")
HIGHEST = 2.5
"""The figure ends here; what takes longer leaves it at the top."""
MARKS = 6


def ratios_table(title: str, budgets: Sequence[int], lines: Lines, natural_bytes: int) -> Table:
    """A row for each policy, a column for each budget."""
    power, unit = _unit(max(budgets))
    table = Table(box=box.SIMPLE_HEAD, title_justify="left", title=Text(f"{title}; in {unit}"))
    table.add_column("policy", no_wrap=True)
    for size in budgets:
        head = f"{size / natural_bytes * 100:.0f} %\n{size / power:.4g}"
        table.add_column(head, justify="right", no_wrap=True)
    for name, ratios in in_order(lines).items():
        table.add_row(Text(name), *("-" if x is None else f"{x:.2f}x" for x in ratios))
    return table


def pools_table(pools: Mapping[str, tuple[int, Mapping[str, int]]]) -> Table:
    """What lives at the peak of each policy's plan, and each allocator's pool for it."""
    power, unit = _unit(max((live for live, _ in pools.values()), default=0))
    title = f"bytes that live at once, and the pool that holds them by allocator; in {unit}"
    table = Table(box=box.SIMPLE_HEAD, title_justify="left", title=Text(title))
    table.add_column("policy", no_wrap=True)
    allocators = list(dict.fromkeys(name for _, sizes in pools.values() for name in sizes))
    for head in ("live", *allocators):
        table.add_column(head, justify="right", no_wrap=True)
    for policy, (live, sizes) in pools.items():
        cells = [f"{sizes[k] / power:.2f} {_more(sizes[k], live):>5}" for k in allocators]
        table.add_row(Text(policy), f"{live / power:.2f}", *cells)
    return table


def _more(num_bytes: int, live: int) -> str:
    share = (num_bytes / live - 1) * 100 if live else 0.0
    return f"{share:.0f}%" if share >= 9.95 else f"{share:.1f}%"


def _unit(num_bytes: int) -> tuple[int, str]:
    """The largest that these are one of, and its name."""
    return next((power, unit) for power, unit in UNITS if num_bytes >= power or power == 1)


def in_order(lines: Lines) -> Lines:
    """Those that fit most budgets first, of these the fastest."""

    def rank(name: str) -> tuple[int, float, str]:
        found = [x for x in lines[name] if x is not None]
        return -len(found), sum(found), name

    return {name: lines[name] for name in sorted(lines, key=rank)}


def policies_chart(title: str, budgets: Sequence[int], lines: Lines) -> str:
    """An SVG file: step time against budget, a line for each policy that fits any."""
    shown = {k: v for k, v in in_order(lines).items() if any(x is not None for x in v)}
    parts = [_text(LEFT, 18, escape(title), "start", "bold"), *_axes(budgets)]
    for i, (name, ratios) in enumerate(shown.items()):
        colour, dash = COLOURS[i % len(COLOURS)], DASHES[i // len(COLOURS) % len(DASHES)]
        style = f'fill="none" stroke="{colour}" stroke-dasharray="{dash}"'
        spots = [_place(budgets, b, x) for b, x in zip(budgets, ratios, strict=True) if x]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in sorted(spots))
        heavy = 3 if name == "auto" else 1.5
        parts.append(
            f'<polyline {style} stroke-width="{heavy}" points="{points}" clip-path="url(#box)"/>'
        )
        parts += _key(i, name, style)
    label = f"Predicted step time of {len(shown)} policies over {len(budgets)} budgets"
    clip = (
        f'<clipPath id="box"><rect x="{LEFT}" y="{TOP - 3}" width="{WIDTH - LEFT - RIGHT}" '
        f'height="{HEIGHT - TOP - BOTTOM + 6}"/></clipPath>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{label}" font-family="sans-serif" font-size="11">{clip}'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>{"".join(parts)}</svg>\n'
    )


def _place(budgets: Sequence[int], budget: float, ratio: float) -> tuple[float, float]:
    low, high = min(budgets), max(budgets)
    x = LEFT + (WIDTH - LEFT - RIGHT) * (budget - low) / max(high - low, 1)
    y = HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (ratio - 1) / (HIGHEST - 1)
    return x, max(y, -1e4)


def _axes(budgets: Sequence[int]) -> list[str]:
    parts = [_text(LEFT, HEIGHT - 8, "device budget; left is tighter", "start")]
    for i in range(MARKS + 1):
        ratio = 1 + (HIGHEST - 1) * i / MARKS
        _, y = _place(budgets, budgets[0], ratio)
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
        )
        parts.append(_text(LEFT - 6, y + 4, f"{ratio:.2f}x", "end"))
    for budget in budgets:
        x, _ = _place(budgets, budget, 1.0)
        parts.append(_text(x, HEIGHT - BOTTOM + 16, format_bytes(budget), "middle"))
    return parts


def _key(i: int, name: str, style: str) -> list[str]:
    x, y = WIDTH - RIGHT + 14, TOP + 6 + i * min(14, (HEIGHT - TOP - 10) / 32)
    line = (
        f'<line x1="{x}" x2="{x + 24}" y1="{y - 4:.1f}" y2="{y - 4:.1f}" {style} stroke-width="2"/>'
    )
    return [line, _text(x + 30, y, escape(name), "start")]


def _text(x: float, y: float, words: str, anchor: str, weight: str = "normal") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}" '
        f'fill="#333">{words}</text>'
    )
