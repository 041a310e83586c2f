"""The page in a real browser: its script runs, draws, and reports no error."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from legroom.core.outcome import Comparison, Outcome, Span, Timeline
from legroom.memory.actions import Recompute
from legroom.memory.handmade import chain
from legroom.memory.plan import Plan
from legroom.memory.trace import Step
from legroom.views.page import write_page

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
KEYS = """<script>
for (const [id, keys] of [["memory", "p + - ArrowRight Home End 0"],
    ["lanes", "ArrowRight ArrowDown + ArrowLeft ArrowUp End Escape ArrowRight"]]) {
  for (const key of keys.split(" ")) {
    document.getElementById(id).dispatchEvent(new KeyboardEvent("keydown", { key }));
  }
}
</script></body>"""

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium here")


def dump_dom(page: Path, profile: Path) -> str:
    """The document after its scripts ran."""
    assert BROWSER is not None
    command = [BROWSER, *FLAGS, f"--user-data-dir={profile}", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


def make_timeline(step: Step, empty: bool = False) -> Timeline:
    """One sample and one bar per op of the step, a tenth of a second apart."""
    count = 0 if empty else len(step.ops)
    levels = tuple(2**30 * (1 + min(i, count - i)) for i in range(count))
    return Timeline(
        source="predicted",
        times_s=tuple(i / 10 for i in range(count)),
        bytes_by_kind={"activation": levels, "</script>": levels},
        spans=tuple(
            Span(
                lane="compute" if i % 3 else "device->host",
                start_s=i / 10,
                end_s=(i + 1) / 10,
                label=f"<img src=x onerror=alert(1)> {op.name}",
                kind=op.phase.value,
            )
            for i, op in enumerate(step.ops[:count])
        ),
    )


def draw(tmp_path: Path, empty: bool = False) -> str:
    """Write a page, walk over it by keyboard, and return the document."""
    step = chain(6, 2**30)
    outcome = Outcome(source="predicted", peak_bytes={"device": 2**33}, step_s=2.6)
    plan = Plan(
        policy="by hand",
        machine="box",
        model="a </script> model",
        budget={"device": 2**34},
        actions=(Recompute(block=2, variant="full"),),
        predicted=outcome,
    )
    timeline = make_timeline(step, empty)
    path = tmp_path / "page.html"
    write_page(path, step, plan, Comparison(predicted=outcome), timeline, lines={"far": 2**40})
    path.write_text(path.read_text().replace("</body>", KEYS))
    return dump_dom(path, tmp_path / "profile")


def test_page_draws(tmp_path: Path) -> None:
    """Both charts are drawn, one bar per span, and the tooltip follows the keyboard."""
    text = draw(tmp_path)
    body = re.search(r"<body[^>]*>", text)
    assert body is not None
    assert 'data-drawn="yes"' in body.group() and "data-error" not in body.group()
    assert len(re.findall(r'<rect[^>]*class="span ', text)) == len(chain(6, 2**30).ops)
    assert len(re.findall(r'<path d="M[^"]*"', text)) == 2
    assert "NaN" not in text
    tip = re.search(r'<div id="tip" role="status"[^>]*>(.*?)</div>', text, re.S)
    assert tip is not None and "starts at" in tip.group(1)
    assert "&lt;img src=x" in tip.group(1) and "<img" not in text


def test_empty_page_draws(tmp_path: Path) -> None:
    """A timeline with nothing in it gives empty charts and no error."""
    text = draw(tmp_path, empty=True)
    body = re.search(r"<body[^>]*>", text)
    assert body is not None
    assert 'data-drawn="yes"' in body.group() and "data-error" not in body.group()
