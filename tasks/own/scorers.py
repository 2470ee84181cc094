"""What an answer is worth by its text alone: the scorers that a task of the user's own names.

Each is 0 to 1 and takes the answer and all references of its row. They are the rules of the benchmarks here, so that a
new task is scored as a known one is.

Not here: scores with quirks of their authors, which stand with their benchmark (`tasks/longbench/scores.py`, …).
"""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvbench.tasks.longbench.scores import code_sim, normalised, qa_f1, qa_f1_zh, rouge, rouge_zh

NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")
LETTER = re.compile(r"\(([A-Z])\)|\b([A-Z])(?=[.):,\]]|\s*$)", re.MULTILINE)


def contains(prediction: str, references: Sequence[str]) -> float:
    """Whether any reference occurs, whatever the case."""
    return float(any(one.lower() in prediction.lower() for one in references))


def contains_all(prediction: str, references: Sequence[str]) -> float:
    """The share of references that occur, whatever the case."""
    return sum(one.lower() in prediction.lower() for one in references) / len(references)


def first_letter(text: str) -> str | None:
    """The first capital that stands in brackets, before a mark or at a line's end."""
    found = LETTER.search(text.replace("*", ""))
    return found and (found[1] or found[2])


def last_number(text: str) -> float | None:
    """The last number, commas out."""
    found = NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def same(read: Callable[[str], object]) -> Callable[[str, str], float]:
    """Whether the same is read in the answer as in the reference."""
    return lambda prediction, reference: float(read(prediction) == read(reference) is not None)


class Scorer(NamedTuple):
    of: Callable[[str, Sequence[str]], float]
    reads: Callable[[str], object] = str  # what it compares of a text; None where it finds nothing


def best(score: Callable[[str, str], float]) -> Callable[[str, Sequence[str]], float]:
    """The best of an answer's scores against each reference."""
    return lambda prediction, references: max(score(prediction, one) for one in references)


SCORERS = {  # docs/adding-a-task.md says what each is
    "exact": Scorer(best(same(normalised))),
    "contains": Scorer(contains),
    "contains_all": Scorer(contains_all),
    "f1": Scorer(best(qa_f1)),
    "f1_zh": Scorer(best(qa_f1_zh)),
    "rouge": Scorer(best(rouge)),
    "rouge_zh": Scorer(best(rouge_zh)),
    "choice": Scorer(best(same(first_letter)), first_letter),
    "number": Scorer(best(same(last_number)), last_number),
    "code": Scorer(best(code_sim)),
}
