"""BABILong: the leaderboard's scores with their quirks, prompts, worlds, the mix, files of rows, and the cases."""

import json
import re
from pathlib import Path

import pytest
import yaml

from kvbench.engine.declared import build_params
from kvbench.engine.shapes import ModelShape
from kvbench.tasks.babilong import prompts, worlds
from kvbench.tasks.babilong.scores import LABELS, is_right
from kvbench.tasks.babilong.task import BabiLong
from kvbench.tests.golden_metrics import metrics_3
from kvbench.tests.tiny_tokenizer import CHATML_TEMPLATE, tiny_tokenizer
from kvbench.tests.vectors import Check

REPO = Path(__file__).resolve().parents[2]
ROW = {"input": "Rain fell. Mary went to the office.", "question": "Where is Mary? ", "target": "office"}


def task(folder: Path, **given) -> BabiLong:
    values = yaml.safe_load((REPO / "conf" / "task" / "babilong.yaml").read_text())
    del values["_target_"]
    made = BabiLong(build_params(BabiLong, values | {"datasets": ["qa1"]} | given, "task"), str(folder), 0)
    made.check(ModelShape("tiny", 2, 4, 2, 8, 8192, (0, 1)))
    return made


@pytest.mark.parametrize(
    ("name", "target", "prediction", "official", "words"),
    [
        ("qa1", "office", "The most recent location of Mary is office. Then garden.", True, True),
        ("qa1", "office", "office or garden", False, False),
        ("qa6", "no", "It is not known", True, False),
        ("qa7", "none", "none", False, True),
        ("qa7", "one", "one<example>two", True, True),
        ("qa8", "apple,milk", "milk, apple", True, True),
        ("qa8", "apple,milk", "apple", False, False),
        ("qa19", "e,s", "e,s", True, True),
        ("qa19", "e,s", "e, s", False, False),
    ],
)
def test_labels_are_found_as_the_leaderboard_does_or_as_words(name, target, prediction, official, words) -> None:
    assert is_right(LABELS[name], target, prediction, "Who?") is official
    assert is_right(LABELS[name], target, prediction, "Who?", whole_words=True) is words


def test_parts_that_are_switched_off_leave_no_blank_lines_at_the_ends() -> None:
    assert prompts.filled({}, " a {b} ", "Why? ") == "<context>\na {b}\n</context>\n\nQuestion: Why?"
    whole = prompts.filled(prompts.OWN["qa1"], "a", "Why?")
    assert whole.startswith(prompts.HIDDEN) and "<example>" in whole


def test_own_examples_are_right_by_their_own_facts() -> None:
    for name in worlds.MADE:
        text, right, _ = prompts.FORMS[name]
        *facts, question = re.findall(r"[^.?]+[.?]", text)
        assert worlds.answer([fact.strip() for fact in facts], question) == right, name


def test_rows_of_a_list_or_of_lines_are_asked_in_the_authors_words(tmp_path: Path) -> None:
    folder = tmp_path / "babilong" / "4k"
    folder.mkdir(parents=True)
    (folder / "qa1.json").write_text(json.dumps([ROW, ROW | {"target": "garden"}]))
    words = "DEFAULT_PROMPTS = {'qa1': {'instruction': 'I', 'examples': 'E', 'post_prompt': 'P'}}\n"
    (tmp_path / "babilong" / "prompts.py").write_text(words)
    tokenizer = tiny_tokenizer(CHATML_TEMPLATE, adds_bos=False)
    made = task(tmp_path)
    first, second = made.samples(tokenizer)
    assert first.context == f"I\n\nE\n\nP\n\n<context>\n{ROW['input']}\n</context>"
    assert first.question == "\n\nQuestion: Where is Mary?" and made.notes[0] == "prompts: official"
    assert (made.score(first, "office"), made.score(second, "office")) == (1.0, 0.0)
    (folder / "qa1.jsonl").write_text(f"{json.dumps(ROW)}\n")
    assert len(task(tmp_path).samples(tokenizer)) == 1  # lines come before a list


def test_a_length_is_of_text_and_facts_to_the_token(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(None, adds_bos=False)
    samples = task(tmp_path, source="embedded", lengths=["1k", "4k"], rows=3).samples(tokenizer)
    for sample in samples:
        text = sample.context.partition("<context>\n")[2].partition("\n</context>")[0]
        asked = {"1k": 1000, "4k": 4000}[sample.fields["length"]]
        assert asked * 0.98 < len(tokenizer.encode(text)) <= asked
        assert all(fact in text for fact in sample.evidence)


# --- cases -------------------------------------------------------------------------------------------------------


def run_scores(path: Path) -> list[Check]:
    data = json.loads(path.read_text(encoding="utf-8"))
    found = [(f"labels of {name}", None if set(LABELS[name]) == set(labels) else f"{LABELS[name]}")
             for name, labels in data["labels"].items()]  # fmt: skip
    for i, row in enumerate(data["rows"]):
        ours = float(is_right(LABELS[row["task"]], row["target"], row["prediction"], row["question"]))
        found.append((f"scores[{i}]", None if ours == row["score"] else f"{ours} instead of {row['score']}"))
    return found


def run_prompts(path: Path) -> list[Check]:
    data = json.loads(path.read_text(encoding="utf-8"))
    found: list[Check] = []
    for i, row in enumerate(data["rows"]):
        words = {part: data["strings"][row["task"]][part] for part in prompts.PARTS if row[f"with_{part}"]}
        is_same = prompts.filled(words, row["context"], row["question"]) == row["prompt"]
        found.append((f"prompts[{i}]", None if is_same else "another prompt"))
    return found


def run_worlds(path: Path) -> list[Check]:
    found: list[Check] = []
    for i, row in enumerate(json.loads(path.read_text(encoding="utf-8"))):
        ours = worlds.answer(row["facts"], row["question"])
        found.append((f"worlds[{i}]", None if ours == row["answer"] else f"{ours} instead of {row['answer']}"))
    return found


def run_mix(path: Path) -> list[Check]:
    found: list[Check] = []
    for i, row in enumerate(json.loads(path.read_text(encoding="utf-8"))):
        kept = worlds.background(row["sentences"], row["background_tokens"])
        is_same = kept == row["background"]
        is_same = is_same and worlds.mixed(kept, row["facts"], row["fact_positions"]) == row["tokens"]
        found.append((f"mix[{i}]", None if is_same else "other tokens"))
    return found


RUNNERS = {"babilong_scores": run_scores, "babilong_prompts": run_prompts, "babilong_worlds": run_worlds,
           "babilong_mix": run_mix}  # fmt: skip


@pytest.mark.parametrize("name", RUNNERS)
def test_the_cases_agree(name: str) -> None:
    assert [case for case in RUNNERS[name](metrics_3(name)) if case[1]] == []
