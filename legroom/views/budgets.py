"""What other budgets would give this very job: a table, and a line of time against memory."""

from collections.abc import Sequence

from rich import box
from rich.table import Table

from legroom.core.outcome import Point
from legroom.core.units import format_bytes, format_seconds

WIDTH, HEIGHT, PAD = 640, 220, 46
HEADS = ("budget", "peak", "step", "against no limit", "how")


def budget_rows(points: Sequence[Point], natural_s: float) -> list[tuple[str, ...]]:
    """Cells of the budgets, smallest first."""
    return [
        (
            format_bytes(p.budget_bytes),
            format_bytes(p.peak_bytes),
            format_seconds(p.step_s),
            f"{p.step_s / natural_s:.2f}x" if natural_s else "-",
            p.why,
        )
        for p in points
    ]


def budgets_table(points: Sequence[Point], natural_s: float) -> Table:
    """One row for each budget."""
    table = Table(box=box.SIMPLE_HEAD, title_justify="left")
    for head in HEADS:
        table.add_column(head, justify="left" if head == "how" else "right")
    for row in budget_rows(points, natural_s):
        table.add_row(*row)
    return table


def budgets_chart(points: Sequence[Point], here: tuple[int, float]) -> str:
    """Predicted step time against peak, as SVG; `here` is the plan in force."""
    peaks, times = [p.peak_bytes for p in points], [p.step_s for p in points]
    low, high = min(*peaks, here[0]), max(*peaks, here[0])
    fast, slow = min(*times, here[1]), max(*times, here[1])

    def place(peak: int, seconds: float) -> tuple[float, float]:
        x = PAD + (WIDTH - 2 * PAD) * (peak - low) / max(high - low, 1)
        y = HEIGHT - PAD - (HEIGHT - 2 * PAD) * (seconds - fast) / max(slow - fast, 1e-12)
        return round(x, 1), round(y, 1)

    spots = [place(p.peak_bytes, p.step_s) for p in points]
    line = " ".join(f"{x},{y}" for x, y in sorted(spots))
    dots = "".join(f'<circle class="spot" cx="{x}" cy="{y}" r="3"/>' for x, y in spots)
    x, y = place(*here)
    words = "".join(
        f'<text x="{a}" y="{b}" text-anchor="{anchor}">{text}</text>'
        for a, b, anchor, text in (
            (PAD, HEIGHT - PAD / 3, "start", format_bytes(low)),
            (WIDTH - PAD, HEIGHT - PAD / 3, "end", format_bytes(high)),
            (PAD, PAD / 2, "start", f"{format_seconds(slow)} per step"),
            (PAD, HEIGHT - PAD + 16, "start", format_seconds(fast)),
            (x, y - 9, "end" if x > WIDTH / 2 else "start", "this plan"),
        )
    )
    label = f"Predicted step time from {format_bytes(low)} to {format_bytes(high)}"
    return (
        f'<svg class="budgets" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">'
        f'<polyline points="{line}"/>{dots}<circle class="here" cx="{x}" cy="{y}" r="5"/>{words}'
        "</svg>"
    )
