"""HELMET's unjudged parts: how answers are read, rankings, many-shot labels, rows of files, and the cases."""

import json
import random
from pathlib import Path

import pytest
import yaml

from kvbench.engine.declared import build_params
from kvbench.engine.errors import ConfigError
from kvbench.engine.shapes import ModelShape
from kvbench.tasks.helmet import scores
from kvbench.tasks.helmet.task import Helmet, drawn_pool, many_shot, rounds
from kvbench.tests.golden_metrics import TOLERANCE, metrics_3
from kvbench.tests.tiny_tokenizer import tiny_tokenizer
from kvbench.tests.vectors import Check

REPO = Path(__file__).resolve().parents[2]
TOKENIZER = tiny_tokenizer(None, adds_bos=False)
ROWS = {
    "trec_coarse": {"text": "What is rain?", "label": 3},
    "nq": {"question": "Who?", "answers": ["Mia"], "ctxs": [{"title": "T", "text": "Mia did."}]},
    "msmarco": {
        "query": "Rain?",
        "ctxs": [{"id": "7", "text": "Wet.", "label": 1}, {"id": "9", "text": "Dry.", "label": 0}],
    },
    "json_kv": {"context": '{"a": "b"}', "question": "a", "answer": "b"},
}  # fmt: skip


def task(folder: Path, **given) -> Helmet:
    values = yaml.safe_load((REPO / "conf" / "task" / "helmet.yaml").read_text())
    del values["_target_"]
    made = Helmet(build_params(Helmet, values | {"lengths": [2000]} | given, "task"), str(folder), 0)
    made.check(ModelShape("tiny", 2, 4, 2, 8, 4096, (0, 1)))
    return made


def write(folder: Path, part: str, *rows: object) -> None:
    (folder / "helmet" / "data").mkdir(parents=True, exist_ok=True)
    (folder / "helmet" / "data" / f"{part}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def test_an_answer_is_what_stands_behind_its_cue_or_its_first_line() -> None:
    assert scores.read("Well, LABEL: label: 7\nmore", "label:") == "7" and scores.read(" 7 \n8", "label:") == "7"
    assert scores.score("icl", "the 7.", "label:", "7") == 1.0 and scores.score("icl", "7 8", "label:", "7") == 0.0
    assert scores.score("qa", "x\nMia did", "Answer:", [["Mia"], ["Bo"]]) == 1.0


def test_the_longest_run_is_the_ranking_and_the_first_mention_counts() -> None:
    assert scores.rankings("In 1984: [ID: 3] > ID1 > 3") == {"3": 3, "1": 2}
    assert scores.ndcg({"3": 2, "1": 1}, {"3": 1, "1": 0}) == 1.0 and scores.ndcg({"x": 1}, {"x": 0}) == 0.0


def test_each_round_has_every_class_once_and_numbers_change_with_the_query() -> None:
    pool = drawn_pool(random.Random(0), 6, 9)
    found = rounds(pool, random.Random(1), 12)
    assert all(len({one.label for one in found[at : at + 6]}) == 6 for at in (0, 6))
    asked = [many_shot(pool, one, 12) for one in found]
    assert len({one.references[0] for one in asked if one.evidence}) > 2
    assert all(one.fields["of_its_class"] == 2 for one in asked)


@pytest.mark.parametrize("part", ROWS)
def test_rows_of_files_are_asked_and_their_own_answer_is_right(tmp_path: Path, part: str) -> None:
    write(tmp_path, part, *[ROWS[part]] * 3)
    made = task(tmp_path, datasets=[part])
    samples = made.samples(TOKENIZER)
    assert len(samples) == 3
    sample = samples[0]
    text = " > ".join(sample.references[0].split(" > ")) if part == "msmarco" else sample.references[0]
    assert made.score(sample, text) == 1.0 and made.score(sample, "nothing") == 0.0
    assert sample.question and not sample.context.endswith(sample.question)


@pytest.mark.parametrize(
    ("part", "change", "said"),
    [
        ("trec_coarse", {"text": " "}, "line 1: field 'text' is empty"),
        ("nq", {"answers": [7]}, "not a list of texts"),
        ("nq", {"ctxs": [{"title": "T"}]}, "no list of objects with text"),
        ("nq", {"ctxs": []}, "field 'ctxs' is empty"),
        ("msmarco", {"ctxs": [{"id": 1, "text": "x", "label": "much"}]}, "no number from 0"),
        ("json_kv", {"answer": ""}, "field 'answer' is empty"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(tmp_path: Path, part: str, change, said: str) -> None:
    write(tmp_path, part, ROWS[part] | change)
    with pytest.raises(ConfigError, match=said):
        task(tmp_path, datasets=[part])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"source": "embedded"}, "draws icl and json_kv only, not nq"),
        ({"datasets": ["icl"]}, "is drawn"),
        ({"source": "embedded", "datasets": "drawn", "lengths": [9000]}, "more than the 4096 tokens"),
        ({"classes": 1}, "task.classes=1"),
        ({}, "helmet/data/nq.jsonl is missing"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_a_sentence(tmp_path: Path, given, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        task(tmp_path, **given)


# --- cases -------------------------------------------------------------------------------------------------------


def run_scores(path: Path) -> list[Check]:
    found: list[Check] = []
    for i, row in enumerate(json.loads(path.read_text(encoding="utf-8"))):
        parsed = scores.read(row["prediction"], row.get("prefix", "Ranking:"))
        wrong = [] if parsed == row["parsed"] else ["parsed"]
        if row["kind"] == "rerank":
            points = scores.rankings(parsed)
            wrong += ["rankings"] * (points != row["rankings"])
            wrong += ["ndcg"] * (abs(scores.ndcg(points, row["qrels"]) - row["ndcg_at_10"]) > TOLERANCE)
        else:
            for key, text in (("raw", row["prediction"]), ("of_parsed", parsed)):
                for metric, value in row[key].items():
                    wrong += [metric] * (abs(scores.best(metric, text, row["answers"]) - value) > TOLERANCE)
            ours = scores.score(row["kind"], row["prediction"], row["prefix"], row["answers"])
            wrong += ["score"] * (abs(ours - row["score"]) > TOLERANCE)
        found.append((f"scores[{i}]", f"{', '.join(wrong)} differ" if wrong else None))
    return found


RUNNERS = {"helmet_scores": run_scores}


@pytest.mark.parametrize("name", RUNNERS)
def test_the_cases_agree(name: str) -> None:
    assert [case for case in RUNNERS[name](metrics_3(name)) if case[1]] == []
