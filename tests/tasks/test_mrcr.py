"""MRCR: the card's score, dialogues, templates that change words, rows of files, and the cases."""

import hashlib
import json
from pathlib import Path

import pytest
import yaml

from kvbench.engine.declared import build_params
from kvbench.engine.errors import ConfigError
from kvbench.engine.shapes import ModelShape
from kvbench.tasks.mrcr.made import Piece, dialogue
from kvbench.tasks.mrcr.task import MRCR, bin_of, ratio
from kvbench.tests.golden_metrics import TOLERANCE, metrics_3
from kvbench.tests.tiny_tokenizer import CHATML_TEMPLATE, tiny_tokenizer
from kvbench.tests.vectors import Check

REPO = Path(__file__).resolve().parents[2]
TURNS = [
    {"role": "user", "content": "write a song about rain"},
    {"role": "assistant", "content": "Rain, rain."},
    {"role": "user", "content": "Prepend abc to the 1st song."},
]
ROW = {"prompt": json.dumps(TURNS), "answer": "abcRain, rain.", "random_string_to_prepend": "abc"}


def task(folder: Path, **given) -> MRCR:
    values = yaml.safe_load((REPO / "conf" / "task" / "mrcr.yaml").read_text())
    del values["_target_"]
    made = MRCR(build_params(MRCR, values | given, "task"), str(folder), 0)
    made.check(ModelShape("tiny", 2, 4, 2, 8, 4096, (0, 1)))
    return made


def write(folder: Path, *rows: object) -> None:
    (folder / "mrcr").mkdir(exist_ok=True)
    (folder / "mrcr" / "2needle.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def test_an_answer_begins_with_its_ten_characters_or_is_worth_nothing() -> None:
    assert ratio("abcRain", "abcRain", "abc") == 1.0
    assert ratio(" abcRain", "abcRain", "abc") == 0.0 and ratio(" abcRain", "abcRain", "abc", strip_start=True) == 1.0
    assert ratio("<think></think>abcRain", "abcRain", "abc") == 0.0


def test_questions_on_one_dialogue_ask_for_pieces_of_their_own(tmp_path: Path) -> None:
    given = {"source": "embedded", "needles": [2], "lengths": [1500], "words": [10, 20], "questions": 5, "rows": 1}
    (sample,) = task(tmp_path, **given).samples(tiny_tokenizer(CHATML_TEMPLATE, adds_bos=False))
    assert sample.conversation is not None and sample.conversation.asking.mode == "independent"
    turns = sample.conversation.turns
    pieces = {turn.references[0].removeprefix(turn.fields["start"]) for turn in turns}
    assert len(pieces) == 5 and all(piece in sample.context for piece in pieces)
    assert len({turn.question for turn in turns}) == 5 and len({turn.fields["start"] for turn in turns}) == 5


def test_bins_are_open_below_and_closed_above() -> None:
    assert [bin_of(n) for n in (4096, 4097, 8192, 8193, 1 << 20)] == ["0k-4k", "4k-8k", "4k-8k", "8k-16k", "512k-1024k"]


def test_rows_are_turns_and_those_too_long_are_left_out_and_counted(tmp_path: Path) -> None:
    long = [*TURNS[:1], {"role": "assistant", "content": "rain " * 4000}, TURNS[-1]]
    write(tmp_path, ROW | {"prompt": json.dumps(long)}, ROW)
    made = task(tmp_path)
    (sample,) = made.samples(tiny_tokenizer(CHATML_TEMPLATE, adds_bos=False))
    assert sample.context.endswith("<|im_start|>user\n") and sample.question.startswith("Prepend abc")
    assert sample.id == "2needle-1" and "2needle: 1 rows left out that do not fit 4096 tokens" in made.notes
    assert made.verdict(sample, "abcRain, rain.") == (1.0, {"prefix": 1.0, "exact": 1.0})
    plain = task(tmp_path, template="plain")
    (sample,) = plain.samples(tiny_tokenizer(None, adds_bos=False))
    assert sample.context.startswith("User: write a song") and sample.question.endswith("\nAssistant:")
    thinking = task(tmp_path, answer_part="after_think")
    assert thinking.score(sample, "<think>no</think>\n\nabcRain, rain.") == 1.0


@pytest.mark.parametrize("template", [None, CHATML_TEMPLATE.replace("m.content", "m.content | upper")])
def test_a_template_that_changes_words_is_refused(tmp_path: Path, template: str | None) -> None:
    write(tmp_path, ROW)
    with pytest.raises(ConfigError, match=r"task\.template=plain"):
        task(tmp_path).samples(tiny_tokenizer(template, adds_bos=False))


# --- cases -------------------------------------------------------------------------------------------------------


def run_scores(path: Path) -> list[Check]:
    found: list[Check] = []
    for i, row in enumerate(json.loads(path.read_text(encoding="utf-8"))):
        ours = ratio(row["prediction"], row["reference"], row["random_string_to_prepend"])
        is_same = abs(ours - row["score"]) <= TOLERANCE
        found.append((f"scores[{i}]", None if is_same else f"{ours} instead of {row['score']}"))
    return found


def run_made(path: Path) -> list[Check]:
    found: list[Check] = []
    for i, row in enumerate(json.loads(path.read_text(encoding="utf-8"))):
        pieces = [Piece(**piece) for piece in row["pieces"]]
        ours = dialogue(pieces, row["format"], row["topic"], row["wanted"], row["random_string_to_prepend"])
        text = json.dumps(list(ours.messages), ensure_ascii=False, separators=(",", ":"))
        got = {
            "question": ours.messages[-1]["content"], "answer": ours.answer, "desired_msg_index": ours.place,
            "total_messages": len(ours.messages), "n_needles": ours.n_alike,
            "n_chars": sum(len(one["content"]) for one in ours.messages),
            "messages_sha256": hashlib.sha256(text.encode()).hexdigest(),
        }  # fmt: skip
        wrong = [key for key, value in got.items() if value != row[key]]
        found.append((f"made[{i}]", f"{', '.join(wrong)} differ" if wrong else None))
    return found


RUNNERS = {"mrcr_scores": run_scores, "mrcr_made": run_made}


@pytest.mark.parametrize("name", RUNNERS)
def test_the_cases_agree(name: str) -> None:
    assert [case for case in RUNNERS[name](metrics_3(name)) if case[1]] == []
