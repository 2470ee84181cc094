"""LongBench's scores: one prediction against one reference, 0 to 1, with the official scripts' quirks.

Backends    ROUGE-L is the package `rouge`'s (not Google's `rouge-score`), Chinese words are jieba's, code similarity is
            difflib's, or with `levenshtein` rapidfuzz's, as the official scorer gives where python-Levenshtein is
            installed. About one row in eight differs between the two.
Differs     `rouge` calls itself for every word of a sentence pair, and from some 990 on Python's recursion limit ends
            it; the official script takes that for a score of 0. Here the limit is lifted and the true value counted.
Quirks      kept, since published tables contain them: labels are removed from a list while it is walked
            (`classification`), the share of right numbers counts and not the first one (`number_share`), words are cut
            before punctuation is removed (`qa_f1_zh`).

Not here: which dataset takes which score (`tasks/longbench/task.py`).
"""

import re
import string
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import lru_cache, reduce
from math import fsum
from operator import add
from typing import Any

import numpy as np

from kvbench.engine.errors import ConfigError

ARTICLES = re.compile(r"\b(?:a|an|the)\b")
NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
# What counts as punctuation of Chinese text: inclusive ranges of code points, with the official script's holes.
CJK_PUNCTUATION = (
    *((0x2013, 0x2014), (0x2018, 0x2019), (0x201B, 0x201F), (0x2026, 0x2027), (0x3001, 0x3003)),
    *((0x300B, 0x3011), (0x3014, 0x301F), (0x3030, 0x3030), (0x303E, 0x303F), (0xFE4F, 0xFE4F)),
    *((0xFF01, 0xFF0D), (0xFF0F, 0xFF0F), (0xFF1A, 0xFF20), (0xFF3B, 0xFF40), (0xFF5B, 0xFF64)),
)
NO_CJK_PUNCTUATION = dict.fromkeys((code for first, last in CJK_PUNCTUATION for code in range(first, last + 1)), "")
LENGTHS = ("0-4k", "4-8k", "8k+")  # LongBench-E's buckets of words
BACKENDS = ("difflib", "levenshtein")
COMMENTS = ("`", "#", "//")
DENIALS = frozenset({"not", "never", "neither", "no"})
DEEP = 1_000_000  # calls; `rouge` makes one per word of a pair of sentences


# --- words -------------------------------------------------------------------------------------


def normalised(text: str) -> str:
    """Lower case, punctuation deleted (not replaced), articles out, single blanks."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(NO_PUNCTUATION)).split())


def normalised_zh(word: str) -> str:
    """Lower case, without any punctuation and white space."""
    return "".join(word.lower().translate(NO_PUNCTUATION).translate(NO_CJK_PUNCTUATION).split())


@lru_cache(maxsize=1)
def segmenter() -> Any:
    """jieba with its own dictionary.

    Its index is built here, in two seconds. jieba itself would keep it as a marshalled file in a folder that others
    can write to, and reading that back takes as long.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of old string literals, and of setuptools
            import jieba
    except ImportError as error:
        raise ConfigError(
            "the Chinese datasets are scored by the words that the package jieba finds, which is not installed; "
            "run pip install jieba, or leave these datasets out of task.datasets"
        ) from error
    jieba.setLogLevel("WARNING")
    words: Any = jieba.Tokenizer()
    words.FREQ, words.total = words.gen_pfdict(words.get_dict_file())
    words.initialized = True
    return words


def words_zh(text: str) -> list[str]:
    """The words of a Chinese text, punctuation included."""
    return list(segmenter().cut(text))


def spoken(text: str) -> list[str]:
    """Words and numbers in lower case, without articles; punctuation parts them."""
    return [word for word in re.findall(r"[^\W_]+", text.lower()) if not ARTICLES.fullmatch(word)]


def named(answers: Iterable[str], text: str) -> set[str]:
    """Answers whose words a text has in a row, in whatever case and with whatever between them."""
    words = f" {' '.join(spoken(text))} "
    return {answer for answer in answers if f" {' '.join(spoken(answer))} " in words}


# --- scores ------------------------------------------------------------------------------------


def f1(prediction: Sequence[str], reference: Sequence[str]) -> float:
    """Harmonic mean of the shares of words that both have; 0 where they have none, even if both are empty."""
    same = sum((Counter(prediction) & Counter(reference)).values())
    if same == 0:
        return 0.0
    precision, recall = same / len(prediction), same / len(reference)
    return 2 * precision * recall / (precision + recall)


def qa_f1(prediction: str, reference: str) -> float:
    """F1 over normalised words."""
    return f1(normalised(prediction).split(), normalised(reference).split())


def qa_f1_zh(prediction: str, reference: str) -> float:
    """F1 over jieba's words, each normalised after the text was cut into them."""
    sides = ([normalised_zh(word) for word in words_zh(text)] for text in (prediction, reference))
    return f1(*([word for word in side if word] for side in sides))


@contextmanager
def deep_recursion() -> Iterator[None]:
    """Allow more calls within calls than Python does by default; they are Python's own and take no stack of C."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, DEEP))
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)


def rouge(prediction: str, reference: str) -> float:
    """ROUGE-L F of the package `rouge`; 0 where a side has no words, on which the package raises."""
    from rouge import Rouge

    with deep_recursion():
        try:
            scores = Rouge(metrics=["rouge-l"]).get_scores([prediction], [reference], avg=True)
        except ValueError:  # "Hypothesis is empty", or the reference
            return 0.0
    return float(scores["rouge-l"]["f"])  # type: ignore[index, call-overload]


def rouge_zh(prediction: str, reference: str) -> float:
    """`rouge` over jieba's words."""
    return rouge(" ".join(words_zh(prediction)), " ".join(words_zh(reference)))


def classification(prediction: str, reference: str, all_classes: Sequence[str]) -> float:
    """One over the number of labels that the prediction names, if the right one is among them.

    Labels that are part of the right one do not count, but the list shrinks while it is walked: the label after a
    removed one is not looked at.
    """
    named = [label for label in all_classes if label in prediction]
    for label in named:
        if label in reference and label != reference:
            named.remove(label)
    return 1.0 / len(named) if reference in named else 0.0


def number_share(prediction: str, number: str) -> float:
    """Share of the prediction's numbers that are this one, written the same way."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(number) / len(numbers) if numbers else 0.0


def retrieval(prediction: str, reference: str, word: str = "Paragraph ") -> float:
    """`number_share` of the number in `Paragraph 7`."""
    match = re.search(rf"{word}(\d+)", reference)
    return number_share(prediction, match.group(1)) if match else 0.0


def retrieval_zh(prediction: str, reference: str) -> float:
    """`number_share` of the number of a Chinese paragraph."""
    return retrieval(prediction, reference, "段落")


def count(prediction: str, reference: str) -> float:
    """`number_share` of the reference itself."""
    return number_share(prediction, str(reference))


def code_sim(prediction: str, reference: str, backend: str = "difflib") -> float:
    """Similarity of the first line that is code to the reference, nothing stripped, in whole percents."""
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in COMMENTS)), "")
    if line == reference:
        return 1.0
    if not line or not reference:
        return 0.0
    if backend == "levenshtein":
        from rapidfuzz.distance import Indel

        ratio = Indel.normalized_similarity(line, reference)
    else:
        ratio = SequenceMatcher(None, line, reference).ratio()
    return round(100 * ratio) / 100


def fact(prediction: str, reference: str, all_classes: Sequence[str]) -> float:
    """1 where the prediction has the words of the reference in a row, and names no other fact or number besides it.

    `all_classes` are the other facts. Case, punctuation and articles don't count; a denial does.
    """
    words = spoken(prediction)
    is_wrong = bool(named(all_classes, prediction)) or not DENIALS.isdisjoint(words)
    if any(char.isdigit() for char in reference):
        others = set(re.findall(r"\d+", " ".join(words))) - set(re.findall(r"\d+", reference))
        is_wrong = is_wrong or bool(others)
    return float(bool(named([reference], prediction)) and not is_wrong)


@dataclass(frozen=True)
class Score:
    """A metric by its name in tables."""

    of: Callable[..., float]
    needs_classes: bool = False
    needs_backend: bool = False
    needs_jieba: bool = False


SCORES = {
    "qa_f1": Score(qa_f1),
    "qa_f1_zh": Score(qa_f1_zh, needs_jieba=True),
    "rouge": Score(rouge),
    "rouge_zh": Score(rouge_zh, needs_jieba=True),
    "classification": Score(classification, needs_classes=True),
    "retrieval": Score(retrieval),
    "retrieval_zh": Score(retrieval_zh),
    "count": Score(count),
    "fact": Score(fact, needs_classes=True),
    "code_sim": Score(code_sim, needs_backend=True),
}


# --- rows and datasets -------------------------------------------------------------------------


def first_line(prediction: str) -> str:
    """The text before the first newline that is not at the very start; blanks are kept."""
    return prediction.lstrip("\n").split("\n")[0]


def row_score(
    metric: str, prediction: str, references: Sequence[str], *,
    all_classes: Sequence[str] | None = None, one_line: bool = False, backend: str = "difflib",
) -> float:  # fmt: skip
    """The best of a prediction's scores against each reference."""
    score = SCORES[metric]
    extra: dict[str, Any] = {"all_classes": all_classes or ()} if score.needs_classes else {}
    extra |= {"backend": backend} if score.needs_backend else {}
    prediction = first_line(prediction) if one_line else prediction
    return max((score.of(prediction, one, **extra) for one in references), default=0.0)


def percent(scores: Sequence[float]) -> float | None:
    """A dataset's score as printed, 0 to 100 with two decimals; None of no rows.

    Added one after the other as in the official script: near a tie Python 3.12's `sum`, which makes up for what each
    addition rounds off, prints another last digit.
    """
    return round(100 * reduce(add, scores, 0.0) / len(scores), 2) if scores else None


def by_length(scores: Sequence[float], lengths: Sequence[int]) -> dict[str, float | None]:
    """LongBench-E's three scores, by the rows' own lengths (words, not tokens).

    numpy's mean and rounding, as in the official script: near a tie Python's, which the whole dataset's score takes,
    print another last digit.
    """
    buckets: dict[str, list[float]] = {name: [] for name in LENGTHS}
    for score, length in zip(scores, lengths, strict=True):
        buckets["0-4k" if length < 4000 else "4-8k" if length < 8000 else "8k+"].append(score)
    return {name: float(np.round(100 * np.mean(bucket), 2)) if bucket else None for name, bucket in buckets.items()}


def mean_of(values: Sequence[float]) -> float | None:
    """A mean of scores that are rounded already, rounded again, as tables print it."""
    return round(fsum(values) / len(values), 2) if values else None


def official_gives_up(metric: str, prediction: str, references: Sequence[str]) -> bool:
    """Whether the official script may score 0 here, where a pair of sentences has some 990 words or more."""
    if "rouge" not in metric:
        return False
    cut = (lambda text: " ".join(words_zh(text))) if metric == "rouge_zh" else str

    def longest(text: str) -> int:
        return max(len(sentence.split()) for sentence in cut(text).split("."))

    return any(longest(prediction) + longest(one) >= 990 for one in references)
