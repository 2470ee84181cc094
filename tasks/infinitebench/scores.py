"""InfiniteBench's scorers, with every quirk of the authors' own: published tables contain them.

Each takes a prediction and the row's reference as it is stored (types matter) and returns 0 to 1. Where the authors'
scorer raises, `checked_score` gives 0 and the name of what it raises.

Not here: which row belongs to which task, and the reference's form (`tasks/infinitebench/task.py`).
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

WORD_BREAKS = "\n:\"'.,?!{}"
ARTICLES = re.compile(r"\b(a|an|the)\b")
FIRST_NUMBER = re.compile(r"\d+\.\d+|\d+")
DIGITS = re.compile(r"[0-9]+")
CHOICE_CUES = ("answer is:", "answer:", "answer is", "option is")
DEBUG_CUES = ("answer is:", "is:", "answer:", "correct option is:")
# CJK punctuation of the authors' list; it has holes (U+FF0E, U+300A, U+3008, U+00B7), which stay.
CJK_RANGES = (
    *((0x2013, 0x2014), (0x2018, 0x2019), (0x201B, 0x201F), (0x2026, 0x2027), (0x3001, 0x3003)),
    *((0x300B, 0x3011), (0x3014, 0x301F), (0x3030, 0x3030), (0x303E, 0x303F), (0xFE4F, 0xFE4F)),
    *((0xFF01, 0xFF0D), (0xFF0F, 0xFF0F), (0xFF1A, 0xFF20), (0xFF3B, 0xFF40), (0xFF5B, 0xFF64)),
)
PUNCTUATION = set(string.punctuation)
CJK = PUNCTUATION | {chr(c) for first, last in CJK_RANGES for c in range(first, last + 1)}


def blanked(text: str, breaks: Iterable[str]) -> str:
    """`text` with each of these replaced by a blank, one after the other."""
    for part in breaks:
        text = text.replace(part, " ")
    return text


def squeezed(text: str) -> str:
    """Runs of blanks as one blank; other white space stays."""
    return re.sub(" {2,}", " ", text)


def first_of(truth: Any) -> Any:
    """A reference, or the first one of a list."""
    return truth[0] if isinstance(truth, list) else truth


def as_list(truth: Any) -> list[str]:
    """References as a list; a plain text would be read letter by letter."""
    return truth if isinstance(truth, list) else [truth]


def token_f1(prediction: Sequence[str], reference: Sequence[str]) -> float:
    """Harmonic mean of precision and recall over two bags of tokens."""
    common = (Counter(prediction) & Counter(reference)).total()
    if common == 0:
        return 0.0
    precision, recall = common / len(prediction), common / len(reference)
    return 2 * precision * recall / (precision + recall)


def normal_words(text: str) -> list[str]:
    """Lower case, ASCII punctuation deleted, articles blanked out, split."""
    text = "".join(char for char in text.lower() if char not in PUNCTUATION)
    return ARTICLES.sub(" ", text).split()


def normal_characters(text: str) -> str:
    """Lower case, ASCII and CJK punctuation and all white space deleted."""
    return "".join("".join(char for char in text.lower() if char not in CJK).split())


# --- one function per task ---------------------------------------------------------------------


def first_digits(prediction: str, truth: Any) -> float:
    """passkey, number_string: the first run of digits is the reference."""
    match = DIGITS.search(prediction)
    return float(first_of(truth) == (match.group() if match else ""))


def kv_retrieval(prediction: str, truth: Any) -> float:
    """The reference is one of the words; a list never is."""
    return float(truth in blanked(prediction, WORD_BREAKS).split())


def longdialogue_qa_eng(prediction: str, truth: Any) -> float:
    """The first name as it stands is one of the upper-cased words."""
    words = blanked(prediction.strip(), WORD_BREAKS).split()
    return float(first_of(truth) in [word.upper() for word in words])


def lenient_dialogue(prediction: str, truth: Any) -> float:
    """Any name occurs, whatever the case: what kvpress counts."""
    return float(any(name.lower() in prediction.lower() for name in as_list(truth)))


def longbook_choice_eng(prediction: str, truth: Any) -> float:
    """The option or its letter: by the first letter, else after the first cue, else by the first word of letters."""
    text, letter = truth
    prediction = prediction.strip()
    if not prediction:
        return 0.0
    if prediction[0] in "ABCD":
        return float(prediction[0] in (text, letter))
    if prediction in (text, letter):
        return 1.0
    prediction = squeezed(blanked(prediction, "\n\"'.,?!{}"))
    for cue in CHOICE_CUES:
        start = prediction.find(cue)
        if start >= 0:
            rest = prediction[start + len(cue) + 1 :]
            return float(bool(rest) and rest.startswith((text, letter)))
    for word in prediction.split():
        if word in "ABCD":
            return float(word in (text, letter))
    return 0.0


def longbook_qa_eng(prediction: str, truth: Any) -> float:
    """F1 over normalised words, the best of all references."""
    found = normal_words(prediction)
    return max((token_f1(found, normal_words(one)) for one in truth), default=0.0)


def longbook_qa_chn(prediction: str, truth: Any) -> float:
    """F1 over characters, the best of all references; no segmentation."""
    found = normal_characters(prediction)
    return max((token_f1(found, normal_characters(one)) for one in truth), default=0.0)


def longbook_sum_eng(prediction: str, truth: Any) -> float:
    """ROUGE-Lsum F by the `rouge-score` package, without stemming; the best of all references."""
    from rouge_score.rouge_scorer import RougeScorer  # loads NLTK, wanted by one scorer only

    scorer = RougeScorer(["rougeLsum"], use_stemmer=False)
    scores = [scorer.score(one, prediction)["rougeLsum"] for one in as_list(truth)]
    return float(max(score.fmeasure for score in scores))


def math_find(prediction: str, truth: Any) -> float:
    """The first number, as a number of the reference's type; raises where the authors' scorer does."""
    truth = first_of(truth)
    if not isinstance(truth, int | float):
        raise TypeError(f"the reference {truth!r} is no number")
    match = FIRST_NUMBER.search(prediction)
    return float(match is not None and type(truth)(match.group()) == truth)


def math_calc(prediction: str, truth: Any, drop_first: bool = False) -> float:
    """Share of the reference values before the first wrong one; raises where there is no list of them."""
    assert isinstance(truth, list), f"the reference {truth!r} is no list"
    values = truth[0] if isinstance(truth[0], list) else truth
    found = [int(run) for run in DIGITS.findall(prediction)][int(drop_first) :]
    right = 0
    while right < min(len(values), len(found)) and values[right] == found[right]:
        right += 1
    return right / len(values)


def code_run(prediction: str, truth: Any) -> float:
    """The last word is the reference, as a whole number."""
    words = blanked(prediction.strip(), "\n.`'\":").split()
    try:
        return float(bool(words) and int(words[-1]) == first_of(truth))
    except ValueError:
        return 0.0


def code_debug(prediction: str, truth: Any) -> float:
    """The letter with a full stop or colon in front, else letter or name after the first cue; a bare letter is 0."""
    name, letter = truth
    prediction = prediction.strip()
    if prediction[:2] in (f"{letter}.", f"{letter}:"):
        return 1.0
    prediction = squeezed(blanked(prediction, ("\n", *"`'\"-*", "Option", "option")))
    for cue in DEBUG_CUES:
        start = prediction.find(cue)
        if start >= 0:
            rest = prediction[start + len(cue) + 1 :]
            return float(bool(rest) and rest.startswith((letter, name)))
    return 0.0


SCORERS: dict[str, Callable[[str, Any], float]] = {
    "passkey": first_digits,
    "number_string": first_digits,
    "kv_retrieval": kv_retrieval,
    "longbook_sum_eng": longbook_sum_eng,
    "longbook_qa_eng": longbook_qa_eng,
    "longbook_choice_eng": longbook_choice_eng,
    "longdialogue_qa_eng": longdialogue_qa_eng,
    "longbook_qa_chn": longbook_qa_chn,
    "code_debug": code_debug,
    "code_run": code_run,
    "math_calc": math_calc,
    "math_find": math_find,
}


def checked_score(
    dataset: str,
    prediction: str,
    truth: Any,
    *,
    drop_first_number: bool = False,
    is_lenient: bool = False,
) -> tuple[float, str | None]:
    """The score, and what the authors' scorer raises on this row, if anything."""
    try:
        if dataset == "math_calc":
            return math_calc(prediction, truth, drop_first_number), None
        if dataset == "longdialogue_qa_eng" and is_lenient:
            return lenient_dialogue(prediction, truth), None
        return SCORERS[dataset](prediction, truth), None
    except (TypeError, ValueError, LookupError, ArithmeticError, AssertionError) as error:
        return 0.0, type(error).__name__
