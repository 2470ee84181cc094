"""What is seen of a run while it goes on."""

import io
from collections.abc import Sequence
from functools import partial
from random import Random

import pytest
from rich.console import Console
from rich.text import Text

from kvbench.evals.prepare import Load
from kvbench.evals.screen import progress
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
                    words.append(" ".join(Text.from_ansi(capture.get()).plain.split()))
            shown.sample_done(sample, [])
    assert bars == pytest.approx([0.1 * i for i in range(1, 41)])
    assert "0/2 0:00:10 0:06:30 left" in words[0]
    assert "answering, 2 at once" in words[34] and "5/10 0:00:50 0:00:50 left" in words[34]
    assert "1/2, 0.3/min 0:05:50 0:00:50 left" in words[34]


# tokens read, allowance, seconds of reading, steps, seconds of answering
Asked = tuple[int, int, float, int, float]
RECORDED: list[Asked] = [  # full, SnapKV and PQCache on SmolLM2-135M, one core of an AMD EPYC
    (839, 16, 1.3, 13, 1.55), (838, 16, 1.37, 9, 0.59), (1837, 16, 4.31, 9, 0.7), (1838, 16, 4.5, 9, 0.63),
    (3837, 16, 12.6, 13, 1.32), (3837, 16, 11.8, 9, 0.86), (7337, 16, 35.84, 14, 1.6), (7337, 16, 35.42, 10, 1.14),
]  # fmt: skip


def grid() -> list[Asked]:
    """Prompts of 1,000 to 8,000 tokens in their order, with some noise, and attention dearer than is counted on."""
    rng, lengths = Random(0), [n for n in range(1000, 8001, 1000) for _ in range(11)]
    return [(n, 24, rng.uniform(0.9, 1.1) * n / 1000 * (1 + n / 2500), 18, 1.0 + n / 10000) for n in lengths]


def datasets() -> list[Asked]:
    """Some long, with short answers, between others that are short, with long ones, as LongBench has them."""
    rng, asked = Random(0), list[Asked]()
    for mean, n_new in ((18000, 128), (3600, 128), (9100, 32), (8700, 512), (2100, 512), (8200, 32), (1200, 64)):
        for _ in range(12):
            n, n_steps = int(mean * rng.uniform(0.4, 1.6)), int(n_new * rng.uniform(0.5, 1))
            asked.append((n, n_new, n / 1000 * (1 + n / 9000), n_steps, n_steps * 0.06 * (1 + n / 12000)))
    return asked


@pytest.mark.parametrize(("asked", "n_passes"), [(grid(), 1), (datasets(), 1), (RECORDED, 1), (grid(), 3)])
def test_the_time_left_is_about_right_whatever_the_lengths(asked: list[Asked], n_passes: int, clock: Clock) -> None:
    """From the second sample on, while more than a twentieth is left."""
    pace, said = Pace(d_model=576), list[tuple[float, float]]()
    work = [pace.work(Load(n_read, n_new)) for n_read, n_new, *_ in asked]
    with Progress("needle", len(asked), 0, work=work) as shown:
        bar = shown.bars.tasks[shown.samples]
        for i, (n_read, n_new, reading, n_steps, answering) in enumerate(asked):
            for batch in range(n_passes):
                shown.batch(batch, n_passes)
                stages = partial(shown.reading, "s", n_read, 30), partial(shown.answering, "s", 3, n_new)
                for begin, seconds, n in zip(stages, (reading, answering), (30, n_steps), strict=True):
                    begin()
                    for _ in range(n):
                        clock.now += seconds / n / n_passes
                        shown.advance()
                        if i:
                            said.append((bar.time_remaining or 0, clock.now))
            shown.sample_done("s", [])
    ratios = [left / (clock.now - at) for left, at in said if clock.now - at > clock.now / 20]
    assert 0.7 < min(ratios) and max(ratios) < 1.4


def test_waves_share_what_answering_takes() -> None:
    shown, seen = Progress("needle", 1, 0, work=[(1, 1)]), list[float]()
    shown.reading("s", 100, 1)
    shown.advance()
    for i in range(2):
        shown.wave(i, 2)
        shown.answering("s", 3, 2)
        for _ in range(2):
            shown.advance()
            seen.append(shown.bars.tasks[shown.samples].completed)
    assert seen == pytest.approx([1.25, 1.5, 1.75, 2])


def test_a_second_try_does_not_move_the_bar_back(clock: Clock) -> None:
    shown = Progress("needle", 1, 0)
    bar = shown.bars.tasks[shown.samples]
    for n in (8, 4):
        shown.batch(0, 1)
        shown.reading("s", 100, 10)
        for _ in range(n):
            shown.advance()
        assert bar.completed == pytest.approx(0.8)
    shown.sample_done("s", [])
    assert bar.finished


def test_figures_are_put_into_words() -> None:
    assert [duration(s) for s in (4.6, 100, 5399, 7260)] == ["5 s", "2 min", "1 h 30 min", "2 h 01 min"]  # fmt: skip
    assert in_words([Standing("full", "", 0, None), FULL]) == "full none 100.0"
    assert in_words([FULL]) == "100.0"
