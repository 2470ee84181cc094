"""HMMT: which answers its references take, where its rows come from, and a run with draws."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvbench.engine.declared import build_params
from kvbench.engine.errors import ConfigError
from kvbench.engine.shapes import ModelShape
from kvbench.run import main
from kvbench.tasks.hmmt.task import Hmmt
from kvbench.tasks.prompt import encode
from kvbench.tasks.reasoning import judge
from kvbench.tasks.reasoning.answers import worker
from kvbench.tests.tiny_run import save_tiny, sweep
from kvbench.tests.tiny_tokenizer import CHATML_TEMPLATE, tiny_tokenizer

REPO = Path(__file__).resolve().parents[2]
TOKENIZER = tiny_tokenizer(CHATML_TEMPLATE, adds_bos=False)
SHAPE = ModelShape("tiny", 2, 4, 2, 8, 100_000, (0, 1))
ANSWERS = (  # made, each of a kind that the sets have
    *("103", "-984", "1/91", "\\frac{9\\sqrt{23}}{23}", "2^{25} \\cdot 26!", "1-\\frac{2}{\\pi}", "9.5"),
    *("\\frac{-1+\\sqrt{17}}{2}, \\frac{-1-\\sqrt{17}}{2}", "(3, 5)", "3^{10}-2^{10}", "\\ln 2", "60^\\circ"),
)
ROWS = [
    {"problem_idx": i, "problem": f"Find $x_{i}$.", "answer": answer, "problem_type": ["Algebra", "Geometry"]}
    for i, answer in enumerate(ANSWERS, 1)
]


@pytest.fixture(scope="module", autouse=True)
def grader() -> Iterator[None]:
    """The worker that grades for all tests of this file ends with them."""
    yield
    worker().close()


def write(folder: Path, *rows: Any, name: str = "feb") -> Path:
    file = folder / "hmmt" / f"hmmt_{name}_2025.jsonl"
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


def asked(folder: Path, **changes: Any) -> tuple[Hmmt, Any]:
    values = yaml.safe_load((REPO / "conf" / "task" / "hmmt.yaml").read_text())
    del values["_target_"]
    task = Hmmt(build_params(Hmmt, values | changes, "task"), str(folder), seed=0)
    task.check(SHAPE)
    return task, task.samples(TOKENIZER)


@pytest.mark.skipif(not judge.RUNTIME.is_dir(), reason=f"{judge.RUNTIME} is made by `make setup`")
@pytest.mark.parametrize(
    ("answer", "reference", "score", "no_answer"),
    [
        ("", "103", 0, 1),
        (" \n\n", "103", 0, 1),
        ("I can't say.", "103", 0, 1),
        ("\\boxed{}", "103", 0, 1),
        ("\\boxed{103}", "103", 1, 0),
        ("\\boxed{\n103\n}", "103", 1, 0),
        ("\\boxed{\\boxed{103}}", "103", 1, 0),
        ("First $\\boxed{7}$, then $\\boxed{103}$.", "103", 1, 0),
        ("$\\boxed{103}$, or rather $\\boxed{7}$", "103", 0, 0),
        ("So \\boxed{7}. Hence" + " we go on" * 9 + " to \\boxed{103}", "103", 1, 0),
        ("So \\boxed{7}. Hence, as was to be shown, \\boxed{103}", "103", 0, 0),  # a list, for its commas
        ("\\boxed{7}. Then \\boxed{103}", "103", 0, 0),  # a list, for its few characters in between
        ("so it is 103", "103", 1, 0),  # no box
        ("<think>\\boxed{103}", "103", 1, 0),  # a thought that never ends is read, but for answer_part=after_think
        ("\\boxed{103" + " and so on" * 2000, "103", 0, 1),
        ("x" * 100_000 + "\\boxed{103}", "103", 1, 0),
        ("\\boxed{103.}", "103", 0, 0),
        ("\\boxed{103 \\text{ cm}}", "103", 1, 0),
        ("\\boxed{B}", "103", 0, 0),
        ("\\boxed{\N{MINUS SIGN}984}", "-984", 1, 0),
        ("\\boxed{984}", "-984", 0, 0),
        ("\\boxed{\\dfrac{1}{91}}", "1/91", 1, 0),
        ("\\boxed{0.010989}", "1/91", 1, 0),  # six decimals
        ("\\boxed{0.0110}", "1/91", 0, 0),
        ("\\boxed{50\\%}", "\\frac{1}{2}", 1, 0),
        ("\\boxed{\\frac{9}{\\sqrt{23}}}", "\\frac{9\\sqrt{23}}{23}", 1, 0),
        ("\\boxed{26! \\cdot 2^{25}}", "2^{25} \\cdot 26!", 1, 0),
        ("\\boxed{\\frac{\\pi-2}{\\pi}}", "1-\\frac{2}{\\pi}", 1, 0),
        ("\\boxed{58025}", "3^{10}-2^{10}", 1, 0),
        ("\\boxed{60}", "60^\\circ", 1, 0),
        ("\\boxed{\\pm\\sqrt{2}}", "\\sqrt{2}, -\\sqrt{2}", 1, 0),
        ("\\boxed{1\\pm\\sqrt{2}}", "1+\\sqrt{2}, 1-\\sqrt{2}", 1, 0),
        (
            "\\boxed{\\frac{1\\pm\\sqrt{2}}{2}}",
            "\\frac{1+\\sqrt{2}}{2}, \\frac{1-\\sqrt{2}}{2}",
            0,
            0,
        ),  # not read in there
        ("\\boxed{3,5}", "5, 3", 1, 0),
        ("\\boxed{3} and \\boxed{5}", "5, 3", 1, 0),
        ("\\boxed{3}", "5, 3", 0, 0),
        ("\\boxed{3,4,5}", "5, 3", 0, 0),
        ("\\boxed{[3,5]}", "5, 3", 0, 0),
        ("\\boxed{\N{FULLWIDTH DIGIT THREE}}", "3", 0, 0),
    ],
)
def test_a_nasty_answer_has_its_verdict(answer, reference, score, no_answer, tmp_path: Path) -> None:
    write(tmp_path, ROWS[0] | {"answer": reference})
    task, (sample,) = asked(tmp_path)
    assert task.verdict(sample, answer) == (score, {"no_answer": no_answer, "grader_stopped": 0})


@pytest.mark.parametrize("part", ["all", "after_think"])
def test_a_script_that_knows_the_references_has_all_and_one_that_guesses_nothing(part: str, tmp_path: Path) -> None:
    write(tmp_path, *ROWS)
    task, samples = asked(tmp_path, answer_part=part)
    assert len(samples) == len(ROWS)
    assert all(task.score(sample, task.right_answer(sample)) == 1 for sample in samples)
    assert not any(task.score(sample, "</think>\\boxed{77}") for sample in samples)
    if part == "after_think":
        assert task.verdict(samples[0], "<think>\\boxed{103}")[1]["no_answer"] == 1


def test_a_set_is_chosen_and_kinds_of_problems_are_kept(tmp_path: Path) -> None:
    write(tmp_path, ROWS[0])
    task, (sample,) = asked(tmp_path)
    assert (task.dataset, sample.id, sample.max_new_tokens) == ("hmmt_feb_2025/plain", "hmmt_feb_2025-1", 32_768)
    assert sample.fields == {"template": "plain", "problem_type": "Algebra, Geometry"}
    write(tmp_path, {"problem_idx": 1, "problem": "Find $y$.", "answer": 7}, name="nov")  # has no such list
    task, (sample,) = asked(tmp_path, set="nov25", template="chat")
    assert (task.dataset, sample.fields) == ("hmmt_nov_2025/chat", {"template": "chat"})
    assert task.score(sample, "\\boxed{7}") == 1
    prompt = encode(TOKENIZER, sample, chat="auto", system_prompt="", scope="context_only")
    assert TOKENIZER.decode(prompt.context_ids) == "<|im_start|>user\nFind $y$."
    assert TOKENIZER.decode(prompt.question_ids).startswith("\nPlease reason step by step")


def test_missing_and_bad_rows_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["task=hmmt", "method=full", f"data_dir={tmp_path}"]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "hmmt/hmmt_feb_2025.jsonl is missing" in said and "`kvbench fetch hmmt`" in said and said.count("\n") == 1
    for change, message in (
        ({"answer": ""}, "field 'answer' is empty"),
        ({"answer": [3, 5]}, "field 'answer' is not a text, or a whole number"),
        ({"problem": " "}, "field 'problem' is empty"),
    ):
        write(tmp_path, ROWS[0], ROWS[1] | change)
        with pytest.raises(ConfigError, match=rf"hmmt_feb_2025\.jsonl, line 2: {message}"):
            asked(tmp_path)
        assert len(asked(tmp_path, on_bad_row="skip")[1]) == 1


def test_problems_are_answered_several_times(tmp_path: Path) -> None:
    write(tmp_path, *ROWS[:2])
    words = [
        *("task=hmmt", "task.max_new_tokens=12", f"data_dir={tmp_path}", "temperature=1", "n_answers=3"),
        *("model=any", f"model.id={save_tiny(tmp_path / 'model')}"),
    ]
    cut = ["method=rkv", "method.interval=8", "budget=64"]
    (full, rows), (rkv, _) = sweep(words, [["method=full"], cut], tmp_path / "runs")
    assert [row.id for row in rows] == [f"hmmt_feb_2025-{i}#{draw}" for i in (1, 2) for draw in range(3)]
    assert full.pass_at_k is not None and rkv.pass_at_k is not None
    assert full.pass_at_k.keys() == rkv.pass_at_k.keys() and "3" in full.pass_at_k
