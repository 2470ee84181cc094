"""Parts that reasoning tasks share: the prompt, the room for an answer, and the grade of one.

`template=plain` is the prompt of R-KV and TriAttention, without a chat template. `chat` is one user's turn; some models
think only there, so scores of both are never compared, and the template is in the dataset's name.

Not here: grading itself (`judge.py`, `grade.py`), each task's rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, Literal

from kvbench.engine.errors import ConfigError
from kvbench.tasks.base import Sample
from kvbench.tasks.ending import THOUGHT
from kvbench.tasks.prompt import encode
from kvbench.tasks.reasoning.judge import RUNTIME, Graded, Judge

Template = Literal["plain", "chat"]
AnswerPart = Literal["all", "after_think"]  # what the grader sees
PLAIN = (
    "You are given a math problem.\n\nProblem: {question}\n\n You need to solve the problem step by step. First, you "
    "need to provide the chain-of-thought, then provide the final answer.\n\n Provide the final answer in the format: "
    "Final answer:  \\boxed{}"
)
CHAT = "{question}\nPlease reason step by step, and put your final answer within \\boxed{}."
NO_ANSWER = Graded(False, None)
INSTALL = "pip install -c constraints.txt -e '.[tasks]'"


def question_text(question: str, template: str) -> str:
    """The prompt, without what a chat template puts round it."""
    return "".join(question_parts(question, template))


def question_parts(question: str, template: str) -> tuple[str, str]:
    """The prompt up to the end of the question, and what follows it."""
    head, _, tail = (PLAIN if template == "plain" else CHAT).partition("{question}")
    return head + question, tail


def refuse_template(template: str, tokenizer: Any) -> None:
    """Raise `ConfigError` for a chat prompt where the model has no chat template."""
    if template == "chat" and not tokenizer.chat_template:
        raise ConfigError("task.template=chat needs a chat template, which this model has not; use task.template=plain")


# --- room --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Room:
    """How many tokens an answer may have."""

    usual: int  # where none are given
    given: int | None  # task.max_new_tokens
    total: int | None  # of prompt and answer together, as some scripts count
    window: int

    def new_tokens(self, id: str, n_prompt: int) -> int:
        """Tokens for the answer to a prompt of so many; `ConfigError` where the given ones do not fit."""
        room = self.window - n_prompt
        if self.given is not None and self.given > room:
            raise ConfigError(
                f"task.max_new_tokens={self.given} does not fit behind {id}, a prompt of {n_prompt} tokens, into the "
                f"window of {self.window}; give {max(room, 1)} or less"
            )
        if room < 1:
            raise ConfigError(
                f"{id}, a prompt of {n_prompt} tokens, leaves no room for an answer in the window of {self.window}; "
                "choose a model with a longer one"
            )
        longest = min(self.given or self.usual, room)
        return longest if self.total is None else max(1, min(longest, self.total - n_prompt))

    def notes(self, new_tokens: Sequence[int]) -> list[str]:
        """What the result says where answers may have fewer tokens than the task's limit."""
        if self.given is not None or not new_tokens or min(new_tokens) >= self.usual:
            return []
        return [f"answers end after {min(new_tokens)} to {max(new_tokens)} tokens at most, not {self.usual}"]


def n_tokens(tokenizer: Any, sample: Sample) -> int:
    """Number of tokens of a sample's prompt, chat template included."""
    return len(encode(tokenizer, sample, chat="auto", system_prompt="", scope="full_prompt"))


def fitted(tokenizer: Any, samples: Sequence[Sample], room: Room) -> tuple[list[Sample], list[str]]:
    """The samples with room for their answers, and the notes on it."""
    sizes = [room.new_tokens(sample.id, n_tokens(tokenizer, sample)) for sample in samples]
    return [replace(sample, max_new_tokens=n) for sample, n in zip(samples, sizes, strict=True)], room.notes(sizes)


# --- grades ------------------------------------------------------------------------------------


def graded_part(text: str, answer_part: str) -> str:
    """What a grader sees of an answer; nothing where it is what follows a thought, and the thought never ended."""
    if answer_part == "all":
        return text
    return text.rpartition(THOUGHT)[2] if THOUGHT in text else ""


def after_thought(text: str, answer_part: str) -> str:
    """An answer where a grader sees it."""
    return text if answer_part == "all" else f"{THOUGHT}{text}"


@cache
def worker() -> Judge:
    """The judge of all tasks of this process: a sweep has a task for each of its cells."""
    return Judge()


@dataclass
class Grading:
    """One grader and the part of an answer that it sees; the worker starts with the first answer."""

    grader: str
    answer_part: str
    judge: Judge = field(default_factory=worker)

    def graded(self, text: str, gold: str, **more: str) -> Graded:
        """The grader's verdict on an answer."""
        text = graded_part(text, self.answer_part)
        if not text.strip():
            return NO_ANSWER
        return self.judge.grade(self.grader, text, gold, **more)

    def verdict(self, text: str, gold: str, **more: str) -> tuple[float, dict[str, float | None]]:
        """1 where the answer is right; how many had none, and how many the grader did not finish."""
        graded = self.graded(text, gold, **more)
        no_answer = graded.predicted is None and graded.status == "ok"
        stopped = graded.status in ("timeout", "died")
        return float(graded.correct), {"no_answer": float(no_answer), "grader_stopped": float(stopped)}


def check_grader(grader: str) -> None:
    """Raise `ConfigError` for an unknown grader, or one whose package is not here."""
    if grader == "math_verify" and find_spec("math_verify") is None:
        raise ConfigError(f"task.grader=math_verify needs a package that is not here: {INSTALL}; or use rkv")


def grader_notes(grader: str, answer_part: str) -> list[str]:
    """Which grader judged, in which versions; other versions judge otherwise."""
    notes = [f"grader: {grader}"]
    if grader == "math_verify":
        runtime = "4.13" if RUNTIME.is_dir() else f"{release('antlr4-python3-runtime')}, which reads no per cent signs"
        notes = [f"grader: math-verify {release('math-verify')}, antlr {runtime}"]
    return notes + ([f"answer_part: {answer_part}"] if answer_part != "all" else [])


def release(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
