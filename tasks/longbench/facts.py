"""docs_facts: what is asked stands in the text in other words, and the answer does not stand there at all.

Between paragraphs of Python's help topics stand sixteen statements of one form about sixteen people who don't exist;
the question names one of them. It shares the name with the statement but no other word of meaning, and the answer has
another form than what the statement tells: digits for words, or words for digits. Two of the sixteen are asked and
answered before the question, so that a model sees the form. A copy from the text scores nothing; whoever knows the form
and takes the fact of any of the other fourteen people is right once in fourteen times.

Most embedded datasets are answered in the text's own words, which is what some methods keep tokens for. The five forms
are those of some fifteen that Qwen2.5-Coder-0.5B could answer with the whole cache: a trade for what somebody does, a
country for a city, a capital for a country or a decade for a year it answers by a copy.

Not here: the score (`fact` in `scores.py`), and how rows are numbered (`embedded.py`).
"""

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.tasks.longbench.scores import named

N_FACTS = 16  # statements in a context
N_SOLVED = 2  # of them, shown with their answers before a question
FIRST_NAMES = (
    "Mara", "Tobin", "Ilse", "Corwin", "Edda", "Jorun", "Petra", "Silas", "Wanda", "Bram", "Odile", "Fenton", "Greta",
    "Hollis", "Imre", "Kerstin", "Lorcan", "Nadia", "Oskar", "Rhona", "Stellan", "Thea", "Ulric", "Vesna",
)  # fmt: skip
LAST_NAMES = (
    "Quist", "Brask", "Tolland", "Varga", "Oakes", "Lindqvist", "Marlow", "Pryce", "Haddon", "Sorel", "Kessler",
    "Dunmore", "Abbot", "Falk", "Grimshaw", "Jessop", "Nyland", "Orlov", "Rusk", "Thorne", "Underhill", "Wexley",
    "Yarrow", "Zeller",
)  # fmt: skip
UNITS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth")
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
CENTURIES = {"seventeen": "17", "eighteen": "18", "nineteen": "19"}
Answers = tuple[str, ...]  # accepted spellings, the usual one first


@dataclass(frozen=True)
class Form:
    """Statements and questions that differ in their person alone."""

    says: str
    asks: str
    facts: Mapping[str, Answers]  # what a statement tells, and what is answered


def counted(units: Sequence[str]) -> dict[str, str]:
    """`forty-two: 42` and the other numbers of two words."""
    return {f"{ten}-{unit}": f"{i}{j}" for i, ten in enumerate(TENS, 2) for j, unit in enumerate(units, 1)}


NUMBERS = counted(UNITS)
HUNDREDS = {  # "six hundred and forty-two": 642
    f"{UNITS[i % 9]} hundred and {word}": f"{i % 9 + 1}{number}"
    for i, (word, number) in enumerate(NUMBERS.items(), 4)  # so that hundreds and units differ
}
YEARS = {  # "nineteen forty-two": 1942
    f"{list(CENTURIES)[i % 3]} {word}": f"{list(CENTURIES.values())[i % 3]}{number}"
    for i, (word, number) in enumerate(NUMBERS.items())
}
FORMS = (
    Form(
        "{name} owns {told} goats.",
        "How many animals are there on the farm of {name}? In digits:",
        {word: (number,) for word, number in NUMBERS.items()},
    ),
    Form(
        "In the race, {name} came in {told}.",
        "What was the rank of {name}? In digits:",
        {word: (number,) for word, number in counted(ORDINALS).items()},
    ),
    Form(
        "{name} pays a rent of {told}.",
        "How much does the flat of {name} cost? In digits:",
        {words: (number,) for words, number in HUNDREDS.items()},
    ),
    Form(
        "The house of {name} dates from {told}.",
        "When was the home of {name} built? In digits:",
        {words: (number,) for words, number in YEARS.items()},
    ),
    Form(
        "{name} won {told} games.",
        "How many victories does {name} have? Spelled out in words:",
        {number: (word, word.replace("-", "")) for word, number in NUMBERS.items()},
    ),
)


def pattern(form: Form) -> str:
    """A regular expression for the statements of a form: the person, and what is told."""
    facts = "|".join(map(re.escape, form.facts))
    return "^" + re.escape(form.says).replace(r"\{name\}", r"(\w+ \w+)").replace(r"\{told\}", f"({facts})") + "$"


def questions(context: str) -> list[dict[str, Any]]:
    """The fields of a row for each statement of a context, but for the people who come first in the alphabet.

    The questions on these stand solved before each of the others.
    """
    (form,) = (one for one in FORMS if re.search(pattern(one), context, re.MULTILINE))
    told = sorted(re.findall(pattern(form), context, re.MULTILINE))
    asked = [(f"Question: {form.asks.format(name=name)}", form.facts[fact]) for name, fact in told]
    solved = "".join(f"{question}\nAnswer: {answers[0]}\n\n" for question, answers in asked[:N_SOLVED])
    found = []
    for question, answers in asked[N_SOLVED:]:
        wrong = [one for spellings in form.facts.values() if spellings != answers for one in spellings]
        found.append({"input": solved + question, "answers": list(answers), "all_classes": wrong})
    return found


def statement_room(form: Form) -> int:
    """Characters that a context's statements take, about."""
    told = sum(map(len, form.facts)) // len(form.facts)
    return N_FACTS * (len(form.says) + told + len("Mara Quist"))


def scattered(rng: random.Random, form: Form, text: Sequence[str]) -> str:
    """Paragraphs with statements of a form between them, whose answers the paragraphs don't have."""
    there = named((one for answers in form.facts.values() for one in answers), "\n\n".join(text))
    free = [told for told, answers in form.facts.items() if there.isdisjoint(answers)]
    people = zip(rng.sample(FIRST_NAMES, N_FACTS), rng.sample(LAST_NAMES, N_FACTS), strict=True)
    parts = list(text)
    for person, told in zip(people, rng.sample(free, N_FACTS), strict=True):
        parts.insert(rng.randrange(len(parts)), form.says.format(name=" ".join(person), told=told))
    return "\n\n".join(parts)
