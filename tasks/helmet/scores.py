"""HELMET's scores of its unjudged parts.

An answer is read after the first `prefix` up to its line's end, else it is its first line. Words are compared in small
letters, without punctuation, articles and double blanks. ICL takes the exact label of what was read alone; passages and
JSON values whatever holds the answer, in all of the text or in what was read; a ranking its NDCG at 10.

Not here: prompts (`task.py`).
"""

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

WITHOUT_ANSWER = ("yes", "no", "noanswer")  # share no words with another answer
RANKED = re.compile(r"\d+(?:\s*>\s*\d+)*")
TOP = 10


def read(text: str, prefix: str) -> str:
    """The part of an answer that counts."""
    found = re.search(rf"{re.escape(prefix)}(.*)(?:\n|$)", text, re.IGNORECASE)
    line = (found[1] if found else text.partition("\n")[0]).strip()
    return re.sub(f"^{re.escape(prefix)}", "", line, flags=re.IGNORECASE).strip()


def plain(text: str) -> str:
    text = "".join(one for one in text.lower() if one not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def exact(prediction: str, answer: str) -> float:
    return float(plain(prediction) == plain(answer))


def inside(prediction: str, answer: str) -> float:
    return float(plain(answer) in plain(prediction))


def f1(prediction: str, answer: str) -> float:
    ours, theirs = plain(prediction), plain(answer)
    if ours != theirs and (ours in WITHOUT_ANSWER or theirs in WITHOUT_ANSWER):
        return 0.0
    words, others = ours.split(), theirs.split()
    n = (Counter(words) & Counter(others)).total()
    return 2 * n / (len(words) + len(others)) if n else 0.0


def rouge(prediction: str, answer: str) -> Any:
    from rouge_score.rouge_scorer import RougeScorer  # loads NLTK, wanted by the cases only

    return RougeScorer(["rougeL"], use_stemmer=True).score(answer, prediction)["rougeL"]


METRICS: dict[str, Callable[[str, str], float]] = {
    "exact_match": exact,
    "f1": f1,
    "substring_exact_match": inside,
    "rougeL_f1": lambda prediction, answer: rouge(prediction, answer).fmeasure,
    "rougeL_recall": lambda prediction, answer: rouge(prediction, answer).recall,
}


def best(metric: str, prediction: str, answers: Any) -> float:
    """The highest value over all answers, which may be lists of names."""
    return max(METRICS[metric](prediction, one) for one in names(answers))


def names(answers: Any) -> Iterator[str]:
    if isinstance(answers, str):
        yield answers
    else:
        for one in answers:
            yield from names(one)


def score(kind: str, prediction: str, prefix: str, answers: Any) -> float:
    """The score by the part's own rule; `kind` is icl, qa or json_kv."""
    found = read(prediction, prefix)
    if kind == "icl":
        return best("exact_match", found, answers)
    return max(best("substring_exact_match", text, answers) for text in (prediction, found))


# --- rankings ----------------------------------------------------------------------------------


def rankings(text: str) -> dict[str, int]:
    """Ids with their points: the longest run of numbers between > counts, and of an id that comes twice the first."""
    text = re.sub(r"[\[\]:]", "", text).lower().replace("id", "")
    longest = max((found[0] for found in RANKED.finditer(text)), key=len, default="")
    ids = [one.strip() for one in longest.split(">")] if longest else [text]
    points = {one: len(ids) - i for i, one in reversed([*enumerate(ids)])}
    return {one: points[one] for one in dict.fromkeys(ids)}


def ndcg(points: Mapping[str, int], judged: Mapping[str, int]) -> float:
    """Gains as they were judged, by the logarithm of the place, against the best order of all that were judged."""
    order = sorted(points, key=lambda one: -points[one])
    best_gain = gain(sorted(judged.values(), reverse=True))
    return gain([judged.get(one, 0) for one in order]) / best_gain if best_gain else 0.0


def gain(judged: Sequence[int]) -> float:
    return math.fsum(one / math.log2(i + 2) for i, one in enumerate(judged[:TOP]))
