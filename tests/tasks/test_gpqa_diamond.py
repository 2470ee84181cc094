"""GPQA Diamond: the letter of an answer, the order of choices, the published table, chance, and a run with draws."""

import csv
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvbench.engine.declared import build_params
from kvbench.engine.errors import ConfigError
from kvbench.engine.shapes import ModelShape
from kvbench.run import main
from kvbench.tasks.gpqa_diamond.task import GpqaDiamond, chosen_letter
from kvbench.tasks.prompt import encode
from kvbench.tests.tiny_run import save_tiny, sweep
from kvbench.tests.tiny_tokenizer import CHATML_TEMPLATE, tiny_tokenizer

REPO = Path(__file__).resolve().parents[2]
TOKENIZER = tiny_tokenizer(CHATML_TEMPLATE, adds_bos=False)
CHOICES = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
ROWS = [
    {
        "Question": f'What is "{i}" plus one,\nin the decimal system? ',
        **{key: f"{i + n}\n" if n == 1 else f"{i + n}, at most" for n, key in enumerate(CHOICES, 1)},
        "Explanation": "",
        "Record ID": f"rec{i}",
        "High-level domain": ("Sums", "Numbers")[i % 2],
        "Canary String": "none",
    }
    for i in range(40)
]


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        ("", None),
        (" \n\n\t", None),
        ("B", None),
        ("I would choose B, the second one.", None),
        ("Answer: B", "B"),
        ("Answer:B", "B"),
        ("answer : B.", "B"),
        ("ANSWER: (C)", "C"),
        ("Answer: D) 5 m/s", "D"),
        ("Answer: b", None),
        ("Answer: E", None),
        ("Answer: Because", None),
        ("Answer: $LETTER", None),
        ("Answer: $B$", "B"),
        ("**Answer:** C", "C"),
        ("**Answer: C**", "C"),
        ("_Answer: C_", "C"),
        ("Answer:\n\nA", "A"),
        ("Answer: `A`, since it glows", "A"),
        ("Answer: $\\boxed{\\text{(D) }}$", "D"),
        ("so it is \\boxed{A}", "A"),
        ("\\boxed{\\mathbf{\\text{B}}}", "B"),
        ("\\boxed{B: 5 m/s}", "B"),
        ("\\boxed{C_2H_6}", None),
        ("\\boxed{D4}", None),
        ("\\boxed{B = 0.5}", None),
        ("\\boxed{A + B}", None),
        ("\\boxed{\\frac{1}{2}}", None),
        ("Answer: 25%", None),
        ("Answer: C-H bond", None),
        ("Answer: B or C", None),
        ("Answer: B, C", None),
        ("Answer: (A) and (D)", None),
        ("\\boxed{A, B}", None),
        ("\\boxed{A \\text{ and } C}", None),
        ("Answer: A\nNo, wait.\nAnswer: D", "D"),
        ("Answer: A\nso \\boxed{C}", "C"),
        ("Answer: A\nAnswer: B or C", None),
        ("\\boxed{A}\nAnswer: none of them", "A"),
        ("<think>Answer: A", "A"),
        ("Answer\N{FULLWIDTH COLON}\N{FULLWIDTH LATIN CAPITAL LETTER B}", "B"),
        ("Answer: \N{CYRILLIC CAPITAL LETTER VE}", None),
        ("Answer: \N{MATHEMATICAL BOLD CAPITAL C}", "C"),
        ("Answer: B\N{COMBINING ACUTE ACCENT}x", "B"),
        ("x" * 200_000 + "\nAnswer: B", "B"),
        ("\\boxed{" * 20_000, None),
        ("answer: " + "*" * 100_000, None),
        ("Answer: B" * 20_000, "B"),
        ("\0\ud83dAnswer: A", "A"),
    ],
)
def test_the_letter_of_a_nasty_answer(answer: str, letter: str | None) -> None:
    assert chosen_letter(answer) == letter


def write(folder: Path, rows: list[dict[str, str]] = ROWS, kind: str = "csv") -> Path:
    file = folder / "gpqa_diamond" / f"gpqa_diamond.{kind}"
    file.parent.mkdir(exist_ok=True)
    if kind == "jsonl":
        file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return file
    with file.open("w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, [*ROWS[0]])
        writer.writeheader()
        writer.writerows(rows)
    return file


def asked(folder: Path, seed: int = 0, **changes: Any) -> tuple[GpqaDiamond, Any]:
    values = yaml.safe_load((REPO / "conf" / "task" / "gpqa_diamond.yaml").read_text())
    del values["_target_"]
    task = GpqaDiamond(build_params(GpqaDiamond, values | changes, "task"), str(folder), seed)
    task.check(ModelShape("tiny", 2, 4, 2, 8, 100_000, (0, 1)))
    return task, task.samples(TOKENIZER)


def test_the_table_as_published_and_lines_of_json_are_the_same_rows(tmp_path: Path) -> None:
    write(tmp_path)
    task, samples = asked(tmp_path)
    assert (task.dataset, len(samples), samples[0].max_new_tokens) == ("gpqa_diamond/chat", 40, 32_768)
    write(tmp_path, kind="jsonl")
    again, lines = asked(tmp_path)
    assert [*lines] == [*samples] and again.data_digest != task.data_digest
    sample = samples[3]
    prompt = encode(TOKENIZER, sample, chat="auto", system_prompt="", scope="full_prompt")
    text = TOKENIZER.decode(prompt.context_ids)
    assert text.startswith('<|im_start|>user\nWhat is "3" plus one,\nin the decimal system?\n\nA) ')
    right = sample.references[0]
    assert f"\n{right}) 4\n" in text and text.count(", at most\n") == 3
    assert text.endswith("one of A, B, C and D.<|im_end|>\n<|im_start|>assistant\n")
    assert sample.fields == {"template": "chat", "domain": "Numbers"}


def test_choices_are_drawn_from_the_seed_and_the_record_alone(tmp_path: Path) -> None:
    write(tmp_path)
    contexts = {sample.id: sample.context for sample in asked(tmp_path)[1]}
    write(tmp_path, ROWS[:10:-1])
    assert {sample.id: sample.context for sample in asked(tmp_path)[1]}.items() <= contexts.items()
    others = asked(tmp_path, seed=1)[1]
    assert sum(sample.context != contexts[sample.id] for sample in others) > 20
    right = Counter(sample.references[0] for seed in range(50) for sample in asked(tmp_path, seed)[1])
    n = right.total()
    assert right.keys() == {*"ABCD"} and all(abs(k - n / 4) < 4 * (n * 3 / 16) ** 0.5 for k in right.values())


@pytest.mark.parametrize("part", ["all", "after_think"])
def test_a_script_that_knows_has_all_and_one_that_guesses_has_a_quarter(part: str, tmp_path: Path) -> None:
    write(tmp_path)
    task, samples = asked(tmp_path, answer_part=part)
    assert all(task.verdict(sample, task.right_answer(sample)) == (1, {"no_answer": 0}) for sample in samples)
    scores = []
    for seed in range(100):
        task, samples = asked(tmp_path, seed, answer_part=part)
        scores += [task.score(sample, f"</think>Answer: {'ABCD'[seed % 4]}") for sample in samples]
    n = len(scores)
    assert abs(sum(scores) / n - 0.25) < 1.96 * (0.25 * 0.75 / n) ** 0.5
    unended = task.verdict(samples[0], f"<think>Answer: {samples[0].references[0]}")
    assert unended == ((1, {"no_answer": 0}) if part == "all" else (0, {"no_answer": 1}))


def test_missing_and_bad_rows_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["task=gpqa_diamond", "method=full", f"data_dir={tmp_path}"]) == 2
    said = capsys.readouterr().err
    assert "gpqa_diamond.csv is missing" in said and "`kvbench fetch gpqa_diamond`" in said and "HF_TOKEN" in said
    assert said.count("\n") == 1
    for change, message in (
        ({"Question": " "}, "field 'Question' is empty"),
        ({"Incorrect Answer 2": ""}, "field 'Incorrect Answer 2' is empty"),
        ({"Record ID": "rec0"}, "Record ID='rec0' stands in line 2 already"),
        ({"Correct Answer": "x" * 100_001}, "field 'Correct Answer' has 100001 characters"),
        ({"Correct Answer": "x" * 200_000}, "the row is no CSV .field larger"),
    ):
        write(tmp_path, [ROWS[0], ROWS[1] | change])
        with pytest.raises(ConfigError, match=rf"gpqa_diamond\.csv, line 5: {message}"):
            asked(tmp_path)
        assert len(asked(tmp_path, on_bad_row="skip")[1]) == 1


def test_wrong_values_are_refused_by_key(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(ConfigError, match=r"task\.max_new_tokens=100000 leaves no room"):
        asked(tmp_path, max_new_tokens=100_000)
    task, _ = asked(tmp_path)
    with pytest.raises(ConfigError, match=r"task\.template=chat needs a chat template"):
        task.samples(tiny_tokenizer(None, adds_bos=False))


def test_questions_are_answered_several_times_and_domains_have_their_means(tmp_path: Path) -> None:
    write(tmp_path, ROWS[:2])
    words = [
        *("task=gpqa_diamond", "task.template=plain", "task.max_new_tokens=12", f"data_dir={tmp_path}"),
        *("temperature=1", "n_answers=3", "model=any", f"model.id={save_tiny(tmp_path / 'model')}"),
    ]
    cut = ["method=rkv", "method.interval=8", "budget=64"]
    (full, rows), (rkv, _) = sweep(words, [["method=full"], cut], tmp_path / "runs")
    assert [row.id for row in rows] == [f"rec{i}#{draw}" for i in (0, 1) for draw in range(3)]
    assert full.pass_at_k is not None and rkv.pass_at_k is not None
    assert full.pass_at_k.keys() == rkv.pass_at_k.keys() and "3" in full.pass_at_k
    (table, _) = sorted((tmp_path / "runs").rglob("gpqa_diamond.csv"))
    assert table.read_text().splitlines()[0] == "domain,rows,score_percent"
