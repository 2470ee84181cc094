"""MRCR: the i-th of two, four or eight alike pieces out of a long dialogue, repeated word for word.

Names       MRCR; alike pieces in a dialogue
Asks        the i-th of several alike pieces of a dialogue, word for word
Lengths     4k to 1M published, any up to 40k with source=embedded
Answers     those of the piece and 32 more
Licence     MIT

Sources     mrcr/2needle.jsonl, 4needle.jsonl, 8needle.jsonl of the data folder, or what is fetched: the hub's parquet
            files as JSON lines. With `source=embedded` dialogues are drawn (`made.py`) from Python's help topics, with
            pieces of `task.words` words, one of a kind (`task.needles=[1]`) or several.
Prompts     the dialogue as chat turns by the model's template; `task.template=plain` writes `User: ` and `Assistant: `.
Questions   a published row has one. A drawn dialogue may have several (`task.questions`), each with a piece of its own:
            `task.mode=independent` asks them on one prefill, `query_aware` each in a prompt of its own.
Length      of prompt and answer. A row that does not fit is left out and counted, never cut.
Answers     may have the piece's tokens and 32 more, which tells its length, to all methods alike.
Score       0 unless the answer begins with the row's ten characters, at its first one; then the ratio of difflib, whose
            frequent characters of long references are junk. `task.strip_start=true`, ours: blanks before them are
            forgiven. `prefix` and `exact` (a ratio of 0.99) are given too. A finished run's mrcr.csv has the means by
            number of alike pieces and by bin of length, in percent, with the model's own tokens.

Not here: the dialogues that are drawn (`made.py`).
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Le

from kvbench.engine.declared import Count, Some, word
from kvbench.engine.errors import ConfigError
from kvbench.engine.foreign import NoJson, parse_json
from kvbench.engine.shapes import ModelShape
from kvbench.methods.calibration import prose
from kvbench.tasks import sources
from kvbench.tasks.base import Data, Sample
from kvbench.tasks.checks import Lengths, OnBadRow, check_lengths
from kvbench.tasks.download import Piece
from kvbench.tasks.lazy import Drawn, fitting, in_turns, note_left_out
from kvbench.tasks.mrcr.made import WORDS, Dialogue, Plan
from kvbench.tasks.prompt import first_ids, rendered
from kvbench.tasks.published import Fields, Row, RowsTask
from kvbench.tasks.rows import BadRow, write_means
from kvbench.tasks.texts import sentences
from kvbench.tasks.turns.conversation import Asking, Conversation, Turn
from kvbench.tasks.turns.questions import QuestionParams, apart

NEEDLES = (1, 2, 4, 8)  # 1: of drawn dialogues alone
MOST_QUESTIONS = 32
REVISION = "f4c69fae7cf81f7ca26b9fee34b392a50f6b8a1d"
UPSTREAM = "hub dataset openai/mrcr (kvbench fetch mrcr)"
PARTS = 2  # files of each number of needles
EXTRA = 32  # tokens that an answer may have beyond its reference
EXACT = 0.99
CHARACTERS = 8  # of a token at most, by which rows are left out before they are tokenised
BINS = tuple(4096 << i for i in range(9))
Words = Annotated[int, Ge(5)]


@dataclass(frozen=True, kw_only=True)
class Params(QuestionParams):
    source: Literal["auto", "local", "hub", "embedded"]  # auto: the files; embedded: drawn dialogues
    questions: Annotated[int, Ge(1), Le(MOST_QUESTIONS)]
    mode: Literal["independent", "query_aware"] | None  # another would show earlier pieces in later questions
    needles: Annotated[tuple[int, ...], Some(NEEDLES)]  # pieces that are alike
    lengths: Lengths  # of drawn dialogues, answer included
    words: tuple[Words, Words]  # of a drawn piece, from and to
    rows: Count | None  # of each number of needles and length; None: all, or 30 drawn ones
    template: Literal["chat", "plain"]
    answer_part: Literal["all", "after_think"]
    strip_start: bool
    max_prompt_tokens: Count | None  # longer rows are left out; None: what the window holds
    on_bad_row: OnBadRow

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.words[0] > self.words[1]:
            raise ConfigError(f"task.words={word(self.words)} is no range; give the fewest and the most, as [40,200]")
        drawn = {"needles": 1 in self.needles, "questions": self.questions > 1, "words": self.words != WORDS}
        if self.source != "embedded" and (key := next((key for key, is_so in drawn.items() if is_so), None)):
            raise ConfigError(
                f"task.{key} of drawn dialogues is asked of published rows, which have one question on 2, 4 or 8 alike "
                "pieces; give task.source=embedded with it"
            )


def ratio(prediction: str, reference: str, start: str, strip_start: bool = False) -> float:
    """The card's score of an answer."""
    prediction = prediction.lstrip() if strip_start else prediction
    if not prediction.startswith(start):
        return 0.0
    return SequenceMatcher(None, prediction.removeprefix(start), reference.removeprefix(start)).ratio()


def bin_of(n_tokens: int) -> str:
    """The published bin of a length: above its first number, up to its second."""
    high = next((high for high in BINS if n_tokens <= high), BINS[-1])
    return f"{high // 2048}k-{high // 1024}k" if high > BINS[0] else f"0k-{high // 1024}k"


def pieces() -> tuple[Piece, ...]:
    return tuple(
        Piece("openai/mrcr", REVISION, f"{n}needle/{n}needle_{part}.parquet", f"mrcr/{n}needle_{part}.jsonl")
        for n in NEEDLES[1:] for part in range(PARTS)
    )  # fmt: skip


class MRCR(RowsTask):
    """The dialogues of each number of needles, in turns."""

    params: Params
    name = "mrcr"
    version = 1
    Params = Params
    data = Data(
        tuple(piece.target for piece in pieces()), "without them drawn dialogues (task.source=embedded)",
        pieces=pieces(),
    )  # fmt: skip
    place, upstream, instead = "mrcr/{name}.jsonl", UPSTREAM, "drawn dialogues"
    fields: ClassVar[Fields] = {"prompt": str, "answer": str, "random_string_to_prepend": str}

    def title(self) -> str:
        params = self.params
        size = f"{'+'.join(map(str, params.lengths))}-tokens/" if self.is_embedded else ""
        words = "" if params.template == "chat" else "/plain"
        asked = f"/{params.questions}-questions" if params.questions > 1 else ""
        return f"{size}{'+'.join(map(str, params.needles))}needle{words}{asked}"

    @property
    def names(self) -> Sequence[str]:
        """Files: one for each number of needles where somebody put them together, else its parts."""
        is_hub = self.params.source == "hub"
        found = list[str]()
        for n in self.params.needles:
            is_whole = not is_hub and sources.find(f"mrcr/{n}needle.jsonl", self.data_dir)
            found += [f"{n}needle"] if is_whole else [f"{n}needle_{part}" for part in range(PARTS)]
        return found

    def prepare(self, shape: ModelShape) -> None:
        params = self.params
        self.notes = [f"template: {params.template}"]
        self.notes += [f"answer: {params.answer_part}"] if params.answer_part != "all" else []
        self.notes += ["blanks before an answer are forgiven, which the authors do not"] if params.strip_start else []
        if self.is_embedded:
            check_lengths(params.lengths, shape)
            self.notes += ["drawn dialogues, not comparable with MRCR", f"pieces: {prose.prose_name()}"]

    def samples(self, tokenizer: Any) -> Sequence[Sample]:
        params = self.params
        if self.is_embedded:
            cells = [(needles, length) for length in params.lengths for needles in params.needles]
            drawn = Dialogues(self, tokenizer, dict.fromkeys(cells, params.rows or 30))
            return apart(drawn, params.asking, params.questions)
        found = in_turns([self.fitting(tokenizer, n) for n in params.needles])
        if not found:
            raise ConfigError("no row of MRCR fits the model's window or task.max_prompt_tokens; use a longer model")
        return found

    def fitting(self, tokenizer: Any, n: int) -> list[Sample]:
        """The rows that fit, as many as are asked for; the result says how many of those before the last do not."""
        limit = min(self.window, self.params.max_prompt_tokens or self.window)
        rows = [row for name, each in self.rows.items() if name.startswith(f"{n}needle") for _, row in each]

        def make(one: tuple[int, Row]) -> Sample | None:
            number, row = one
            if len(row["prompt"]) > CHARACTERS * limit:
                return None
            turns, fields = parse_json(row["prompt"]), {"dataset": f"{n}needle", "wanted": row.get("desired_msg_index")}
            start = row["random_string_to_prepend"]
            sample = self.dialogue(tokenizer, turns, row["answer"], start, f"{n}needle-{number}", fields)
            n_prompt = sample.fields["tokens"] - len(tokenizer.encode(row["answer"], add_special_tokens=False))
            is_long = n_prompt + sample.max_new_tokens > self.window or n_prompt > limit
            return None if is_long else sample

        found, left_out = fitting(enumerate(rows), self.params.rows, make)
        note_left_out(self.notes, left_out, "rows", limit, f"{n}needle: ")
        return found

    def dialogue(
        self, tokenizer: Any, turns: Sequence[Mapping[str, str]], answer: str, start: str, id: str, fields: Row
    ) -> Sample:
        context, question, n_tokens = self.written(tokenizer, turns)
        n_answer = len(tokenizer.encode(answer, add_special_tokens=False))
        return Sample(
            id=id,
            context=context,
            question=question,
            references=(answer,),
            max_new_tokens=n_answer + EXTRA,
            evidence=(answer.removeprefix(start),),
            is_rendered=self.params.template == "chat",
            use_chat=False,
            fields={"start": start, "tokens": n_tokens + n_answer, "bin": bin_of(n_tokens + n_answer), **fields},
        )

    def written(self, tokenizer: Any, turns: Sequence[Mapping[str, str]]) -> tuple[str, str, int]:
        """The prompt before its last question, that question, and the tokens of both."""
        if self.params.template == "plain":
            text = "".join(f"{turn['role'].capitalize()}: {turn['content']}\n" for turn in turns) + "Assistant:"
        else:
            text = rendered(tokenizer, turns)
        cut = text.rindex(turns[-1]["content"].strip())
        return text[:cut], text[cut:], len(first_ids(tokenizer, text))

    def verdict(self, sample: Sample, prediction: str) -> tuple[float, dict[str, float | None]]:
        if self.params.answer_part == "after_think":
            prediction = prediction.rpartition("</think>")[2].lstrip()
        start = sample.fields["start"]
        found = ratio(prediction, sample.references[0], start, self.params.strip_start)
        begins = prediction.lstrip() if self.params.strip_start else prediction
        return found, {"prefix": float(begins.startswith(start)), "exact": float(found >= EXACT)}

    def artifacts(self, folder: Path, rows: Sequence[Row], title: str) -> None:
        """mrcr.csv: by number of needles and bin, never over bins of unlike size."""
        write_means(folder / "mrcr.csv", rows, {"dataset": "dataset", "bin": "bin"}, is_sorted=True)

    def check_row(self, name: str, row: Row) -> None:
        try:
            turns = parse_json(row["prompt"])
        except NoJson as error:
            raise BadRow(f"field 'prompt' is no JSON ({error})") from None
        if not isinstance(turns, list) or not turns:
            raise BadRow("field 'prompt' holds no list of messages")
        for turn in turns:
            is_turn = isinstance(turn, dict) and turn.get("role") in ("user", "assistant")
            if not is_turn or not isinstance(turn.get("content"), str) or not turn["content"].strip():
                raise BadRow("field 'prompt' holds a message that has no role or no text")
        if turns[-1]["role"] != "user":
            raise BadRow("the last message of field 'prompt' is no question of the user")
        start = row["random_string_to_prepend"]
        if not start or not row["answer"].startswith(start) or row["answer"] == start:
            raise BadRow("field 'answer' does not begin with random_string_to_prepend, or has nothing behind it")


class Dialogues(Drawn):
    """Drawn dialogues, whose units are words."""

    per_unit = 2

    def size(self, sample: Sample) -> int:
        return sample.fields["tokens"] + EXTRA

    def sample(self, i: int) -> Sample:
        params, (needles, length, number) = self.task.params, self.places[i]
        for again in range(20):  # some draws have long pieces
            rng = random.Random(f"mrcr {self.task.seed} {needles} {length} {number} {again}")
            plan = Plan(rng, needles, sentences(), params.questions, params.words)

            def draw(words: int, plan: Plan = plan) -> Sample:
                return self.draw(f"{needles}needle-{length}-{number}", length, plan.of(words))

            words = self.filling(length, lambda n, draw=draw: self.size(draw(n)), plan.fewest)
            if words is not None and words > plan.most:
                raise ConfigError(
                    f"task.lengths={length} is more than the prose that is here ({plan.most} words); give less"
                )
            if words is not None:
                return draw(words)
        asked = f" and {n} questions" if (n := params.questions) > 1 else ""
        raise ConfigError(
            f"task.lengths={length} is too short for {needles} alike pieces{asked}; give more tokens or less task.words"
        )

    def draw(self, id: str, length: int, dialogues: Sequence[Dialogue]) -> Sample:
        """A dialogue with its question, or with all of them one by one."""
        each = [
            self.task.dialogue(self.tokenizer, one.messages, one.answer, one.start, id, {
                "dataset": f"{one.n_alike}needle", "length": length, "wanted": one.wanted,
            }) for one in dialogues
        ]  # fmt: skip
        return each[0] if (asking := self.task.params.asking) is None else together(each, asking)


def together(each: Sequence[Sample], asking: Asking) -> Sample:
    """Samples of one context as the turns of one."""
    turns = [
        Turn(question=one.question, references=one.references, max_new_tokens=one.max_new_tokens, fields=one.fields)
        for one in each
    ]
    assert all(one.context == each[0].context for one in each), each[0].id
    longest = max(each, key=lambda one: one.fields["tokens"])
    return replace(
        longest,
        question="",
        references=(),
        evidence=(),
        max_new_tokens=max(one.max_new_tokens for one in each),
        conversation=Conversation(tuple(turns), asking, is_rendered=True),
        fields={key: longest.fields[key] for key in ("dataset", "length", "tokens")},
    )
