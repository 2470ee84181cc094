"""Lists of Oolong's kind: dated lines of users with labels, and questions on all of them.

Not here: scores (`scores.py`).
"""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any

LABELS = ("abbreviation", "description", "entity", "human being", "location", "numeric value")
KINDS = ("most", "least", "count", "compare", "user", "date", "n_labels_at_least")
TYPES = {
    "most": "LABEL", "least": "LABEL", "count": "NUMERIC", "compare": "COMPARISON", "user": "USER", "date": "DATE",
    "n_labels_at_least": "NUMERIC",
}  # fmt: skip
FIRST_DAY = date(2024, 1, 1)
TRIES = 1000  # more than there are questions of a kind that differ
Question = Mapping[str, Any]


@dataclass(frozen=True)
class Line:
    date: str
    user: int
    label: str
    text: str

    def __str__(self) -> str:
        return f"Date: {self.date} || User: {self.user} || Instance: {self.text} || Label: {self.label}"


def answer(lines: Sequence[Line], question: Question) -> Any:
    """The right answer; None where two would be."""
    kept = [
        line for line in lines
        if question.get("user") in (None, line.user)
        and line.date < question.get("before", "9")
        and line.date >= question.get("from", "0")
    ]  # fmt: skip
    labels, kind = Counter(line.label for line in kept), question["kind"]
    if kind == "count":
        return labels[question["label"]]
    if kind == "n_labels_at_least":
        return sum(n >= question["n"] for n in labels.values())
    if kind == "compare":
        a, b = labels[question["a"]], labels[question["b"]]
        return "more common" if a > b else "less common" if a < b else "same frequency"
    if kind == "most":
        return first(labels, 1)
    if kind == "least":
        return first({label: labels[label] for label in question["labels"]}, -1)
    if kind == "user":
        return first(Counter(line.user for line in kept if line.label == question["label"]), 1)
    return first(Counter(line.date for line in kept), 1)


def first(counts: Mapping[Any, int], sign: int) -> Any:
    """The value that is counted most often, or least; None where several are."""
    ranked = sorted(counts, key=lambda one: -sign * counts[one])
    is_tie = not ranked or (len(ranked) > 1 and counts[ranked[0]] == counts[ranked[1]])
    return None if is_tie else ranked[0]


def draw_lines(rng: random.Random, n: int, sentences: Sequence[str]) -> list[Line]:
    """The first `n` lines: more of them begin as fewer do."""
    users = [rng.randint(10_000, 99_999) for _ in range(6)]
    weights, days = [rng.random() + 0.2 for _ in LABELS], [rng.randrange(180) for _ in range(40)]
    start = rng.randrange(len(sentences))
    return [
        Line(
            (FIRST_DAY + timedelta(rng.choice(days))).isoformat(), rng.choice(users), rng.choices(LABELS, weights)[0],
            " ".join(sentences[(start + i) % len(sentences)].split()[:12]),
        )
        for i in range(n)
    ]  # fmt: skip


def draw(rng: random.Random, lines: Sequence[Line], kind: str) -> tuple[Question, Any] | None:
    """A question of this kind with one right answer; None where short lists have ties alone."""
    for _ in range(TRIES):
        question: dict[str, Any] = {"kind": kind}
        if kind in ("count", "user"):
            question["label"] = rng.choice(LABELS)
        if kind == "least":
            question["labels"] = rng.sample(LABELS, rng.randint(2, len(LABELS)))
        if kind == "compare":
            question["a"], question["b"] = rng.sample(LABELS, 2)
        if kind == "n_labels_at_least":
            question["n"] = rng.randint(1, max(2, len(lines) // 4))
        if kind != "user" and rng.random() < 0.3:
            question["user"] = rng.choice(lines).user
        if kind != "date" and rng.random() < 0.3:
            question[rng.choice(("before", "from"))] = f"2024-0{rng.randint(2, 5)}-01"
        right = answer(lines, question)
        if right is not None:
            return question, right
    return None


def asks(question: Question) -> str:
    """The question in words, with how to answer."""
    of = f" of user {question['user']}" if "user" in question else ""
    when = "".join(f" {word} {question[word]}" for word in ("before", "from") if word in question)
    scope = f"Among the lines{of}{' dated' if when else ''}{when}{' on' if 'from' in question else ''}"
    kind = question["kind"]
    words = {
        "most": "which label is the most frequent one? Give your final answer in the form 'Label: answer'.",
        "least": f"which of the labels {', '.join(question.get('labels', ()))} is the least frequent one, counting "
                 "also those that never come? Give your final answer in the form 'Label: answer'.",
        "count": f"how many have the label {question.get('label')}? Give your final answer in the form 'Answer: "
                 "number'.",
        "compare": f"is {question.get('a')} more common than, less common than, or the same frequency as "
                   f"{question.get('b')}? Give your final answer in the form 'Answer: more common', 'Answer: less "
                   "common' or 'Answer: same frequency'.",
        "user": f"which user has the most with the label {question.get('label')}? Give your final answer in the form "
                "'User: answer'.",
        "date": "which date comes most often? Give your final answer in the form 'Date: YYYY-MM-DD'.",
        "n_labels_at_least": f"how many labels come at least {question.get('n')} times? Give your final answer in the "
                             "form 'Answer: number'.",
    }  # fmt: skip
    return f"{scope}, {words[kind]}"


def written(kind: str, right: Any) -> str:
    """The answer as a row of Oolong has it."""
    if kind == "date":
        day = date.fromisoformat(right)
        return f"[datetime.date({day.year}, {day.month}, {day.day})]"
    return f"[{right!r}]"
