"""Several questions on one context of LongBench.

Published datasets have rows with one context and different questions; those stand together. The contexts of the
embedded set have one question each, and further ones are drawn from the same text here.

Not here: the rows themselves (`embedded.py`), prompts (`prompts.py`).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvbench.tasks.longbench.datasets import EMBEDDED
from kvbench.tasks.longbench.embedded import drawn, sentences
from kvbench.tasks.longbench.facts import questions

Row = Mapping[str, Any]
PASSAGE = re.compile(r"^The module (\w+): (.+)$", re.MULTILINE)
NUMBERED = re.compile(r"^(.+) \[Paragraph (\d+)\]$", re.MULTILINE)
# Published datasets in which several rows have one context.
SHARED = ("narrativeqa", "qasper", "multifieldqa_en", "multifieldqa_zh")


def by_context(name: str, rows: Sequence[Row], n: int) -> list[list[Row]]:
    """Up to `n` rows for each context, in the order in which contexts appear."""
    if name in EMBEDDED:
        return [[row, *more_of(name, row)][:n] for row in rows]
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["context"], []).append(row)
    return [group[:n] for group in groups.values()]


def more_of(name: str, row: Row) -> list[Row]:
    """Other questions on the context of an embedded row, in an order of their own."""
    found = QUESTIONS[name](row["context"])
    others = [one for one in found if one["input"] != row["input"]]
    drawn(f"{name} questions", len(row["context"])).shuffle(others)
    return [{**row, **one, "_id": f"{row['_id']}-{i}"} for i, one in enumerate(others, start=1)]


def asking(question: str, answer: str) -> Row:
    """The fields of a row that are a question's own."""
    return {"input": question, "answers": [answer]}


def endings(context: str) -> list[Row]:
    """The first eight words of sentences that begin like no other, and the rest."""
    found = []
    for sentence in (one for paragraph in context.split("\n\n") for one in sentences(paragraph)):
        words = sentence.split()
        opening = " ".join(words[:8])
        if 14 <= len(words) <= 26 and context.count(opening) == 1:
            found.append(asking(opening, " ".join(words[8:])))
    return found


def purposes(context: str) -> list[Row]:
    """Modules, and what each is for."""
    return [asking(*one) for one in PASSAGE.findall(context)]


def numbers(context: str) -> list[Row]:
    """The last sentence of each paragraph, and its number."""
    ends = ((sentences(text)[-1], number) for text, number in NUMBERED.findall(context))
    return [asking(end, f"Paragraph {number}") for end, number in ends if 40 <= len(end) <= 160]


QUESTIONS: dict[str, Callable[[str], Sequence[Row]]] = {
    "docs_qa": endings,
    "docs_multi_qa": purposes,
    "docs_retrieval": numbers,
    "docs_facts": questions,
}
WITH_QUESTIONS = (*SHARED, *QUESTIONS)


def has_questions(name: str) -> bool:
    """Whether a dataset has several questions for a context."""
    return name in WITH_QUESTIONS


def history_of(name: str, reference: str) -> str:
    """What later turns find as a turn's answer: what continues the prompt."""
    if name == "docs_retrieval":
        return f" {reference.removeprefix('Paragraph ')}]"
    return f" {reference}" if name in EMBEDDED else reference
