"""The embedded set: the same for the same Python, answers that stand in the text, and a model that can do it."""

import hashlib
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from kvbench.engine.declared import build_params
from kvbench.tasks.longbench import embedded, prompts
from kvbench.tasks.longbench import task as longbench
from kvbench.tasks.longbench.datasets import EMBEDDED, LISTS
from kvbench.tasks.longbench.embedded import DATASETS, N_ROWS, SET, Row
from kvbench.tasks.longbench.scores import row_score

REPO = Path(__file__).resolve().parents[2]


def rows() -> dict[str, tuple[Row, ...]]:
    """The first rows of each dataset."""
    return {name: embedded.first_rows(name) for name in DATASETS}


ALL = [(name, row) for name, found in rows().items() for row in found]


def test_there_are_rows_of_every_dataset_with_longbenchs_fields() -> None:
    task = object.__new__(longbench.LongBench)
    assert {name: len(found) for name, found in rows().items()} == dict.fromkeys(DATASETS, N_ROWS)
    assert 40 <= len(ALL) <= 100
    for name, row in ALL:
        assert {*longbench.FIELDS, "dataset", "language"} == set(row)
        task.check_row(name, row)
    assert len({(name, row["_id"]) for name, row in ALL}) == len(ALL)


def test_any_number_of_further_rows_is_short_and_each_asks_on_a_context_of_its_own() -> None:
    for name in ("docs_qa", "docs_retrieval", "docs_facts"):
        found = embedded.rows_of(name, 40)
        assert found[:N_ROWS] == rows()[name] == embedded.rows_of(name, None)
        assert len({row["_id"] for row in found}) == len({row["context"] for row in found}) == 40
        assert max(len(row["context"]) for row in found[N_ROWS:]) <= 1_650 * DATASETS[name].letters
    assert len(embedded.rows_of("docs_summary", 40)) == N_ROWS


def test_another_process_makes_the_same_set() -> None:
    code = "from kvbench.tasks.longbench import embedded; print(embedded.content_hash())"
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", code], cwd=REPO, capture_output=True, text=True,
        env={"PYTHONHASHSEED": "7", "PATH": ""}, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == embedded.content_hash()
    assert re.fullmatch("[0-9a-f]{16}", embedded.content_hash())


def test_the_hash_names_rows_and_templates(monkeypatch) -> None:
    before = embedded.content_hash()
    changed = replace(DATASETS["docs_qa"], template="{context}{input}")
    monkeypatch.setitem(DATASETS, "docs_qa", changed)
    assert embedded.content_hash() != before


def test_a_dataset_outside_the_set_is_asked_by_name_alone_and_named_by_the_hash_then(monkeypatch) -> None:
    assert LISTS["embedded"] == SET == tuple(name for name in EMBEDDED if name != "docs_facts")
    assert longbench_params().names == SET
    assert longbench_params(datasets=["docs_facts"]).names == ("docs_facts",)
    of_set, with_facts = embedded.content_hash(SET), embedded.content_hash(["docs_facts"])
    assert embedded.content_hash(["docs_qa"]) == embedded.content_hash() == of_set != with_facts
    monkeypatch.setitem(DATASETS, "docs_facts", replace(DATASETS["docs_facts"], template="{context}{input}"))
    assert embedded.content_hash(SET) == of_set
    assert embedded.content_hash(["docs_facts"]) != with_facts


def longbench_params(**changes) -> longbench.Params:
    values = yaml.safe_load((REPO / "conf" / "task" / "longbench.yaml").read_text())
    del values["_target_"]
    return build_params(longbench.LongBench, values | {"source": "embedded"} | changes, "task")


def test_answers_stand_in_the_text_behind_the_words_that_end_the_prompt() -> None:
    for name, row in ALL:
        answer = row["answers"][0]
        if name in ("docs_qa", "docs_multi_qa", "code_next_line"):
            joint = {"docs_qa": " ", "docs_multi_qa": ": ", "code_next_line": ""}[name]
            assert row["input"] + joint + answer in row["context"], name
        if name == "docs_qa":
            assert row["context"].count(row["input"]) == 1
        if name == "docs_retrieval":
            assert f"{row['input']} [{answer}]" in row["context"]
            assert row["context"].count(f"[{answer}]") == 1


def test_the_count_is_that_of_different_paragraphs() -> None:
    for row in rows()["docs_count"]:
        texts = re.split(r" \[Paragraph \d+\](?:\n\n|$)", row["context"])[:-1]
        assert len(set(texts)) == int(row["answers"][0])
        assert len(set(texts)) < len(texts)


def test_the_summarys_reference_is_not_in_the_text() -> None:
    for row in rows()["docs_summary"]:
        assert row["answers"][0] not in row["context"]


def test_kinds_of_lines_are_shown_in_equal_parts_and_the_asked_one_is_new() -> None:
    for row in rows()["docs_classify"]:
        shown = re.findall(r"\nKind: (\w+)", row["context"])
        counts = {kind: shown.count(kind) for kind in row["all_classes"]}
        assert max(counts.values()) - min(counts.values()) <= 3
        assert row["input"].splitlines()[0] not in row["context"].splitlines()


def test_the_question_can_stand_first_where_there_is_one() -> None:
    row = rows()["docs_qa"][0]
    template = DATASETS["docs_qa"].template
    context, question = longbench.parts_of("docs_qa", template, row, "before")
    assert row["input"] in context.removesuffix(row["context"])
    assert context.endswith(row["context"])
    assert question == "\n\nAnswer:"
    able = [name for name in DATASETS if longbench.takes_question_first(name)]
    assert able == ["docs_qa", "docs_multi_qa", "docs_facts"]


def embedded_tokenizer():
    from transformers import AutoTokenizer

    from kvbench.engine.checkpoints.load import locate

    try:
        folder = locate("embedded", None, False)[0]
    except Exception as error:
        pytest.skip(f"the embedded model is not installed: {error}")
    return AutoTokenizer.from_pretrained(folder)


def chance(row: Row, name: str) -> float:
    """What the answers of the dataset's other rows would score, the best that a guess without reading does."""
    others = [one["answers"][0] for one in rows()[name] if one is not row]
    metric = DATASETS[name].metric
    scores = [row_score(metric, one, row["answers"], all_classes=row["all_classes"]) for one in others]  # fmt: skip
    return sum(scores) / len(scores)


def test_other_rows_answers_score_little() -> None:
    """The chance level that a model's score is held against."""
    for name, found in rows().items():
        assert sum(chance(row, name) for row in found) / len(found) < 0.4, name


@pytest.mark.slow
def test_the_embedded_model_beats_chance_in_four_datasets(tmp_path: Path) -> None:
    """Full attention, two rows of each dataset; minutes on two cores."""
    command = [sys.executable, "run.py", "method=full", "task=longbench", "task.source=embedded"]
    done = subprocess.run(
        [*command, "task.rows=2", f"out={tmp_path / 'run'}"], cwd=REPO, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "run" / "samples.jsonl").read_text().splitlines()
    scores: dict[str, list[float]] = {}
    for row in map(json.loads, lines):
        scores.setdefault(row["dataset"], []).append(row["score"])
    means = {name: sum(found) / len(found) for name, found in scores.items()}
    levels = {name: sum(chance(row, name) for row in rows()[name]) / N_ROWS for name in means}
    well_above = [name for name, mean in means.items() if mean > levels[name] + 0.25]
    assert len(well_above) >= 4, (means, levels)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["data_source"] == "embedded"
    assert any(embedded.content_hash() in note for note in result["notes"])


@pytest.mark.slow
def test_rows_have_1500_to_6000_tokens_of_the_embedded_model() -> None:
    tokenizer = embedded_tokenizer()
    for name, row in ALL:
        n = len(tokenizer.encode(prompts.fill(DATASETS[name].template, row)))
        assert 1500 <= n <= 6000, (name, row["_id"], n)


def test_rows_are_not_each_others_copies() -> None:
    for found in rows().values():
        digests = {hashlib.sha256(row["context"].encode()).hexdigest() for row in found}
        assert len(digests) == N_ROWS
