"""What an answer to Oolong is worth, with the authors' quirks.

synth   what follows the last colon counts, so that a remark with a colon, or a time, loses the answer. Numbers give
        0.75 to the power of the difference. `ours=True` reads what follows the last of the asked words (Label, Answer,
        User, Date) up to its line's end, whatever the case, without a full stop.
real    the first box counts; of a list the share that was found, with no penalty for more.

Reference answers are texts such as `['entity']` or `[datetime.date(2023, 1, 5)]`; they are parsed and never evaluated.

Not here: what is right of drawn lists (`made.py`).
"""

import ast
import re
from dataclasses import dataclass
from datetime import datetime
from typing import Any

COMPARED = ("more common", "less common", "same frequency")
SHORT = 20  # characters, below which an answer counts as a whole
FADE = 0.75
DATE = re.compile(r"\[datetime\.date\((\d+), (\d+), (\d+)\)\]")
BOXES = (re.compile(r"\\boxed\{\\text\{([^}]*)\}\}"), re.compile(r"\\boxed\{+([^}]*)\}+"))
CUED = re.compile(r"(?:Label|Answer|User|Date):[ \t]*(.+)", re.IGNORECASE)
FURTHEST = 1000  # beyond this difference a power of 0.75 is nothing


@dataclass(frozen=True)
class Scored:
    parsed: Any
    confidence: str  # of the parse, as the authors call it: low, med, high, vhigh
    score: float


def truth_of(answer: str) -> Any:
    """The value of a synthetic row's answer; ValueError where it says nothing."""
    if found := DATE.fullmatch(answer.strip()):
        return datetime(*map(int, found.groups()))  # type: ignore[arg-type]
    try:
        content = ast.literal_eval(answer)
    except (SyntaxError, MemoryError, RecursionError, TypeError) as error:
        raise ValueError(str(error)) from None
    if not isinstance(content, list) or not content or isinstance(content[0], list | dict | set | tuple | bytes):
        raise ValueError("it is no list of one value")
    return content[0]


def synth(prediction: str, answer: str, answer_type: str, ours: bool = False) -> Scored:
    truth, (parsed, confidence) = truth_of(answer), read_ours(prediction) if ours else read(prediction)
    same = parsed.lower() == str(truth).lower() if ours else parsed == str(truth)
    if same:
        return Scored(parsed, confidence, 1.0)
    if parsed in COMPARED:
        return Scored(parsed, confidence, float(parsed in str(truth)))
    if answer_type.endswith("NUMERIC"):
        try:
            return Scored(parsed, confidence, faded(int(parsed) - int(truth)))
        except ValueError:
            return Scored(parsed, "low", 0.0)
    if answer_type.endswith("DATE"):
        from dateutil.parser import parse  # comes with pandas

        try:
            date = parse(parsed)
            return Scored(str(date), confidence, float(date == truth))
        except (ValueError, OverflowError, TypeError):
            return Scored(parsed, "low", 0.0)
    return Scored(parsed, confidence, 0.0)


def faded(difference: int) -> float:
    return FADE ** abs(difference) if abs(difference) < FURTHEST else 0.0


def read(prediction: str) -> tuple[str, str]:
    """The part of an answer that counts, and how sure that is."""
    if ":" not in prediction:
        words = prediction.split()
        return (prediction if len(prediction) < SHORT or not words else words[-1]), "low"
    text = re.sub(r"[*\[\]]", "", prediction.rpartition(":")[2].strip())
    if len(text) < SHORT:
        return text, "vhigh"
    confidence = "high" if re.search("User:|Answer:|Date:|Label", prediction) else "med"
    return next((one for one in COMPARED if one in text), text), confidence


def read_ours(prediction: str) -> tuple[str, str]:
    cued = CUED.findall(prediction)
    text = re.sub(r"[*\[\]]", "", cued[-1] if cued else prediction).strip().removesuffix(".").strip()
    return next((one for one in COMPARED if one in text.lower()), text), "high" if cued else "low"


def real(prediction: str, answer: str) -> Scored:
    found = next((found for box in BOXES if (found := box.search(prediction))), None)
    parsed = value_of(found[1]) if found else prediction
    truth, confidence = value_of(answer), "high" if found else "low"
    if isinstance(truth, int) and isinstance(parsed, int):
        score = faded(truth - parsed)
    elif isinstance(truth, str) and isinstance(parsed, str):
        score = float(truth.strip().lower() == parsed.strip().lower())
    elif isinstance(truth, list) and isinstance(parsed, list):
        score = len({*truth} & {*parsed}) / max(1, len({*truth}))
    else:
        score = 0.0
    return Scored(parsed, confidence, score)


def value_of(text: str) -> int | str | list[str]:
    """A number, a list between commas without what is blank, or the text."""
    try:
        return int(text)
    except ValueError:
        return [part.strip() for part in text.split(",") if part.strip()] if "," in text else text
