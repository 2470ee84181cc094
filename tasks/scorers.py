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


def exact(prediction: str, reference: str) -> float:
    return float(normalised(prediction) == normalised(reference))


def choice(prediction: str, reference: str) -> float:
    """The first letter that stands in brackets, before a mark or at a line's end."""
    found = LETTER.search(prediction.replace("*", ""))
    return float(found is not None and (found[1] or found[2]) == reference.strip("() .").upper())


def number(prediction: str, reference: str) -> float:
    """The last number of both, commas out."""
    ours, theirs = last_number(prediction), last_number(reference)
    return float(ours is not None and ours == theirs)


def last_number(text: str) -> float | None:
    found = NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


class Scorer(NamedTuple):
    of: Callable[[str, Sequence[str]], float]
    says: str  # as pages print it


def best(score: Callable[[str, str], float]) -> Callable[[str, Sequence[str]], float]:
    """The best of an answer's scores against each reference."""
    return lambda prediction, references: max(score(prediction, one) for one in references)


SCORERS = {
    "exact": Scorer(best(exact), "it is a reference, but for case, punctuation, articles and blanks"),
    "contains": Scorer(contains, "a reference occurs in it, whatever the case"),
    "contains_all": Scorer(contains_all, "the share of references that occur in it"),
    "f1": Scorer(best(qa_f1), "F1 over words"),
    "f1_zh": Scorer(best(qa_f1_zh), "F1 over Chinese words (needs jieba)"),
    "rouge": Scorer(best(rouge), "ROUGE-L F"),
    "rouge_zh": Scorer(best(rouge_zh), "ROUGE-L F over Chinese words (needs jieba)"),
    "choice": Scorer(best(choice), "its first letter, as in `(B)`, `B.` or `B`, is the reference"),
    "number": Scorer(best(number), "its last number is the reference's"),
    "code": Scorer(best(code_sim), "how similar its first line of code is"),
}
