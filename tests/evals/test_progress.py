"""What is seen of a run while it goes on."""

import io
from collections.abc import Sequence

import pytest
from rich.console import Console

from kvbench.evals.screen import progress
from kvbench.evals.prepare import Load
from kvbench.evals.screen.expect import Pace
from kvbench.evals.screen.progress import Progress, Standing, duration, in_words

FULL = Standing("full", "ratio=0.1", 2, 100.0)
SNAPKV = [Standing("snapkv", f"ratio={ratio}", 2, score) for ratio, score in ((0.1, 50.0), (0.2, 100))]


class Clock:
    now = 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time that progress is told."""
    clock = Clock()
    monkeypatch.setattr(progress, "monotonic", lambda: clock.now)
    return clock


def test_a_log_has_a_line_per_sample_with_every_score_and_what_is_left(
    capsys: pytest.CaptureFixture[str], clock: Clock
) -> None:
    with Progress("needle", 5, 3) as shown:
        shown.stage("reading", 3)
        clock.now = 60
        shown.sample_done("a", [FULL, *SNAPKV])
        clock.now = 120
        shown.sample_done("b", [FULL])
    assert capsys.readouterr().err.splitlines() == [
        "needle: 4/5 a  full 100.0  snapkv 50.0 100.0  60 s, about 60 s left",
        "needle: 5/5 b  100.0  2 min",
    ]


def on_terminal(monkeypatch: pytest.MonkeyPatch, height: int = 30, width: int = 100) -> io.StringIO:
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=width, height=height, legacy_windows=False)
    monkeypatch.setattr(progress.terminal, "console", lambda **_: console)
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
    written = on_terminal(monkeypatch, width=70)
    lost = Standing("oracle", "budget=64", 1, None)
    view = seen(Progress("needle", 4, 1), [FULL, *SNAPKV, lost])
    lines = [" ".join(line.split()) for line in view.splitlines()]
    assert "full ratio=0.1 100.0 2" in lines
    assert "snapkv ratio=0.2 100.0 2" in lines
    assert "oracle budget=64 out of memory 1" in lines
    assert any(line.startswith("needle") and "2/4" in line for line in lines)
    assert any("s1: reading 4000 tokens" in line and "1/30" in line for line in lines)
    assert "a note" in written.getvalue()


def test_a_low_terminal_shows_every_variant_in_its_turn(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    on_terminal(monkeypatch, height=14)
    many = [Standing(f"method-{i}", "ratio=0.1", 2, 0.5) for i in range(20)]
    shown, views = Progress("needle", 4, 1), ""
    shown.standings = many
    for _ in range(5):
        with shown.console.capture() as capture:
            shown.console.print(shown.view())
        assert len(capture.get().splitlines()) <= 14
        views += capture.get()
        clock.now += progress.PAGE_SECONDS
    assert all(f"method-{i} " in views for i in range(20))
    assert "of 20; the others follow" in views


def test_variants_stand_beside_each_other_before_any_has_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    on_terminal(monkeypatch, height=20)
    view = seen(Progress("needle", 4, 1), [Standing(f"m{i}", "ratio=0.1", 2, 0.5) for i in range(18)])
    assert all(f"m{i} " in view for i in range(18))
    assert "follow" not in view


def test_both_stages_move_the_bar_and_its_time(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """As in a first and a second sample that take minutes each; rich's own columns are asked for what they show."""
    on_terminal(monkeypatch)
    shown, bars, words = Progress("needle", 2, 0, work=[(1, 1)] * 2), list[float](), list[str]()
    with shown:
        for sample in ("a", "b"):
            for begin in (lambda: shown.reading("s", 4000, 10), lambda: shown.answering("s", 2, 10)):
                begin()
                for _ in range(10):
                    clock.now += 10
                    shown.advance()
                    bars.append(shown.bars.tasks[shown.samples].completed)
                    with shown.console.capture() as capture:
                        shown.console.print(shown.view())
                    words.append(" ".join(capture.get().split()))
            shown.sample_done(sample, [])
    assert bars == pytest.approx([0.1 * i for i in range(1, 41)])
    assert "0/2 0:00:10 0:06:30 left" in words[0]
    assert "answering, 2 at once" in words[34] and "5/10 0:00:50 0:00:50 left" in words[34]
    assert "1/2 0:05:50 0:00:50 left" in words[34]


def lefts(clock: Clock, samples: Sequence[tuple[Load, float, int, float]], n_passes: int = 1) -> list[tuple[float, float]]:
    """Seconds that are left, as said and in truth, from the second sample on while a little is left."""
    pace, said = Pace(d_model=576), list[tuple[float, float]]()
    with Progress("needle", len(samples), 0, work=[pace.work(load) for load, *_ in samples]) as shown:
        for i, (load, reading, n_steps, answering) in enumerate(samples):
            for batch in range(n_passes):
                shown.batch(batch, n_passes)
                for seconds, n, total in ((reading, 30, 30), (answering, n_steps, load.n_new)):
                    shown.reading("s", 1, 30) if total is n else shown.answering("s", 3, total)
                    for _ in range(n):
                        clock.now += seconds / n / n_passes
                        shown.advance()
                        if i:
                            said.append((shown.bars.tasks[shown.samples].time_remaining or 0, clock.now))
            shown.sample_done("s", [])
    return [(left, clock.now - at) for left, at in said if clock.now - at > 0.05 * clock.now]

def test_figures_are_put_into_words() -> None:
    assert [duration(s) for s in (4.6, 100, 5399, 7260)] == ["5 s", "2 min", "1 h 30 min", "2 h 01 min"]  # fmt: skip
    assert in_words([Standing("full", "", 0, None), FULL]) == "full none 100.0"
    assert in_words([FULL]) == "100.0"
