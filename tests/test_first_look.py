"""What `make run` asks: less where the processor is slow at the dtype, and what the user asks before that."""

import pytest

from kvbench import first_look
from kvbench.evals.overrides import composed


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    words: list[str] = []

    def main(given: list[str], show: object) -> int:
        words.extend(given)
        return 2

    monkeypatch.setattr(first_look.run, "main", main)
    return words


def test_slow_dtype_asks_brief_tasks(asked: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert first_look.main(["dtype=float32"]) == 2
    assert f"task={first_look.BRIEF}" in asked
    assert first_look.BRIEF in capsys.readouterr().err


def test_fast_dtype_asks_the_experiment_as_it_stands(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_look, "cpu_multiplies_bfloat16", lambda: True)
    first_look.main([])
    assert asked == ["-m", "experiment=first_look", f"out={first_look.OUT}"]


def test_a_task_that_is_asked_stays(asked: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    first_look.main(["dtype=float32", "task=needle_short", "out=elsewhere"])
    assert [word for word in asked if word.startswith("task=")] == ["task=needle_short"]
    assert asked.count("out=elsewhere") == 1
    assert not capsys.readouterr().err


def test_the_experiment_puts_its_runs_where_make_run_does() -> None:
    assert composed({"experiment": ["first_look"]}).out == first_look.OUT
