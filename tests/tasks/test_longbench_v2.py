"""LongBench v2: the letter of an answer, accuracies, the prompt and its cut, rows, and the official figures."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvbench.engine.declared import build_params
from kvbench.engine.errors import ConfigError
from kvbench.engine.shapes import ModelShape
from kvbench.tasks.longbench_v2.task import LongBenchV2, accuracies, chosen_letter
from kvbench.tasks.prompt import middle_truncate
from kvbench.tests.golden_metrics import metrics_folder
from kvbench.tests.tiny_tokenizer import CHATML_TEMPLATE, tiny_tokenizer
from kvbench.tests.vectors import Check

REPO = Path(__file__).resolve().parents[2]
TEMPLATE = "Read.\n\n<text>\n$DOC$\n</text>\n\n$Q$\n(A) $C_A$\n(B) $C_B$\n(C) $C_C$\n(D) $C_D$\n"
ROW = {
    **{"_id": "one", "domain": "mine", "sub_domain": "", "difficulty": "easy", "length": "short", "question": " Who? "},
    **{f"choice_{letter}": f"{letter.lower()}nn" for letter in "ABCD"},
    **{"answer": "B", "context": " A long text of $Q$ and $5. "},
}


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        ("I say: **The correct answer is (C)**.", "C"),
        ("The correct answer is A. The correct answer is (D)", "D"),  # brackets first, wherever they stand
        ("The correct answer is Dante", "D"),
        ("the correct answer is (A)", None),
        ("The correct answer is  (A)", None),
        ("(B)", None),
    ],
)
def test_the_letter_of_an_answer(answer: str, letter: str | None) -> None:
    assert chosen_letter(answer) == letter


def test_accuracies_by_difficulty_and_length() -> None:
    rows = [
        {"prediction": "The correct answer is (A)", "answer": "A", "difficulty": "easy", "length": "short"},
        {"prediction": "no", "answer": "A", "difficulty": "hard", "length": "short"},
        {"prediction": "The correct answer is (B)", "answer": "A", "difficulty": "hard", "length": "huge"},
    ]
    assert accuracies(rows) == {
        **{"Overall": 33.3, "Easy": 100.0, "Hard": 0.0, "Short": 50.0, "Medium": None, "Long": 0.0},
    }
    assert accuracies(rows, compensated=True)["Short"] == 62.5 and accuracies(rows, compensated=True)["Hard"] == 12.5


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer(CHATML_TEMPLATE, adds_bos=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "longbench_v2" / "prompts").mkdir(parents=True)
    (tmp_path / "longbench_v2" / "prompts" / "0shot.txt").write_text(TEMPLATE)
    write(tmp_path, [ROW])
    return tmp_path


def write(folder: Path, content: Any) -> None:
    (folder / "longbench_v2" / "data.json").write_text(json.dumps(content))


def asked(data_dir: Path, tokenizer: Any, window: int = 8192, **changes: Any) -> tuple[LongBenchV2, Any]:
    values = yaml.safe_load((REPO / "conf" / "task" / "longbench_v2.yaml").read_text())
    del values["_target_"]
    made = LongBenchV2(build_params(LongBenchV2, values | changes, "task"), str(data_dir), seed=0)
    made.check(ModelShape("tiny", 2, 4, 2, 8, window, (0, 1)))
    return made, made.samples(tokenizer)


def test_a_row_in_its_prompt_keeps_placeholders_of_its_text(tokenizer, folder) -> None:
    made, (sample,) = asked(folder, tokenizer)
    assert sample.context == "Read.\n\n<text>\nA long text of $Q$ and $5.\n</text>\n\n"
    assert sample.question == "Who?\n(A) ann\n(B) bnn\n(C) cnn\n(D) dnn"
    assert made.notes == ["prompts: official", "1 texts hold a placeholder, which the authors' code fills in"]
    assert (sample.max_new_tokens, made.dataset) == (128, "all")
    assert made.verdict(sample, "The correct answer is (B)") == (1.0, {"no_answer": 0.0})
    assert made.verdict(sample, "B") == (0.0, {"no_answer": 1.0})
    own, (sample,) = asked(folder, tokenizer, prompts="own", prompt="no_context", lengths=["short"])
    assert sample.context == "" and "long text" not in sample.question and "(D) dnn" in sample.question
    assert own.dataset == "short/no_context" and "prompts: own" in own.notes


def test_a_long_text_loses_its_middle_and_an_odd_limit_keeps_one_more_at_the_end(tokenizer, folder) -> None:
    write(folder, [ROW | {"context": "begin " + "word " * 900 + "end"}])
    _, (sample,) = asked(folder, tokenizer, max_prompt_tokens=301)
    assert sample.context.startswith("Read.\n\n<text>\nbegin word") and sample.context.endswith("end\n</text>\n\n")
    assert sample.question.startswith("Who?") and sample.fields["was_cut"]
    text = "abcdefghij" * 40
    ids = tokenizer.encode(text)
    cut, before, _ = middle_truncate(tokenizer, text, 21, odd_to_end=True)
    assert before == len(ids) and cut == tokenizer.decode(ids[:10]) + tokenizer.decode(ids[-11:])


def test_a_finished_run_has_both_tables(tokenizer, folder) -> None:
    made, _ = asked(folder, tokenizer)
    rows = [
        {"prediction": "The correct answer is (B)", "references": ["B"], "score": 1.0, "difficulty": "easy",
         "length": "long", "was_cut": True},
        {"prediction": "", "references": ["A"], "score": None, "difficulty": "hard", "length": "long",
         "was_cut": False},
    ]  # fmt: skip
    made.artifacts(folder, rows, "full")
    summary = json.loads((folder / "longbench_v2.json").read_text())
    assert (summary["rows"], summary["cut"]) == (2, 1)
    assert summary["plain"]["Overall"] == 50.0 and summary["compensated"]["Overall"] == 62.5


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"answer": "E"}, "'answer' is not A, B, C or D: 'E'"),
        ({"choice_C": 3}, "'choice_C' is not a text: 3"),
        ({"context": " "}, "'context' is empty"),
        ({"_id": "one"}, "stands in line 0 already"),
        ({"_id": "x" * 2000}, "more than 1000"),
    ],
)
def test_a_bad_row_is_named_and_refused_or_skipped(tokenizer, folder, bad, message) -> None:
    write(folder, [ROW, ROW | {"_id": "two"} | bad, 7])
    with pytest.raises(ConfigError, match=rf"data\.json, row 1: .*{message}"):
        asked(folder, tokenizer)
    made, samples = asked(folder, tokenizer, on_bad_row="skip")
    assert len(samples) == 1 and "row 2: the line is no JSON object" in str(made.notes)


def test_damaged_files_and_wrong_values_are_sentences(tokenizer, folder) -> None:
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"lengths": ["tiny"]}, r"no task\.lengths 'tiny' \(all: long, medium, short\)"),
        ({"lengths": []}, "is empty; give some of short, medium or long"),
        ({"lengths": ["long"]}, r"no row of task\.lengths=\['long'\]"),
        ({"max_prompt_tokens": 9000}, r"task\.max_prompt_tokens=9000"),
        ({"prompt": "0shot_cot"}, r"task\.prompt"),
        ({"source": "hub"}, r"task\.source"),
        ({"prompts": "official", "prompt": "no_context"}, r"0shot_no_context\.txt is missing"),
    )
    for changes, message in wrong:
        with pytest.raises(ConfigError, match=message):
            asked(folder, tokenizer, **changes)
    write(folder, {"rows": []})
    with pytest.raises(ConfigError, match="holds no list"):
        asked(folder, tokenizer)
    write(folder, [])
    with pytest.raises(ConfigError, match="the file is empty"):
        asked(folder, tokenizer)
    (folder / "longbench_v2" / "data.json").write_text("[{")
    with pytest.raises(ConfigError, match="is no JSON"):
        asked(folder, tokenizer)
    (folder / "longbench_v2" / "data.json").unlink()
    with pytest.raises(ConfigError, match="THUDM/LongBench-v2"):
        asked(folder, tokenizer)
    (folder / "longbench_v2" / "prompts" / "0shot.txt").write_text("$DOC$ $Q$")
    with pytest.raises(ConfigError, match=r"has no \$C_A\$"):
        asked(folder, tokenizer)


def run_vectors(path: Path) -> list[Check]:
    """The letter of each answer, and both tables."""
    vectors = json.loads(path.read_text(encoding="utf-8"))
    rows = [row | {"prediction": row["response"]} for row in vectors["rows"]]
    pairs: list[tuple[str, Any, Any]] = [
        (f"longbench_v2[{i}]", chosen_letter(row["prediction"]), row["pred"]) for i, row in enumerate(rows)
    ]
    for name, table in vectors["table"].items():
        pairs.append((f"longbench_v2.{name}", accuracies(rows, name == "compensated"), table))
    return [(name, None if ours == official else f"{ours} instead of {official}") for name, ours, official in pairs]


def test_scores_agree_with_the_official_ones() -> None:
    path = metrics_folder() / "longbench_v2.json"
    if not path.exists():
        pytest.skip(f"{path} is no part of the project and not here")
    results = run_vectors(path)
    assert results and [result for result in results if result[1]] == []
