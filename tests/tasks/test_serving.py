"""A trace of requests: the same for every method, or from a file."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvbench.engine.declared import build_params
from kvbench.engine.errors import ConfigError
from kvbench.evals.settings import from_words
from kvbench.tasks.serving import KEYS, Serving


def task(*words: str, seed: int = 0) -> Serving:
    params: Any = build_params(Serving, from_words(["task=serving", *words]).task.params, "task")
    return Serving(params, None, seed)


def test_a_trace_is_drawn_from_the_seed() -> None:
    drawn = task("task.rate=4", "task.requests=50").arrivals()
    assert drawn == task("task.rate=4", "task.requests=50").arrivals()
    assert drawn != task("task.rate=4", "task.requests=50", seed=1).arrivals()
    times = [one.at_s for one in drawn]
    assert times == sorted(times) and times[0] == 0 and 5 < times[-1] < 30  # 50 requests at 4 per second
    assert {500 <= one.n_prompt <= 1000 for one in drawn} == {True} and len({one.n_prompt for one in drawn}) > 30


def test_without_a_rate_all_are_there_at_once() -> None:
    assert {one.at_s for one in task().arrivals()} == {0.0}


def test_a_trace_is_read_from_a_file_by_arrival(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [(2.5, 400, 8), (0, 300, 16)]
    path.write_text("\n".join(json.dumps(dict(zip(KEYS, row, strict=True))) for row in rows))
    found = task(f"task.trace={path}").arrivals()
    assert [(one.at_s, one.n_prompt, one.n_new) for one in found] == [(0.0, 300, 16), (2.5, 400, 8)]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"arrival_s": 0}', "line 1 is no JSON object with arrival_s, prompt_tokens, new_tokens"),
        ('{"arrival_s": 0, "prompt_tokens": 20, "new_tokens": 4}', "line 1 asks for less than 300 tokens"),
        ("\n", "holds no request|is empty"),
    ],
)
def test_a_damaged_trace_is_named(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=why):
        task(f"task.trace={path}").arrivals()


@pytest.mark.parametrize(
    "word", ["task.lengths=[900,500]", "task.lengths=[100,500]", "task.rate=0", "task.requests=0", "task.rung=up"]
)
def test_wrong_values_are_refused(word: str) -> None:
    with pytest.raises(ConfigError):
        task(word)
