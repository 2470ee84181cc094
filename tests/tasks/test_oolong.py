"""Oolong: the authors' scores with their quirks and ours, drawn lists, rows of files, and the cases."""

import json
from pathlib import Path

import pytest
import yaml

from kvbench.engine.declared import build_params
from kvbench.engine.errors import ConfigError
from kvbench.engine.shapes import ModelShape
from kvbench.tasks.oolong import made, scores
from kvbench.tasks.oolong.task import Oolong
from kvbench.tasks.turns.questions import one_question
from kvbench.tests.golden_metrics import TOLERANCE, metrics_3
from kvbench.tests.tiny_tokenizer import CHATML_TEMPLATE, NO_SYSTEM, tiny_tokenizer
from kvbench.tests.vectors import Check

REPO = Path(__file__).resolve().parents[2]
ROW = {"id": 1, "context_window_id": 7, "context_window_text": "a\nb", "context_window_text_with_labels": "a, x\nb, y",
       "question": "How many? Give 'Answer: n'.", "answer": "[2]", "answer_type": "ANSWER_TYPE.NUMERIC",
       "task_group": "counting"}  # fmt: skip


def task(folder: Path, **given) -> Oolong:
    values = yaml.safe_load((REPO / "conf" / "task" / "oolong.yaml").read_text())
    del values["_target_"]
    one = Oolong(build_params(Oolong, values | given, "task"), str(folder), 0)
    one.check(ModelShape("tiny", 2, 4, 2, 8, 4096, (0, 1)))
    return one


def write(folder: Path, *rows: object, form: str = "synth") -> None:
    (folder / "oolong").mkdir(exist_ok=True)
    (folder / "oolong" / f"{form}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


@pytest.mark.parametrize(
    ("prediction", "answer", "kind", "official", "ours"),
    [
        ("Label: entity", "['entity']", "LABEL", 1.0, 1.0),
        ("Label: entity. Note: twice", "['entity']", "LABEL", 0.0, 0.0),
        ("Label: entity\nNote: twice", "['entity']", "LABEL", 0.0, 1.0),
        ("Label: Entity.", "['entity']", "LABEL", 0.0, 1.0),
        ("Answer: 4", "[5]", "NUMERIC", 0.75, 0.75),
        ("Answer: it is more common than the other", "['more common than']", "COMPARISON", 1.0, 1.0),
        ("Date: 5 January 2023", "[datetime.date(2023, 1, 5)]", "DATE", 1.0, 1.0),
        ("Answer: 9" + "9" * 400, "[5]", "NUMERIC", 0.0, 0.0),
    ],
)
def test_what_follows_the_last_colon_counts_or_the_last_asked_word(prediction, answer, kind, official, ours) -> None:
    found = [scores.synth(prediction, answer, f"ANSWER_TYPE.{kind}", ours=each).score for each in (False, True)]
    assert found == [official, ours]


@pytest.mark.parametrize("answer", ["__import__('os')", "[", "[[1]]", "[]", "7", "[datetime.date(2023, 14, 5)]"])
def test_an_answer_that_is_no_value_is_never_evaluated(answer: str, tmp_path: Path) -> None:
    write(tmp_path, ROW | {"answer": answer})
    with pytest.raises(ConfigError, match="line 1: field 'answer' is no list of one value"):
        task(tmp_path)


@pytest.mark.parametrize("template", [CHATML_TEMPLATE, NO_SYSTEM + CHATML_TEMPLATE, None])
def test_questions_of_one_context_are_asked_on_it(tmp_path: Path, template: str | None) -> None:
    write(tmp_path, ROW, ROW | {"id": 2, "question": "Which?"}, ROW | {"id": 3, "context_window_id": 8})
    one = task(tmp_path, with_labels=True)
    first, second = one.samples(tiny_tokenizer(template, adds_bos=False))
    assert first.conversation is not None and second.conversation is not None
    assert first.context.endswith("a, x\nb, y") and len(first.conversation.turns) == 2
    assert "How many?" in first.conversation.turns[0].question
    assert one.score(one_question(first, 0), "Answer: 2") == 1.0
    assert [s.id for s in task(tmp_path, rows=1).samples(tiny_tokenizer(template, adds_bos=False))] == ["7"]


def test_a_real_row_counts_its_first_box(tmp_path: Path) -> None:
    write(tmp_path, ROW | {"answer": "Vex, Pike"}, form="real")
    one = task(tmp_path, form="real")
    (sample,) = one.samples(tiny_tokenizer(CHATML_TEMPLATE, adds_bos=False))
    assert one.score(one_question(sample, 0), "\\boxed{Pike, Percy}") == 0.5


# --- cases -------------------------------------------------------------------------------------------------------


def run_scores(path: Path) -> list[Check]:
    found: list[Check] = []
    for i, row in enumerate(json.loads(path.read_text(encoding="utf-8"))):
        if row["form"] == "synth":
            ours = scores.synth(row["prediction"], row["answer"], row["answer_type"])
        else:
            ours = scores.real(row["prediction"], row["answer"])
        is_same = (ours.parsed, ours.confidence) == (row["parsed"], row["confidence"])
        is_same = is_same and abs(ours.score - row["score"]) <= TOLERANCE
        found.append((f"scores[{i}]", None if is_same else f"{ours}"))
    return found


def run_made(path: Path) -> list[Check]:
    found: list[Check] = []
    for i, row in enumerate(json.loads(path.read_text(encoding="utf-8"))):
        ours = made.answer([made.Line(**line) for line in row["lines"]], row["question"])
        found.append((f"made[{i}]", None if ours == row["answer"] else f"{ours} instead of {row['answer']}"))
    return found


RUNNERS = {"oolong_scores": run_scores, "oolong_made": run_made}


@pytest.mark.parametrize("name", RUNNERS)
def test_the_cases_agree(name: str) -> None:
    assert [case for case in RUNNERS[name](metrics_3(name)) if case[1]] == []
