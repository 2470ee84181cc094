"""GSM8K with worked exemplars: grade-school sums, solved step by step after up to ten solved ones.

Names       GSM8K
Asks        grade-school sums, step by step
Lengths     up to ten exemplars, about 2k tokens
Answers     up to 8,192 tokens, thinking
Licence     MIT

The exemplars are what gets compressed, and every token of the answer leans on them; one wrong step derails the rest.
The prompt is exemplars, newline, `Question: ` and the question: no blank line and no cue after it, the model writes
that itself. It goes in as plain text, never through a chat template.

Rows        gsm8k/test.jsonl from the data folder; downloaded with `source=hub`, and where it is missing and `data_dir`
            names no folder.
Exemplars   gsm8k/gsm8k_prompt_formal.txt from the data folder (ten, about 3.7k tokens where digits are single
            tokens), downloaded with `source=hub` or `prompts=official`; without it ten short ones of our own, and the
            result says `prompts: own`.
            `task.exemplars` is how many of them are shown, the first ones; null: as many as the window holds besides
            the longest question.
Scores      `cot`: the last number before the next invented question equals the last one of the reference. No sign is
            read: -5 equals 5. `hash4`: the text after `#### ` equals the reference's, for fine-tuned models.
            A finished run's gsm8k.json has both, and the length of the answers after the cut.

Thinking    with `task.thinking=true` another task on the same rows: no exemplars, the prompt of
            `tasks/reasoning`, long answers, and its graders on the last box or number. Its numbers are never
            those of the few-shot task, and its dataset is called `test/think-plain`.

Not here: verifiers, several samples per question, and the training rows.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from kvbench.engine.declared import Count
from kvbench.engine.errors import ConfigError
from kvbench.engine.foreign import read_text
from kvbench.engine.shapes import ModelShape
from kvbench.tasks import sources
from kvbench.tasks.base import Data, Sample
from kvbench.tasks.checks import OnBadRow, Prompts
from kvbench.tasks.download import Piece
from kvbench.tasks.published import Row
from kvbench.tasks.reasoning.answers import AnswerPart, Template
from kvbench.tasks.reasoning.task import LONGEST, Reasoning
from kvbench.tasks.rows import BadRow

TEST = "gsm8k/test.jsonl"
TEST_SOURCE = "GitHub openai/grade-school-math (`kvbench fetch gsm8k`)"
EXEMPLARS = "gsm8k/gsm8k_prompt_formal.txt"
EXEMPLARS_SOURCE = "GitHub HugoZHL/PQCache (`kvbench fetch gsm8k`)"
GSM8K_CODE = "3101c7d5072418e28b9008a6636bde82a006892c"
PQCACHE_CODE = "151ce6ba10cf2e28c9e293f71f5d5e725541f093"
PIECES = (
    Piece(
        "openai/grade-school-math", GSM8K_CODE, "grade_school_math/data/test.jsonl",
        "gsm8k/test.jsonl", site="github",
        sha256="3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14",
    ),
    Piece(
        "openai/grade-school-math", GSM8K_CODE, "grade_school_math/data/train.jsonl",
        "gsm8k/train.jsonl", site="github",
        sha256="17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465",
    ),
    Piece(
        "HugoZHL/PQCache", PQCACHE_CODE, "GSM8k/gsm8k_prompt_formal.txt",
        "gsm8k/gsm8k_prompt_formal.txt", site="github",
        sha256="840c910d893478051921f2cc46461522157930646af523c97c350746046f0989",
    ),
)  # fmt: skip
NEXT_QUESTION = "\nQuestion: "
NUMBER = re.compile(r"\d*\.?\d+")
HASH4 = re.compile(r"#### (-?[0-9.,]+)")
INVALID = "[invalid]"
USUAL_TOKENS = {False: 256, True: 8192}  # of an answer, without and with thinking
SLACK = 2  # tokens; a prompt in two parts (compression_scope=context_only) can have one more at the seam

OWN_EXEMPLARS = (
    (
        "A baker sells 14 loaves in the morning and twice as many in the afternoon. A loaf costs $3. "
        "How many dollars does the baker take in that day?",
        "In the afternoon the baker sells 14 * 2 = 28 loaves.\nOver the day that makes 14 + 28 = 42 loaves.\n"
        "They bring in 42 * 3 = 126 dollars.",
        "126",
    ),
    (
        "Nora reads 18 pages on each of 5 days and 35 pages on each of the next 2 days. Her book has 200 pages. "
        "How many pages are left?",
        "In the first 5 days Nora reads 18 * 5 = 90 pages.\nIn the next 2 days she reads 35 * 2 = 70 pages.\n"
        "She has read 90 + 70 = 160 pages.\nThere are 200 - 160 = 40 pages left.",
        "40",
    ),
    (
        "A bus starts with 32 people. At the first stop 9 get off and 4 get on. At the second stop a third of those "
        "on the bus get off. How many people stay on the bus?",
        "After the first stop there are 32 - 9 + 4 = 27 people.\nAt the second stop 27 / 3 = 9 people get off.\n"
        "So 27 - 9 = 18 people stay on the bus.",
        "18",
    ),
    (
        "A garden is 12 meters long and 8 meters wide. A fence costs $15 per meter and a gate costs $60. The gate "
        "replaces 2 meters of fence. What does it cost to close the garden in?",
        "The way round the garden is 2 * 12 + 2 * 8 = 40 meters.\nThe gate replaces 2 meters, so 40 - 2 = 38 meters "
        "of fence are needed.\nThe fence costs 38 * 15 = 570 dollars.\nWith the gate that is 570 + 60 = 630 dollars.",
        "630",
    ),
    (
        "Tom is 4 years older than Ida. In 6 years their ages will add up to 50. How old is Ida now?",
        "Now their ages add up to 50 - 2 * 6 = 38 years.\nWithout Tom's 4 extra years that would be 38 - 4 = 34.\n"
        "Ida is half of that, 34 / 2 = 17 years old.",
        "17",
    ),
    (
        "A shop lowers the price of an $80 coat by 25%. With a card a customer gets another $6 off. What does the "
        "customer with the card pay?",
        "The price goes down by 80 * 25 / 100 = 20 dollars.\nThe coat now costs 80 - 20 = 60 dollars.\n"
        "With the card the customer pays 60 - 6 = 54 dollars.",
        "54",
    ),
    (
        "Three friends pick apples. Ben picks 24, Ada picks half as many as Ben and Lin picks 6 more than Ada. They "
        "share all of them equally. How many apples does each one get?",
        "Ada picks 24 / 2 = 12 apples.\nLin picks 12 + 6 = 18 apples.\nTogether they have 24 + 12 + 18 = 54 "
        "apples.\nEach one gets 54 / 3 = 18 apples.",
        "18",
    ),
    (
        "A printer needs 3 seconds for a page and 20 seconds to warm up. How many seconds does it need for 4 copies "
        "of a text of 15 pages, if it warms up once?",
        "The copies have 4 * 15 = 60 pages.\nThe pages take 60 * 3 = 180 seconds.\n"
        "With the warming up that is 180 + 20 = 200 seconds.",
        "200",
    ),
    (
        "Olga saves $45 a month for half a year. Then she buys a bicycle for $210 and a lamp for $24. How much money "
        "is left?",
        "Half a year has 6 months, so Olga saves 45 * 6 = 270 dollars.\nShe spends 210 + 24 = 234 dollars.\n"
        "There are 270 - 234 = 36 dollars left.",
        "36",
    ),
    (
        "A train covers 90 kilometers in the first hour and 10 kilometers fewer in each of the next 2 hours than in "
        "the hour before. How far does it go in the 3 hours?",
        "In the second hour the train covers 90 - 10 = 80 kilometers.\nIn the third hour it covers 80 - 10 = 70 "
        "kilometers.\nIn all that is 90 + 80 + 70 = 240 kilometers.",
        "240",
    ),
)


# --- scores ------------------------------------------------------------------------------------


def cut(prediction: str) -> str:
    """The answer without the questions that a model goes on to invent."""
    return prediction.partition(NEXT_QUESTION)[0]


def last_number(text: str) -> float | None:
    """The last run of digits, commas ignored: `18.` is 18, `1/2` is 2, `1.2.3` is .3, and -5 is 5."""
    numbers = NUMBER.findall(text.replace(",", ""))
    return float(numbers[-1]) if numbers else None


def cot(prediction: str, answer: str) -> float:
    """1 where the last number of the cut prediction is the last one of the reference's worked solution."""
    number = last_number(cut(prediction))
    return float(number is not None and number == last_number(answer))


def hash4_value(text: str) -> str:
    """The number after the first `#### ` as it is written, commas left out."""
    match = HASH4.search(text)
    return match.group(1).replace(",", "") if match else INVALID


def hash4(prediction: str, answer: str) -> float:
    """1 where both name the same value after `#### `, compared as text: 18.00 is not 18."""
    gold = hash4_value(answer)
    return float(gold != INVALID and hash4_value(prediction) == gold)


EXTRACTIONS = {"cot": cot, "hash4": hash4}


# --- the task ----------------------------------------------------------------------------------


def own_exemplars() -> list[str]:
    """Ten solved questions in our own words."""
    return [
        f"Question: {question}\nLet us work it out.\n{steps}\nThe answer is {value}"
        for question, steps, value in OWN_EXEMPLARS
    ]


def asked(row: Row) -> str:
    """A row's question as it follows the exemplars."""
    return f"{NEXT_QUESTION}{row['question']}\n"


def split_exemplars(path: Path) -> list[str]:
    """The solved questions of a file, blank lines between them."""
    text = read_text(path).strip("\n")
    return re.split(r"\n{2,}", text)


def final_number(answer: str) -> str:
    """The reference without its worked solution: what stands after the last `####`, without commas."""
    return answer.rpartition("####")[2].strip().replace(",", "")


@dataclass(frozen=True)
class Params:
    names: ClassVar[tuple[str, ...]] = ("test",)
    source: Literal["auto", "hub", "local"]  # where the questions come from
    prompts: Prompts  # auto: the official exemplars if they are there
    exemplars: Count | None  # the first so many; None: as many as fit
    max_prompt_tokens: Count | None  # None: what the window leaves besides the answer
    max_new_tokens: Count | None  # None: 256; with thinking 8,192, or what the window leaves
    extraction: Literal["cot", "hash4"]
    thinking: bool  # zero-shot with long answers; the four below are for it alone
    template: Template
    grader: Literal["math_verify", "rkv"]
    answer_part: AnswerPart
    max_total_tokens: Count | None
    on_bad_row: OnBadRow

    @property
    def new_tokens(self) -> int:
        """The longest answer."""
        return self.max_new_tokens or USUAL_TOKENS[self.thinking]


class Gsm8k(Reasoning):
    """One sample per row of the test file, in its order."""

    params: Params
    name = "gsm8k"
    Params = Params
    data = Data((TEST, EXEMPLARS), "fetched when asked for", pieces=PIECES)
    packages: ClassVar[Mapping[str, str]] = {"math-verify": "with thinking"}
    usual_tokens = USUAL_TOKENS[True]
    place, upstream, fields = "gsm8k/{name}.jsonl", TEST_SOURCE, {"question": str, "answer": str}
    words_first = False
    tokenizer: Any = None  # until `samples`; `kvbench.evals.rescore` has none

    def title(self) -> str:
        return f"test/think-{self.params.template}" if self.params.thinking else "test"

    def prepare(self, shape: ModelShape) -> None:
        if self.params.thinking:
            super().prepare(shape)
            return
        self.words = self._exemplar_file()
        self.solved = split_exemplars(self.words[0]) if self.words else own_exemplars()
        if self.params.exemplars is not None and self.params.exemplars > len(self.solved):
            raise ConfigError(
                f"task.exemplars={self.params.exemplars} is more than there are; give {len(self.solved)} or fewer"
            )
        room = shape.window - self.params.new_tokens
        if room < 1 or (self.params.max_prompt_tokens or 0) > room:
            raise ConfigError(
                f"task.max_prompt_tokens={self.params.max_prompt_tokens} and task.max_new_tokens="
                f"{self.params.new_tokens} do not fit the window of {shape.name}, "
                f"{shape.window} tokens; make them smaller"
            )
        self.prompt_room = self.params.max_prompt_tokens or room

    def _exemplar_file(self) -> list[Path]:
        """The official exemplars; none where ours stand in."""
        source, prompts = self.params.source, self.params.prompts
        path = None if prompts == "own" else sources.find(EXEMPLARS, self.data_dir)
        if path is not None or prompts == "own" or (prompts == "auto" and source != "hub"):
            return [path] if path else []
        return sources.obtain([EXEMPLARS], source, self.data_dir, EXEMPLARS_SOURCE)

    def check_row(self, name: str, row: Row) -> None:
        """Refuse a reference without a number, which no answer can equal, and texts of absurd length."""
        for key in ("question", "answer"):
            if len(row[key]) > LONGEST:
                raise BadRow(f"field {key!r} has {len(row[key])} characters, more than {LONGEST}")
        if last_number(row["answer"]) is None:
            raise BadRow(f"field 'answer' holds no number: {row['answer'][-60:]!r}")
        ends = "####" in row["answer"] and re.fullmatch(r"-?\d+(\.\d+)?", final_number(row["answer"]))
        if self.params.thinking and not ends:
            raise BadRow(f"field 'answer' has no number behind ####: {row['answer'][-60:]!r}")

    def samples(self, tokenizer: Any) -> Sequence[Sample]:
        if self.params.thinking:
            return super().samples(tokenizer)
        self.tokenizer, rows = tokenizer, self.rows["test"]
        fitting = self._as_many_as_fit([asked(row) for _, row in rows])
        n = self.params.exemplars or fitting
        if n > fitting:
            raise ConfigError(
                f"task.exemplars={n} and the longest question do not fit into {self.prompt_room} "
                f"tokens; give {fitting} or fewer, or null for as many as fit"
            )
        self.dataset, words = f"test/{n}-shot", "official" if self.words else "own"
        shown = [f"prompts: {words}", f"exemplars: {n} of {len(self.solved)}"]
        self.notes = [*shown, *(note for note in self.notes if note not in shown)]
        context = "\n\n".join(self.solved[:n])
        return [
            Sample(
                id=f"test-{line}",
                context=context,
                question=asked(row),
                references=(row["answer"],),
                max_new_tokens=self.params.new_tokens,
                use_chat=False,
                fields={"exemplars": n, "prompts": words},
            )
            for line, row in rows
        ]

    def _as_many_as_fit(self, questions: Sequence[str]) -> int:
        """How many exemplars the longest question leaves room for; one number for all rows."""
        longest = max(questions, key=self._count)
        for n in range(len(self.solved), 0, -1):
            needed = self._count("\n\n".join(self.solved[:n]) + longest)
            if needed + SLACK <= self.prompt_room:
                return n
        raise ConfigError(
            f"not even one exemplar fits into {self.prompt_room} tokens beside the longest "
            "question; use a model with a longer window, or raise task.max_prompt_tokens"
        )

    def _count(self, text: str) -> int:
        return len(self.tokenizer.encode(text))

    def verdict(self, sample: Sample, prediction: str) -> tuple[float, dict[str, float | None]]:
        if self.params.thinking:
            return super().verdict(sample, prediction)
        return EXTRACTIONS[self.params.extraction](prediction, sample.references[0]), {}

    def gold(self, sample: Sample) -> str:
        answer = sample.references[0]
        return final_number(answer) if self.params.thinking else answer

    def artifacts(self, folder: Path, rows: Sequence[Mapping[str, Any]], title: str) -> None:
        if self.params.thinking:
            return  # what it measures is in result.json
        scored = [row for row in rows if row["score"] is not None]
        encode = None if self.tokenizer is None else self.tokenizer.encode
        lengths = [len(encode(cut(row["prediction"]), add_special_tokens=False)) for row in scored] if encode else []
        summary: dict[str, Any] = {"rows": len(scored)}
        for name, scorer in EXTRACTIONS.items():
            scores = [scorer(row["prediction"], row["references"][0]) for row in scored]
            summary[f"{name}_accuracy"] = sum(scores) / len(scores) if scores else None
        summary["tokens_after_cut_mean"] = sum(lengths) / len(lengths) if lengths else None
        (folder / "gsm8k.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
