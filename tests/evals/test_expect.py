"""Before it starts, a run says how many samples there are and how long they will take, from what it has just timed."""

from pathlib import Path

import pytest

from kvbench.engine.model import Model
from kvbench.engine.passes.trace import Trace
from kvbench.evals.prepare import Load
from kvbench.evals.runner import run_cells
from kvbench.evals.screen import expect as expecting
from kvbench.evals.screen.expect import Pace, is_worth_while, timed
from kvbench.tests.tiny import prompt, tiny
from kvbench.tests.tiny_run import cell, save_tiny


def test_a_pass_and_a_step_are_timed_and_laid_on_all_samples() -> None:
    model = tiny("llama")
    pace = timed(model, prompt(300), n_rows=2)
    assert pace.token > 0 and pace.step > 0 and pace.d_model == model.shape.d_model
    assert pace.words([Load(100, 10)] * 3).startswith("about ")
    assert "(256 tokens were read in " in pace.words([Load(100, 10)])
    assert "(100 tokens were read in " in timed(model, prompt(100), n_rows=1).words([Load(100, 10)])


def test_attention_makes_long_prompts_dearer_to_read_and_to_answer() -> None:
    pace = Pace(d_model=500, token=0.01, step=0.5)
    assert pace.work(Load(0, 20)) == (0, pytest.approx(0.5 * 15))
    assert pace.work(Load(3000, 20)) == (pytest.approx(2 * 30), pytest.approx(2 * 0.5 * 15))
    assert "about 2 h 15 min on this machine (" in pace.words([Load(3000, 20)] * 108)


def test_more_variants_than_are_timed_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids, rows = tiny("llama"), prompt(300), list[int]()

    def step_of(model: Model, trace: Trace, n_rows: int) -> float:
        rows.append(n_rows)
        return 1.0 + 0.25 * n_rows

    monkeypatch.setattr(expecting, "step_of", step_of)
    pace = timed(model, ids, n_rows=101)
    assert rows == [expecting.MOST_ROWS, 1]  # no more than these are built to be timed
    assert pace.step == pytest.approx(26.25)


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
