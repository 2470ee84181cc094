"""LongBench v2: one question with four choices on a long text; a single turn.

Names       LongBench v2
Asks        one of four choices on a long text
Lengths     8k to 2M words
Answers     128 tokens
Licence     Apache-2.0

Rows        longbench_v2/data.json from the data folder, a list of 503 (hub `THUDM/LongBench-v2`), put there by hand:
            it has 465 MB. `task.lengths` keeps rows by their label: short < 32k words, medium < 128k, long.
Prompts     longbench_v2/prompts/0shot.txt; without it wording of our own. `task.prompt=no_context` asks without the
            text: what a model knows without reading. A text that holds a placeholder such as `$Q$` keeps it, where
            the authors' code would fill it in; such rows are counted.
Length      a prompt longer than `max_prompt_tokens` loses its middle before the chat template comes on top; of an odd
            limit the end keeps one token more. Most long texts are cut: the result says how many.
Answers     128 tokens, greedy. The letter is read from "The correct answer is (X)" anywhere, else from the same without
            brackets; asterisks are ignored. No letter is wrong, or a quarter right in `compensated`.
Scope       the context ends with the text and the blank line after it.

A finished run's longbench_v2.json has accuracy by difficulty and by length, plain and compensated.

Not here: chains of thought in two prompts, and retrieval.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from kvbench.engine.declared import Count, Some
from kvbench.engine.errors import ConfigError
from kvbench.engine.foreign import read_text
from kvbench.engine.shapes import ModelShape
from kvbench.tasks.base import Data, Sample
from kvbench.tasks.checks import OnBadRow, Prompts, check_room, prompt_room
from kvbench.tasks.longbench.prompts import shortened
from kvbench.tasks.published import Row, RowsTask
from kvbench.tasks.rows import Fields, Text

DATA = "longbench_v2/data.json"
UPSTREAM = "hub dataset THUDM/LongBench-v2 (data.json)"
PROMPTS = {"0shot": "longbench_v2/prompts/0shot.txt", "no_context": "longbench_v2/prompts/0shot_no_context.txt"}
PROMPTS_SOURCE = "GitHub THUDM/LongBench (folder prompts)"
LETTERS = "ABCD"
DIFFICULTIES, LENGTHS = ("easy", "hard"), ("short", "medium", "long")
CHOICES = "\n".join(f"({letter}) $C_{letter}$" for letter in LETTERS)
ASK = 'Answer with the sentence "The correct answer is (X)", where X is the letter of your choice.'
OWN_PROMPTS = {
    "0shot": f"Below is a text, and a question on it.\n\n<text>\n$DOC$\n</text>\n\n$Q$\n{CHOICES}\n\n{ASK}",
    "no_context": f"$Q$\n{CHOICES}\n\n{ASK}",
}
PLACEHOLDER = re.compile(r"\$(DOC|Q|C_[A-D])\$")
COLUMNS = {"DOC": "context", "Q": "question", **{f"C_{letter}": f"choice_{letter}" for letter in LETTERS}}
FIELDS: Fields = {
    **dict.fromkeys(("_id", "difficulty", "length", *COLUMNS.values()), Text),
    **{"domain": str, "answer": Literal["A", "B", "C", "D"]},
}
IN_BRACKETS = re.compile(r"The correct answer is \(([A-D])\)")
BARE = re.compile(r"The correct answer is ([A-D])")


# --- scores ------------------------------------------------------------------------------------


def chosen_letter(answer: str) -> str | None:
    """The letter that an answer names; with brackets wherever it stands, else without."""
    answer = answer.strip().replace("*", "")
    found = IN_BRACKETS.search(answer) or BARE.search(answer)
    return found[1] if found else None


def accuracies(rows: Sequence[Mapping[str, Any]], compensated: bool = False) -> dict[str, float | None]:
    """Accuracies in per cent, to one decimal: all rows, by difficulty, by length; lengths without a name are long."""
    points = [point(row, compensated) for row in rows]

    def mean(keep: Iterable[bool]) -> float | None:
        kept = [one for one, stays in zip(points, keep, strict=True) if stays]
        return round(100 * sum(kept) / len(kept), 1) if kept else None

    length = [row["length"] if row["length"] in LENGTHS[:2] else "long" for row in rows]
    return {
        "Overall": mean(True for _ in rows),
        **{name.capitalize(): mean((row["difficulty"] == "easy") == (name == "easy") for row in rows)
           for name in DIFFICULTIES},
        **{name.capitalize(): mean(one == name for one in length) for name in LENGTHS},
    }  # fmt: skip


def point(row: Mapping[str, Any], compensated: bool) -> float:
    """1 for the right letter; for none, a quarter where that is asked for."""
    letter = chosen_letter(row["prediction"])
    if letter is None:
        return 0.25 if compensated else 0.0
    return float(letter == row["answer"])


# --- the task ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Params:
    source: Literal["auto", "local"]
    prompt: Literal["0shot", "no_context"]
    prompts: Prompts
    lengths: Annotated[tuple[str, ...], Some(LENGTHS)] | None  # rows of these labels; None: all
    max_prompt_tokens: Count | None  # None: what the window leaves besides the answer
    max_new_tokens: Count
    on_bad_row: OnBadRow


class LongBenchV2(RowsTask):
    """One sample per row, in the file's order."""

    params: Params
    name = "longbench_v2"
    version = 1
    Params = Params
    data = Data((DATA,), "cannot be asked", by_hand=UPSTREAM)
    place, upstream, unique = DATA, UPSTREAM, "_id"
    fields = FIELDS
    words_first = False

    def title(self) -> str:
        prompt = "" if self.params.prompt == "0shot" else f"/{self.params.prompt}"
        return "+".join(self.params.lengths or ("all",)) + prompt

    def prepare(self, shape: ModelShape) -> None:
        check_room("task", self.name, self.params.max_new_tokens, self.params.max_prompt_tokens, shape)
        self.words = self.wording(PROMPTS[self.params.prompt], PROMPTS_SOURCE)
        self.template = checked_template(self.words[0]) if self.words else OWN_PROMPTS[self.params.prompt]
        self.notes.append(f"prompts: {'official' if self.words else 'own'}")

    def read(self) -> None:
        super().read()
        lengths, rows = self.params.lengths, self.rows[self.name]
        kept = [one for one in rows if lengths is None or one[1]["length"] in lengths]
        if not kept:
            raise ConfigError(f"{self.paths[self.name]} has no row of task.lengths={list(lengths or ())}; give others")
        self.rows[self.name] = kept
        if n := sum(bool(PLACEHOLDER.search(row["context"])) for _, row in kept):
            self.notes.append(f"{n} texts hold a placeholder, which the authors' code fills in")

    def sample(self, tokenizer: Any, name: str, number: int, row: Row) -> Sample:
        """One row in its prompt, cut to the longest that is allowed."""
        before, after = parts_of(self.template, row)
        limit = self.params.max_prompt_tokens or prompt_room(self.window, self.params.max_new_tokens)
        context, question, n_before, n_after = shortened(tokenizer, before, after, limit, odd_to_end=True)
        return Sample(
            id=row["_id"],
            context=context,
            question=question,
            references=(row["answer"],),
            max_new_tokens=self.params.max_new_tokens,
            fields={
                "difficulty": row["difficulty"],
                "length": row["length"],
                "domain": row["domain"],
                "original_prompt_tokens": n_before,
                "was_cut": n_after != n_before,
            },
        )

    def verdict(self, sample: Sample, prediction: str) -> tuple[float, dict[str, float | None]]:
        letter = chosen_letter(prediction)
        return float(letter == sample.references[0]), {"no_answer": float(letter is None)}

    def artifacts(self, folder: Path, rows: Sequence[Mapping[str, Any]], title: str) -> None:
        """longbench_v2.json; a row that ran out of memory has no answer and counts as wrong."""
        judged = [dict(row) | {"answer": row["references"][0]} for row in rows]
        summary = {
            "title": title,
            "rows": len(judged),
            "cut": sum(bool(row["was_cut"]) for row in judged),
            "plain": accuracies(judged),
            "compensated": accuracies(judged, compensated=True),
        }
        (folder / "longbench_v2.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")


# --- prompts -----------------------------------------------------------------------------------


def checked_template(path: Path) -> str:
    """Upstream's template, with all that must be filled in."""
    template = read_text(path).rstrip("\n")
    missing = [
        name for name in COLUMNS if f"${name}$" not in template and (name != "DOC" or "no_context" not in path.name)
    ]
    if missing:
        raise ConfigError(f"{path} has no ${missing[0]}$; get it again from {PROMPTS_SOURCE}")
    return template


def parts_of(template: str, row: Mapping[str, Any]) -> tuple[str, str]:
    """The filled prompt up to the end of its text, and the rest; what a field holds is not filled in again."""
    seam = template.find("</text>\n\n")
    cut = 0 if seam < 0 else seam + len("</text>\n\n")
    before, after = (
        PLACEHOLDER.sub(lambda found: row[COLUMNS[found[1]]].strip(), part) for part in (template[:cut], template[cut:])
    )
    return before, after
