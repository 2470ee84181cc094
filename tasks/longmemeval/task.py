"""LongMemEval: a question on many earlier sessions of a chat, which are read one by one; S form, 115k tokens a row.

Names       LongMemEval; small facts in small talk
Asks        what a user told in many sessions of a chat: a fact, its newest value, how often, when, or nothing of it
Lengths     115k published, less with task.sessions; any from about 1k with source=embedded
Answers     64 tokens
Licence     MIT

Sources     longmemeval/longmemeval_s_cleaned.json of the data folder, or longmemeval_s.json of before, or either as
            JSON lines. `task.sessions=N` keeps so many sessions of a row: those with the answer, and others by the
            seed, in their order. Rows that don't fit the window are left out and counted, never cut. With
            `source=embedded` rows are drawn (`made.py`), with eight sessions or more.
Modes       `golden`: every session is read through the compressed cache, and compressed, before the next one; the
            question comes last. `query_aware`: all in one prompt.
Prompts     wording of our own; sessions in the order of their dates, with these, as `user: …` and `assistant: …`.
Score       without a judge by rules (`scores.py`), which is fair where the answer is a short exact fact: all of
            single-session-user, knowledge-update and multi-session with answers of up to six words, temporal-reasoning
            with numbers or names, single-session-assistant where a name is asked, abstention. Rows with longer answers,
            and single-session-preference, whose answer is a rubric, are left out and counted: they need a judge. Days
            that are off by one are wrong, which the authors forgive.
Judge       `task.judge=http://localhost:8000/v1 task.judge_model=NAME`: a model says yes or no to every answer, after
            the run, by `python -m kvbench.evals.rescore --write RUN` (`chat_judge.py`). It is asked in words of
            our own, which stand in the result's notes, so that scores are not those of the authors' judge. What it says
            neither yes nor no to is worth 0 and counted as `unjudged`.
Columns     `question_type` (abstention is one), `sessions`, `age`: how many sessions ago what is needed stands, of the
            oldest piece, for knowledge-update of the newest; 1 is the last session. `refused` is the share of answers
            that say it isn't known. A finished run's longmemeval.csv has the means by type, in percent.

Not here: the rules of scores (`scores.py`), drawn rows (`made.py`), the judge's server (`chat_judge.py`).
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Le

from kvbench.engine.declared import Count, Some
from kvbench.engine.errors import ConfigError
from kvbench.engine.shapes import ModelShape
from kvbench.methods.calibration import prose
from kvbench.tasks import sources
from kvbench.tasks.base import Data, Sample
from kvbench.tasks.checks import Lengths, OnBadRow, check_lengths
from kvbench.tasks.download import Piece
from kvbench.tasks.lazy import Drawn, fitting, in_turns, note_left_out
from kvbench.tasks.longmemeval import made, scores
from kvbench.tasks.longmemeval.chat_judge import ChatJudge, check_address
from kvbench.tasks.published import Fields, Row, RowsTask
from kvbench.tasks.rows import BadRow, Id, Text
from kvbench.tasks.texts import sentences
from kvbench.tasks.turns.conversation import Asking, Base, Feed, Turn
from kvbench.tasks.turns.encode import prompt_of
from kvbench.tasks.turns.questions import apart, asked

FILES = tuple(f"longmemeval_{form}.{end}" for form in ("s_cleaned", "s") for end in ("json", "jsonl"))
UPSTREAM = "hub dataset xiaowu0162/longmemeval-cleaned (kvbench fetch longmemeval)"
PIECE = Piece(
    "xiaowu0162/longmemeval-cleaned", "98d7416c24c778c2fee6e6f3006e7a073259d48f", FILES[0], f"longmemeval/{FILES[0]}",
    "d6f21ea9d60a0d56f34a05b609c79c88a451d2ae03597821ea3d5a9678c3a442",
)  # fmt: skip
ABSTENTION, PREFERENCE = "abstention", "single-session-preference"
TYPES = (
    *("single-session-user", "single-session-assistant", "multi-session", "knowledge-update", "temporal-reasoning"),
    *(ABSTENTION, PREFERENCE),
)
LONGEST = 6  # words of an answer that is scored without a judge
CHARACTERS = 8  # of a token at most, by which rows are left out before they are tokenised
STRIDE = 101  # sentences from where a session's small talk begins to where the next one's does
INTRO = """\
Below are earlier conversations between you and a user, in the order of their dates. A question of the user follows. \
Answer it from these conversations, in a few words. If they don't say it, answer that you don't know.

"""
JUDGE = """\
A user asked an assistant about their earlier conversations. Judge the assistant's reply.

The user's question: {question}
{what}: {answer}
The assistant's reply: {reply}

{rule} Say yes or no."""
WHAT = {PREFERENCE: "What a good reply takes up", ABSTENTION: "Why there is no answer"}
MEANS_THE_SAME = "Does the reply give the right answer, or one that means the same? A part of it isn't enough."
RULES = dict.fromkeys(TYPES, MEANS_THE_SAME) | {
    "temporal-reasoning": f"{MEANS_THE_SAME} Days, weeks or months that are off by one count as right.",
    "knowledge-update": f"{MEANS_THE_SAME} What was right before may stand beside it, if the reply doesn't hold to it.",
    PREFERENCE: "Does the reply make right use of what the user had said? It need not take up every point.",
    ABSTENTION: "Does the reply say that this can't be known from the conversations?",
}


@dataclass(frozen=True)
class Params:
    source: Literal["auto", "local", "hub", "embedded"]  # auto: the file; embedded: drawn rows
    types: Annotated[tuple[str, ...], Some(TYPES)] | None  # None: all that can be scored
    sessions: Count | None  # of a row at most; None: all, or by the length of drawn rows
    lengths: Lengths  # of drawn rows, answer included
    others: Annotated[int, Ge(0), Le(made.MOST_OTHERS)]  # people with facts of the same kind in drawn rows
    rows: Count | None  # of each type and length; None: all, or ten drawn ones
    max_new_tokens: Count
    judge: str | None  # address of an OpenAI-compatible server; None: scores by rules
    judge_model: str | None
    on_bad_row: OnBadRow
    mode: Literal["golden", "query_aware"]
    feed: Feed
    budget_base: Base | None  # None: conversation in golden, else context

    def __post_init__(self) -> None:
        if self.judge is not None:
            check_address(self.judge)
        if (self.judge is None) != (self.judge_model is None):
            raise ConfigError(
                "task.judge and task.judge_model go together; give an address and a model's name, or none"
            )
        if self.judge is None and PREFERENCE in (self.types or ()):
            raise ConfigError(
                f"task.types={PREFERENCE} has rubrics in place of answers and needs a judge; give task.judge and "
                "task.judge_model, or leave it out"
            )
        if self.source == "embedded":
            if other := next((one for one in self.types or () if one not in made.TYPES), None):
                raise ConfigError(f"task.source=embedded draws {', '.join(made.TYPES)}, not {other}; leave it out")
            if self.sessions is not None and self.sessions < made.FEWEST:
                raise ConfigError(
                    f"task.sessions={self.sessions} is too few for drawn rows; give {made.FEWEST} or more, or null"
                )

    @property
    def asked_types(self) -> tuple[str, ...]:
        if self.types is not None:
            return self.types
        return made.TYPES if self.source == "embedded" else TYPES if self.judge else TYPES[:-1]

    @property
    def asking(self) -> Asking:
        usual = "conversation" if self.mode == "golden" else "context"
        return Asking(self.mode, self.feed, self.budget_base or usual)


def type_of(row: Row) -> str:
    return ABSTENTION if str(row["question_id"]).endswith("_abs") else row["question_type"]


class LongMemEval(RowsTask):
    """The rows of each type, in turns."""

    params: Params
    asking: Asking
    name = "longmemeval"
    version = 1
    Params = Params
    data = Data((PIECE.target,), "without them drawn rows (task.source=embedded)", pieces=(PIECE,))
    place, upstream, instead = "longmemeval/{name}", UPSTREAM, "drawn rows"
    unique = "question_id"
    fields: ClassVar[Fields] = {
        "question_id": Id, "question_type": Text, "question": Text, "answer": Text | int, "question_date": Text,
        "haystack_session_ids": list[str], "haystack_dates": list[str], "haystack_sessions": list[Any],
        "answer_session_ids": list[str],
    }  # fmt: skip
    means: ClassVar[Mapping[str, str]] = {"question_type": "question_type"}

    @property
    def scores_later(self) -> bool:
        """A judge takes its time."""
        return self.params.judge is not None

    def title(self) -> str:
        params = self.params
        size = f"{'+'.join(map(str, params.lengths))}-tokens/{params.others}-others" if self.is_embedded else "s"
        sessions = "" if params.sessions is None else f"/{params.sessions}-sessions"
        types = "" if params.types is None else f"/{'+'.join(params.types)}"
        return f"{size}{sessions}{types}" + (f"/judged by {params.judge_model}" if params.judge else "")

    @property
    def names(self) -> Sequence[str]:
        """The file, by the first of its names that is there."""
        if self.params.source == "hub":
            return FILES[:1]
        return [next((name for name in FILES if sources.find(f"longmemeval/{name}", self.data_dir)), FILES[0])]

    def prepare(self, shape: ModelShape) -> None:
        params = self.params
        if self.is_embedded:
            check_lengths(params.lengths, shape)
            self.notes += ["drawn rows, not comparable with LongMemEval", f"small talk: {prose.prose_name()}"]
        if params.judge is None:
            self.notes.append("scored by rules, without the judge that the authors ask")
            return
        self.notes.append(f"scored by {params.judge_model} at {params.judge}, in words of our own: {one_line(JUDGE)}")
        self.notes += dict.fromkeys(f"the judge's rule for {kind}: {RULES[kind]}" for kind in params.asked_types)

    def check_row(self, name: str, row: Row) -> None:
        if row["question_type"] not in TYPES or row["question_type"] == ABSTENTION:
            raise BadRow(f"field 'question_type' is {row['question_type']!r:.60}, no type of this benchmark")
        if not scores.words_of(str(row["answer"])):
            raise BadRow("field 'answer' holds no word")
        sessions = row["haystack_sessions"]
        if not any(sessions) or any(
            len(row[key]) != len(sessions) for key in ("haystack_session_ids", "haystack_dates")
        ):
            raise BadRow("field 'haystack_sessions' is empty, or has not as many elements as its ids and dates")
        for i, session in enumerate(sessions):
            if not isinstance(session, list) or not all(is_message(one) for one in session):
                raise BadRow(f"session {i} of field 'haystack_sessions' is no list of messages with role and content")
        if type_of(row) != ABSTENTION and not {*row["answer_session_ids"]} & {*row["haystack_session_ids"]}:
            raise BadRow("field 'answer_session_ids' names no session of the row")

    # -- samples --

    def samples(self, tokenizer: Any) -> Sequence[Sample]:
        params = self.params
        if self.is_embedded:
            cells = [(kind, length) for length in params.lengths for kind in params.asked_types]
            return apart(Chats(self, tokenizer, dict.fromkeys(cells, params.rows or 10)), params.asking, 1)
        (rows,) = self.rows.values()
        each = list[Sequence[Sample]]()
        for kind in params.asked_types:
            of_type = [row for _, row in rows if type_of(row) == kind]
            short = [row for row in of_type if params.judge or self.is_short(kind, row)]
            found, left_out = fitting(short, params.rows, lambda row: self.fitted(tokenizer, row))
            each.append(found)
            note_left_out(self.notes, left_out, "rows", self.window, f"{kind}: ")
            self.note(len(of_type) - len(short), f"{kind} left out whose answer is a sentence")
        if params.types is None and params.judge is None:
            self.note(
                sum(type_of(row) == PREFERENCE for _, row in rows), f"{PREFERENCE} left out, whose answer is a rubric"
            )
        if not any(each):
            raise ConfigError(
                f"no row of task.types={','.join(params.asked_types)} fits the {self.window} tokens of the model; give "
                "task.sessions=10 or fewer, or use a longer model"
            )
        return apart(in_turns(each), params.asking, 1)

    def note(self, n: int, what: str) -> None:
        note = f"{n} rows of {what}: they need task.judge"
        self.notes += [note] if n and note not in self.notes else []

    def is_short(self, kind: str, row: Row) -> bool:
        """Whether rules can tell right answers from others."""
        return kind == ABSTENTION or len(scores.words_of(scores.accepted(str(row["answer"]))[0])) <= LONGEST

    def fitted(self, tokenizer: Any, row: Row) -> Sample | None:
        places = self.places_of(row)
        if sum(len(one["content"]) for i in places for one in row["haystack_sessions"][i]) > CHARACTERS * self.window:
            return None
        sample = self.chat(tokenizer, row, places)
        return None if sample.fields["tokens"] > self.window else sample

    def places_of(self, row: Row) -> list[int]:
        """The sessions that are read, in the order of their dates."""
        dates, ids, answers = row["haystack_dates"], row["haystack_session_ids"], {*row["answer_session_ids"]}
        order = [i for i in sorted(range(len(ids)), key=lambda i: dates[i]) if row["haystack_sessions"][i]]
        needed = [i for i in order if ids[i] in answers]
        if self.params.sessions is None:
            return order
        others = [i for i in order if ids[i] not in answers]
        rng = random.Random(f"longmemeval {self.seed} {row['question_id']}")
        rng.shuffle(others)
        kept = {*needed, *others[: max(0, self.params.sessions - len(needed))]}
        return [i for i in order if i in kept]

    def chat(self, tokenizer: Any, row: Row, places: Sequence[int], cue: str = "", **fields: Any) -> Sample:
        """A row as one conversation: its sessions are read, then it is asked. Its answer begins with the cue."""
        kind, params, sessions = type_of(row), self.params, row["haystack_sessions"]
        needed = [at for at, i in enumerate(places) if row["haystack_session_ids"][i] in row["answer_session_ids"]]
        oldest = None if not needed else needed[-1] if kind == "knowledge-update" else needed[0]
        sample = Sample(
            id=str(row["question_id"]),
            context=INTRO,
            question="",
            evidence=tuple(
                text for i in places for one in sessions[i]
                if one.get("has_answer") is True and (text := one["content"].strip())
            ),
            fields={
                "dataset": kind, "question_type": kind, "sessions": len(places),
                "age": None if oldest is None else len(places) - oldest, "question": row["question"],
                "rivals": [], **fields,
            },
        )  # fmt: skip
        turn = Turn(
            question=f"Today is {row['question_date']}. The user asks: {row['question'].strip()}\n",
            references=scores.accepted(str(row["answer"])),
            max_new_tokens=params.max_new_tokens,
            answer_prefix=f"Answer: {cue}".rstrip(),
            reads=tuple(written(row["haystack_dates"][i], sessions[i]) for i in places),
        )
        sample = asked(sample, [turn], params.asking)
        prompt = prompt_of(tokenizer, sample, chat="auto", system_prompt="", scope="full_prompt")
        return replace(sample, fields={**sample.fields, "tokens": len(prompt) + params.max_new_tokens})

    # -- scores --

    def verdict(self, sample: Sample, prediction: str) -> tuple[float, dict[str, float | None]]:
        fields, kind, params = sample.fields, sample.fields["question_type"], self.params
        refused: dict[str, float | None] = {"refused": float(scores.says_unknown(scores.head(prediction)))}
        if params.judge is None or params.judge_model is None:
            return scores.score(prediction, sample.references, fields["rivals"], kind == ABSTENTION), refused
        found = ChatJudge(params.judge, params.judge_model).says_yes(
            JUDGE.format(
                question=fields["question"], what=WHAT.get(kind, "The right answer"),
                answer=" Or: ".join(sample.references), reply=prediction.rpartition("</think>")[2].strip(),
                rule=RULES[kind],
            )
        )  # fmt: skip
        return float(found or False), {**refused, "unjudged": float(found is None)}

    def right_answer(self, sample: Sample) -> str:
        unknown = sample.fields["question_type"] == ABSTENTION
        return "I don't know, you did not tell me." if unknown else sample.references[0]


def is_message(one: Any) -> bool:
    return isinstance(one, dict) and one.get("role") in ("user", "assistant") and isinstance(one.get("content"), str)


def written(date: str, session: Sequence[Mapping[str, Any]]) -> str:
    messages = "".join(f"{one['role']}: {one['content'].strip()}\n" for one in session)
    return f"Conversation of {date}\n{messages}\n"


def one_line(text: str) -> str:
    return " ".join(text.split())


def small_talk(start: int, n_sessions: int, n_words: int) -> list[str]:
    """Sentences for one session after the other, as many as have so many words; each session's stand in a row."""
    found, prose = list[str](), sentences()
    while n_words:
        i = len(found)
        words = prose[(start + STRIDE * (i % n_sessions) + i // n_sessions) % len(prose)].split()[:n_words]
        found.append(" ".join(words))
        n_words -= len(words)
    return found


class Chats(Drawn):
    """Drawn rows, whose units are words of small talk."""

    fewest, per_unit, of_fewest = 1, 2, "its facts and a word of small talk"

    def size(self, sample: Sample) -> int:
        return sample.fields["tokens"]

    def draw(self, kind: str, length: int, number: int, units: int) -> Sample:
        rng = random.Random(f"longmemeval {self.task.seed} {kind} {length} {number}")
        n_sessions = self.task.params.sessions or min(40, max(8, length // 500))
        plan, start = made.plan(rng, kind, n_sessions, self.task.params.others), rng.randrange(len(sentences()))
        talk = small_talk(start, n_sessions, units)
        row = made.row(f"{kind}-{length}-{number}", kind, plan, talk)
        return self.task.chat(
            self.tokenizer, row, range(n_sessions), cue=plan.cue, rivals=[*plan.rivals], length=length
        )
