"""What is seen of a run while it goes on."""

import io
from collections.abc import Sequence

import pytest
from rich.console import Console

from evals.screen import progress
from evals.screen.progress import Progress, Standing, duration, in_words

FULL = Standing("full", "ratio=0.1", 2, 1.0)
SNAPKV = [Standing("snapkv", f"ratio={ratio}", 2, score) for ratio, score in ((0.1, 0.5), (0.2, 1))]


def test_a_log_has_a_line_per_sample_with_every_score_and_what_is_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    moments = iter([0.0, 60.0, 120.0])
    monkeypatch.setattr(progress, "monotonic", lambda: next(moments))
    with Progress("needle", 5, 3) as shown:
        shown.stage("reading", 3)
        shown.advance()
        shown.sample_done("a", [FULL, *SNAPKV])
        shown.sample_done("b", [FULL])
    assert capsys.readouterr().err.splitlines() == [
        "needle: 4/5 a  full 1.000  snapkv 0.500 1.000  60 s, about 60 s left",
        "needle: 5/5 b  1.000  2 min",
    ]


def on_terminal(monkeypatch: pytest.MonkeyPatch, height: int = 30) -> io.StringIO:
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=100, height=height, legacy_windows=False)
    monkeypatch.setattr(progress, "Console", lambda **_: console)
    return written


def seen(shown: Progress, standings: Sequence[Standing]) -> str:
    """The view of a terminal as text, when a sample has ended."""
    with shown:
        shown.stage("s1: reading 4000 tokens", 30)
        shown.advance()
        shown.say("a note")
        shown.sample_done("s1", standings)
        with shown.console.capture() as capture:
            shown.console.print(shown.view())
    return capture.get()


def test_a_terminal_shows_variants_samples_and_the_present_stage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = on_terminal(monkeypatch)
    lost = Standing("oracle", "budget=64", 1, None)
    view = seen(Progress("needle", 4, 1), [FULL, *SNAPKV, lost])
    lines = [" ".join(line.split()) for line in view.splitlines()]
    assert "full ratio=0.1 1.000 2" in lines
    assert "snapkv ratio=0.2 1.000 2" in lines
    assert "oracle budget=64 out of memory 1" in lines
    assert any(line.startswith("needle") and "2/4" in line for line in lines)
    assert any("s1: reading 4000 tokens" in line and "1/30" in line for line in lines)
    assert "a note" in written.getvalue()


def test_a_low_terminal_is_not_overrun(monkeypatch: pytest.MonkeyPatch) -> None:
    on_terminal(monkeypatch, height=14)
    view = seen(Progress("needle", 4, 1), [FULL] * 20)
    assert "and 16 more" in view
    assert len(view.splitlines()) <= 14


def test_figures_are_put_into_words() -> None:
    assert [duration(s) for s in (4.6, 100, 5399, 7260)] == ["5 s", "2 min", "1 h 30 min", "2 h 01 min"]  # fmt: skip
    assert in_words([Standing("full", "", 0, None), FULL]) == "full none 1.000"
    assert in_words([FULL]) == "1.000"
