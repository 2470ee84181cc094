"""KVzip's check of an answer, which differs from SCBench's on the same data: for comparisons with KVzip's tables only.

Both texts are normalised: lower case, no punctuation, no articles, words from zero to nine as digits. The answer counts
where it holds the reference; some datasets have a rule of their own.

Not here: SCBench's own scorers (`scores.py`).
"""

from collections.abc import Callable
from typing import Any

from kvbench.tasks.infinitebench.scores import ARTICLES, PUNCTUATION, token_f1

DIGITS = {word: str(digit) for digit, word in enumerate("zero one two three four five six seven eight nine".split())}
END = "</s>"


def kvzip_score(dataset: str, prediction: str, reference: str, subtask: str | None = None) -> float:
    """0 to 1; `subtask` names the part of a mixed task that the turn belongs to."""
    prediction, name = prediction.removesuffix(END), subtask or dataset
    if not prediction.strip():
        return 0.0
    rule = next((rule for mark, rule in RULES.items() if mark in name), holds)
    return rule(prediction, reference)


def normal(text: str) -> str:
    """Words without case, punctuation and articles; numbers up to nine as digits."""
    bare = "".join(char for char in text.lower() if char not in PUNCTUATION)
    return " ".join(DIGITS.get(word, word) for word in ARTICLES.sub(" ", bare).split())


def holds(prediction: str, reference: str) -> float:
    return float(normal(reference) in normal(prediction))


def share_of_names(prediction: str, reference: str) -> float:
    """vt: share of the names between commas that stand in the answer as they are."""
    names = reference.split(", ")
    return sum(name in prediction for name in names) / len(names)


def is_same(prediction: str, reference: str) -> float:
    """mf: the same text."""
    return float(prediction == reference)


def same_label(prediction: str, reference: str) -> float:
    """many_shot: where both begin with a bracket the same letter in it, else the reference's text after its letter."""
    if prediction.startswith("(") and reference.startswith("("):
        given, wanted = (text.split("(")[1].split(")")[0] for text in (prediction, reference))
        return float(given == wanted)
    if reference.startswith("("):
        reference = reference.split(")")[1].strip()
    return holds(prediction, reference)


def first_line(prediction: str, reference: str) -> float:
    """choice: the first line alone."""
    return holds(prediction.split("\n")[0], reference)


def best_of_f1(prediction: str, reference: str) -> float:
    """qa_eng: F1 of words, or 1 where the reference is held."""
    f1 = token_f1(normal(prediction).split(), normal(reference).split())
    return max(f1, holds(prediction, reference))


def rouge_l(prediction: str, reference: str) -> float:
    """summary: ROUGE-L F of the `rouge` package."""
    from rouge import Rouge

    try:
        found: Any = Rouge().get_scores([prediction], [reference])
        return float(found[0]["rouge-l"]["f"])
    except (ValueError, RecursionError):  # no word in it, or thousands of them
        return 0.0


def holds_number(prediction: str, reference: str) -> float:
    """gsm: what follows the last "the answer is" holds the reference's number."""
    number = reference.strip().split("#### ")[-1]
    return float(number in prediction.strip().lower().split("the answer is ")[-1])


RULES: dict[str, Callable[[str, str], float]] = {  # by what a dataset's name holds, the first one that does
    "_vt": share_of_names,
    "_mf": is_same,
    "_many_shot": same_label,
    "summary": rouge_l,
    "qa_eng": best_of_f1,
    "choice_eng": first_line,
    "gsm": holds_number,
}
