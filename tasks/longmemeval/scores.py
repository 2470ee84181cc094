"""Whether an answer says a short fact, without a judge.

What counts of an answer is what stands behind `</think>`: the first line with something in it, and the next one where
that ends with a colon. It is compared as words: small letters, no punctuation, articles or possessive s; numbers by
value, `1,200.0` as `1200`, `three` as `3`.

a fact        stands in the answer word for word, and `not` doesn't stand before it.
a number      is the first one of the answer, years aside, and no range or list (`3 or 4`). With a unit (`7 days`) it is
              the only one with that unit, or stands without any.
abstention    one of the plain phrases that say that something isn't known (`UNKNOWN`).

An answer that says that it isn't known is wrong where it is known, whatever else it says. One that holds a value which
is known to be wrong (`rivals`), and not behind `not`, is wrong, too: so nobody is right who lists all that was told.

Not here: which questions this is fair to (`task.py`), a model as a judge (`chat_judge.py`).
"""

import re
import unicodedata
from collections.abc import Sequence

from kvbench.tasks.longbench.facts import TENS, UNITS

Words = Sequence[str]
LINES = 3  # of an answer at most
SMALL = {word: f"{n}" for n, word in enumerate(UNITS, 1)} | {
    word: f"{n}"
    for n, word in enumerate(
        ("ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
        10,
    )
} | {"zero": "0"}  # fmt: skip
ROUND = {word: n for n, word in enumerate(TENS, 2)}
ARTICLES = ("a", "an", "the")
PERIODS = ("second", "minute", "hour", "day", "week", "month", "year")
BETWEEN = ("or", "to", "and")  # two numbers
WORD = re.compile(r"[0-9]+(?:,[0-9]{3})*(?![0-9])(?:\.[0-9]+)?|[0-9]+|[^\W\d_]+(?:'[^\W\d_]+)*")
ALSO = re.compile(r"(?P<one>.+?)[.;]\s+(?P<other>.+?)\s+(?:is|are|would be) also (?:acceptable|correct)\W*", re.DOTALL)
NO = r"(?:n't| not| never)"
UNKNOWN = re.compile(
    rf"(?:do|does|did|have|has|had|could|would){NO}(?: \w+)? "
    r"(?:know|say|says|said|mention|mentioned|have|specify|specified|provide|provided|recall|remember|tell|told|contain"
    r"|state|stated|indicate|include|find|see|share|shared|give|given|talk|discuss|discussed|enough)\b"
    rf"|(?:is|are|was|were|been|be){NO}(?: \w+)? (?:mentioned|known|said|stated|specified|given|provided|told"
    r"|available|clear|discussed|recorded|included|shared|indicated|enough|possible|sure|able|aware|certain)\b"
    r"|\bnot (?:mentioned|known|said|stated|specified|given|provided|told|available|enough|sure|possible)\b"
    r"|\b(?:never|nowhere) (?:\w+ )?(?:mentioned|said|told|stated|discussed|specified|shared|given)\b"
    r"|\bno (?:\w+ )?(?:information|mention|record|idea|answer|way|data|details?|memory)\b"
    r"|\b(?:cannot|can't|can not|couldn't|could not) (?:\w+ )?(?:say|tell|answer|determine|know|find)\b"
    r"|\b(?:cannot|can't|can not|couldn't|could not) be (?:determined|known|answered|found|told)\b"
    r"|\b(?:unknown|unanswerable|unable to|insufficient|unclear|unspecified|no one knows|nothing (?:is|was) said)\b"
)


def head(answer: str) -> str:
    """The part of an answer that counts."""
    lines = [line.strip() for line in answer.rpartition("</think>")[2].splitlines() if line.strip()]
    n = next((i for i, line in enumerate(lines[:LINES], 1) if not line.endswith(":")), LINES)
    return "\n".join(lines[:n])


def plain(text: str) -> str:
    return unicodedata.normalize("NFKC", text).casefold().replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")


def words_of(text: str) -> list[str]:
    """The words of a text as they are compared."""
    found = list[str]()
    tens: int | None = None  # of a number of two words, whose first one stands last
    for word in WORD.findall(plain(text)):
        word = word.removesuffix("'s")
        unit = SMALL.get(word, "")
        if tens is not None and len(unit) == 1 and unit != "0":
            found[-1] = f"{tens}{unit}"
        elif word not in ARTICLES:
            found.append(f"{ROUND[word]}0" if word in ROUND else unit or number(word))
        tens = ROUND.get(word)
    return found


def number(word: str) -> str:
    """A number as its value is written; another word as it is."""
    if not word[0].isdigit():
        return word
    whole, _, part = word.replace(",", "").partition(".")
    whole, part = whole.lstrip("0") or "0", part.rstrip("0")
    return f"{whole}.{part}" if part else whole


def is_number(word: str) -> bool:
    return word[:1].isdigit()


def accepted(answer: str) -> tuple[str, ...]:
    """The answers that a published one allows: `7 days. 8 days (…) is also acceptable.` are two."""
    found = ALSO.fullmatch(answer.strip())
    return (answer,) if found is None else (found["one"], re.sub(r"\s*\([^()]*\)", "", found["other"]))


def says_unknown(text: str) -> bool:
    return bool(UNKNOWN.search(" ".join(plain(text).split())))


def stands_in(wanted: Words, words: Words) -> bool:
    """Whether these words stand in a text one behind the other, and nothing denies them."""
    n = len(wanted)
    return n > 0 and any(
        list(words[at : at + n]) == list(wanted) and not (at and denies(words[at - 1]))
        for at in range(len(words) - n + 1)
    )


def denies(word: str) -> bool:
    return word in ("not", "never", "nor") or word.endswith("n't")


def unit_of(word: str) -> str:
    return word.removesuffix("s")


def is_one_of_several(words: Words, at: int) -> bool:
    """Whether the number at this place is part of a range or a list."""
    after, before = words[at + 1 : at + 3], words[max(0, at - 2) : at][::-1]
    for side in (after, before):
        if side and (is_number(side[0]) or (len(side) == 2 and side[0] in BETWEEN and is_number(side[1]))):
            return True
    return False


def says_number(wanted: str, unit: str, words: Words) -> bool:
    """Whether a text says this number, of this unit where that is no empty text."""
    places = [
        i for i, word in enumerate(words)
        if is_number(word) and (not is_year(word) or is_year(wanted)) and not (i and denies(words[i - 1]))
    ]  # fmt: skip
    with_unit = [i for i in places if unit and i + 1 < len(words) and unit_of(words[i + 1]) == unit_of(unit)]
    if not with_unit and places:
        behind = unit_of(words[places[0] + 1]) if places[0] + 1 < len(words) else ""
        if unit and behind in PERIODS:
            return False
    counting = with_unit or places[:1]
    return bool(counting) and all(words[i] == wanted and not is_one_of_several(words, i) for i in counting)


def is_year(word: str) -> bool:
    return len(word) == 4 and word[:2] in ("19", "20")


def says(wanted: Words, words: Words) -> bool:
    """Whether a text says a fact, as words."""
    if len(wanted) <= 2 and is_number(wanted[0]) and not any(map(is_number, wanted[1:])):
        return says_number(wanted[0], "".join(wanted[1:]), words)
    return stands_in(wanted, words)


def score(answer: str, references: Sequence[str], rivals: Sequence[str], is_abstention: bool) -> float:
    """1 where the answer says one of the references and no rival, or that it isn't known where that is right."""
    text = head(answer)
    words = words_of(text)
    right = [found for one in references if (found := words_of(one))]
    wrong = [found for one in rivals if (found := words_of(one)) and found not in right]
    if any(stands_in(one, words) for one in wrong):
        return 0.0
    if is_abstention:
        return float(says_unknown(text))
    if says_unknown(text) and not any(map(says_unknown, references)):
        return 0.0
    return float(any(says(one, words) for one in right))
