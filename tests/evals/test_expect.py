"""Before it starts, a run says how many samples there are and how long they will take, from what it has just timed."""

from pathlib import Path

import pytest

from kvbench.engine.model import Model
from kvbench.engine.passes.trace import Trace
from kvbench.evals.runner import run_cells
from kvbench.evals.screen import expect as expecting
from kvbench.evals.screen.estimate import Bends, Load
from kvbench.evals.screen.expect import expect, is_worth_while
from kvbench.tests.tiny import prompt, tiny
from kvbench.tests.tiny_run import cell, save_tiny


def test_more_tokens_to_read_and_to_answer_take_longer() -> None:
    model, ids = tiny("llama"), prompt(300)
    with model.hooked():
        few = expect(model, ids, [Load(100, 10)] * 3, Bends(), n_rows=2)
        many = expect(model, ids, [Load(100_000, 10_000)] * 3, Bends(), n_rows=2)
    assert 0 < few.seconds < many.seconds
    assert str(many).startswith("about ") and "256 tokens were read in" in many.basis


def test_more_variants_than_are_timed_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids, timed = tiny("llama"), prompt(300), list[int]()

    def step_of(model: Model, trace: Trace, n_rows: int) -> float:
        timed.append(n_rows)
        return 1.0 + 0.25 * n_rows

    monkeypatch.setattr(expecting, "step_of", step_of)
    with model.hooked():
        said = expect(model, ids, [Load(256, 11)] * 2, Bends(), n_rows=101).basis
    assert timed == [expecting.MOST_ROWS, 1]  # no more than these are built to be timed
    assert said.endswith("a step takes 26 s")


def test_what_is_over_soon_is_not_foretold() -> None:
    assert not is_worth_while([Load(1_000_000, 1)])
    assert not is_worth_while([Load(1_000, 100)] * 5)
    assert is_worth_while([Load(3_000, 100)] * 42)


def test_a_run_says_it_before_the_first_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(expecting, "LEAST_PROBES", 1)
    model = save_tiny(tmp_path / "model")
    words = ["task=needle", "task.source=embedded", "task.lengths=[400]", "task.depths=[0,50]", "task.max_new_tokens=4"]
    run_cells([cell(["method=snapkv", *words, "model=any", f"model.id={model}"], tmp_path / "run")])
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("needle snapkv: ")]
    assert said[0].startswith("needle snapkv: 2 samples (limit=N asks fewer), about ")
    assert said[1].startswith("needle snapkv: 1/2 ")
