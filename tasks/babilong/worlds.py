"""Worlds of bAbI's kind for the tasks qa1 to qa10: facts, a question, its answer; and how facts get into a long text.

A world is drawn as sentences, and `answer` reads sentences, so that what is asked follows from what is written.

Differs     from bAbI: our own draws, with the same people, places, things and verbs everywhere.

Not here: prompts (`prompts.py`), where the long text comes from (`task.py`).
"""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvbench.tasks.babilong.scores import PLACES, THINGS

PEOPLE = ("Daniel", "John", "Mary", "Sandra")
MOVES = ("went to", "moved to", "journeyed to", "travelled to", "went back to")
TAKES = ("got", "grabbed", "took", "picked up")
DROPS = ("discarded", "dropped", "left", "put down")
GIFTS = ("gave", "passed", "handed")
OPPOSITE = {"north": "south", "south": "north", "east": "west", "west": "east"}
NUMBERS = ("none", "one", "two", "three")
EVENTS = {"qa2": (6, 20), "qa3": (10, 24), "qa5": (6, 20), "qa7": (5, 16), "qa8": (5, 16)}  # sentences of a world
MOVE = re.compile(rf"(\w+) (?:{'|'.join(MOVES)}) the (\w+)\.")
TAKE = re.compile(rf"(\w+) (?:{'|'.join(TAKES)}) the (\w+)(?: there)?\.")
DROP = re.compile(rf"(\w+) (?:{'|'.join(DROPS)}) the (\w+)(?: there)?\.")
GIVE = re.compile(rf"(\w+) (?:{'|'.join(GIFTS)}) the (\w+) to (\w+)\.")
AWAY = re.compile(r"(\w+) is (?:not|no longer) in the (\w+)\.")
EITHER = re.compile(r"(\w+) is either in the (\w+) or the (\w+)\.")
THERE = re.compile(r"(\w+) is in the (\w+)\.")
BESIDE = re.compile(r"The (\w+) is (\w+) of the (\w+)\.")


@dataclass
class World:
    """What sentences say, read one after the other."""

    place: dict[str, str] = field(default_factory=dict[str, str])  # of people, where it is known
    perhaps: dict[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])
    holds: dict[str, list[str]] = field(default_factory=dict[str, list[str]])  # things, in the order of taking
    trace: dict[str, list[str]] = field(default_factory=dict[str, list[str]])  # places that a thing came to
    gifts: list[tuple[str, str, str]] = field(default_factory=list[tuple[str, str, str]])  # giver, thing, taker
    beside: dict[tuple[str, str], str] = field(default_factory=dict[tuple[str, str], str])  # what is north of a place

    def read(self, fact: str) -> None:
        if found := MOVE.fullmatch(fact) or THERE.fullmatch(fact):
            self.place[found[1]] = found[2]
            self.perhaps.pop(found[1], None)
            for thing in self.holds.get(found[1], ()):
                self.at(thing, found[1])
        elif found := TAKE.fullmatch(fact):
            self.holds.setdefault(found[1], []).append(found[2])
            self.at(found[2], found[1])
        elif found := DROP.fullmatch(fact):
            self.holds[found[1]] = [one for one in self.holds.get(found[1], []) if one != found[2]]
            self.at(found[2], found[1])
        elif found := GIVE.fullmatch(fact):
            self.holds[found[1]] = [one for one in self.holds.get(found[1], []) if one != found[2]]
            self.holds.setdefault(found[3], []).append(found[2])
            self.gifts.append((found[1], found[2], found[3]))
            self.at(found[2], found[3])
        elif found := EITHER.fullmatch(fact):
            self.place.pop(found[1], None)
            self.perhaps[found[1]] = (found[2], found[3])
        elif found := AWAY.fullmatch(fact):
            if self.place.get(found[1]) == found[2]:
                del self.place[found[1]]
            elif found[2] in (either := self.perhaps.get(found[1], ())):
                del self.perhaps[found[1]]
                self.place[found[1]] = next(one for one in either if one != found[2])
        elif found := BESIDE.fullmatch(fact):
            self.beside[found[2], found[3]] = found[1]
            self.beside[OPPOSITE[found[2]], found[1]] = found[3]
        else:
            raise ValueError(f"{fact!r} is no fact of bAbI's kind")

    def at(self, thing: str, person: str) -> None:
        """The thing is where this person is."""
        place, seen = self.place.get(person), self.trace.setdefault(thing, [])
        if place is not None and seen[-1:] != [place]:
            seen.append(place)


def world_of(facts: Sequence[str]) -> World:
    world = World()
    for fact in facts:
        world.read(fact)
    return world


def answer(facts: Sequence[str], question: str) -> str | None:
    """The right answer by these facts; None where they do not say."""
    world = world_of(facts)
    return next((ask(world, found) for pattern, ask in ASKED if (found := pattern.fullmatch(question.strip()))), None)


def is_in(world: World, found: re.Match[str]) -> str:
    """Whether a person is at a place; no, where only another place is known, or that it is not this one."""
    if found[1] in world.perhaps:
        return "maybe" if found[2] in world.perhaps[found[1]] else "no"
    return "yes" if world.place.get(found[1]) == found[2] else "no"


def before(world: World, found: re.Match[str]) -> str | None:
    """Where a thing was before its last arrival at a place."""
    places = world.trace.get(found[1], [])
    last = max((i for i, place in enumerate(places) if place == found[2]), default=0)
    return places[last - 1] if last else None


def last_gift(world: World, at: int, **known: str) -> str | None:
    """Giver, thing or taker (0, 1, 2) of the last gift of which so much is known."""
    names = ("giver", "thing", "taker")
    fits = [gift for gift in world.gifts if all(gift[names.index(name)] == one for name, one in known.items())]
    return fits[-1][at] if fits else None


Ask = Callable[[World, re.Match[str]], str | None]
ASKED: tuple[tuple[re.Pattern[str], Ask], ...] = (
    (re.compile(r"Where is the (\w+)\?"), lambda world, found: (world.trace.get(found[1]) or [None])[-1]),
    (re.compile(r"Where is (\w+)\?"), lambda world, found: world.place.get(found[1])),
    (re.compile(r"Where was the (\w+) before the (\w+)\?"), before),
    (re.compile(r"What is (\w+) of the (\w+)\?"), lambda world, found: world.beside.get((found[1], found[2]))),
    (
        re.compile(r"What is the (\w+) (\w+) of\?"),
        lambda world, found: world.beside.get((OPPOSITE[found[2]], found[1])),
    ),
    (re.compile(r"Who gave the (\w+)\?"), lambda world, found: last_gift(world, 0, thing=found[1])),
    (
        re.compile(r"Who gave the (\w+) to (\w+)\?"),
        lambda world, found: last_gift(world, 0, thing=found[1], taker=found[2]),
    ),
    (re.compile(r"Who received the (\w+)\?"), lambda world, found: last_gift(world, 2, thing=found[1])),
    (
        re.compile(r"Who did (\w+) give the (\w+) to\?"),
        lambda world, found: last_gift(world, 2, giver=found[1], thing=found[2]),
    ),
    (
        re.compile(r"What did (\w+) give to (\w+)\?"),
        lambda world, found: last_gift(world, 1, giver=found[1], taker=found[2]),
    ),
    (re.compile(r"Is (\w+) in the (\w+)\?"), is_in),
    (
        re.compile(r"How many objects is (\w+) carrying\?"),
        lambda world, found: NUMBERS[len(world.holds.get(found[1], []))],
    ),
    (
        re.compile(r"What is (\w+) carrying\?"),
        lambda world, found: ",".join(world.holds.get(found[1], [])) or "nothing",
    ),
)


# --- draws -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    facts: tuple[str, ...]
    question: str
    answer: str


def draw(task: str, rng: random.Random) -> Asked:
    """A world of this task, and a question that its facts answer."""
    while True:
        facts = relations(rng) if task == "qa4" else story(task, rng)
        question = QUESTIONS[task](rng, world_of(facts))
        right = answer(facts, question) if question else None
        if question and right is not None:
            return Asked(tuple(facts), question, right)


def story(task: str, rng: random.Random) -> list[str]:
    """People who walk about, and in some tasks take, drop and give things."""
    facts, world = list[str](), World()

    def say(fact: str) -> None:
        facts.append(fact)
        world.read(fact)

    for _ in range(rng.randint(*EVENTS.get(task, (2, 14)))):
        person = rng.choice(PEOPLE)
        here, held = world.place.get(person), world.holds.get(person, [])
        free = [thing for thing in THINGS if not any(thing in holds for holds in world.holds.values())]
        chance = rng.random()
        if here is None or task not in EVENTS or chance < 0.5:
            say(moved(task, rng, person, here))
        elif free and chance < 0.75:
            near = [thing for thing in free if world.trace.get(thing, [here])[-1] == here]
            if near:
                say(f"{person} {rng.choice(TAKES)} the {rng.choice(near)} there.")
        elif held and (task in ("qa2", "qa3") or chance < 0.88):
            say(f"{person} {rng.choice(DROPS)} the {rng.choice(held)}.")
        elif held:
            others = [one for one in PEOPLE if one != person and world.place.get(one) in (here, None)]
            if others:
                say(f"{person} {rng.choice(GIFTS)} the {rng.choice(held)} to {rng.choice(others)}.")
    return facts


def moved(task: str, rng: random.Random, person: str, here: str | None) -> str:
    place = rng.choice([one for one in PLACES if one != here])
    if task == "qa9" and rng.random() < 0.35:
        return f"{person} is no longer in the {here}." if here else f"{person} is not in the {place}."
    if task == "qa10" and rng.random() < 0.4:
        return f"{person} is either in the {place} or the {rng.choice([one for one in PLACES if one != place])}."
    return f"{person} {rng.choice(MOVES)} the {place}."


def relations(rng: random.Random) -> list[str]:
    """Two facts about three places."""
    first, second, third = rng.sample(PLACES, 3)
    way = rng.choice(tuple(OPPOSITE))
    ends = (third, first) if rng.random() < 0.5 else (second, third)
    facts = [f"The {first} is {way} of the {second}.", f"The {ends[0]} is {way} of the {ends[1]}."]
    rng.shuffle(facts)
    return facts


def ask_place(rng: random.Random, world: World) -> str:
    """Yes and no alike often, as far as the facts allow; "" where they place nobody."""
    people = sorted({*world.place, *world.perhaps})
    if not people:
        return ""
    person = rng.choice(people)
    near = world.perhaps.get(person, ()) or ([world.place[person]] if person in world.place else [])
    return f"Is {person} in the {rng.choice(near) if near and rng.random() < 0.5 else rng.choice(PLACES)}?"


def ask_gift(rng: random.Random, world: World) -> str:
    if not world.gifts:
        return ""
    giver, thing, taker = rng.choice(world.gifts)
    forms = (f"Who gave the {thing}?", f"Who gave the {thing} to {taker}?", f"Who received the {thing}?",
             f"Who did {giver} give the {thing} to?", f"What did {giver} give to {taker}?")  # fmt: skip
    return rng.choice(forms)


def ask_before(rng: random.Random, world: World) -> str:
    long = [thing for thing, places in world.trace.items() if len(places) > 1]
    if not long:
        return ""
    thing = rng.choice(long)
    return f"Where was the {thing} before the {rng.choice(world.trace[thing][1:])}?"


def ask_beside(rng: random.Random, world: World) -> str:
    way, place = rng.choice(sorted(world.beside))
    return f"What is {way} of the {place}?" if rng.random() < 0.5 else f"What is the {place} {OPPOSITE[way]} of?"


Question = Callable[[random.Random, World], str]
QUESTIONS: dict[str, Question] = {
    "qa1": lambda rng, world: f"Where is {rng.choice(sorted(world.place) or ['Mary'])}?",
    "qa2": lambda rng, world: f"Where is the {rng.choice(sorted(world.trace) or ['milk'])}?",
    "qa3": ask_before,
    "qa4": ask_beside,
    "qa5": ask_gift,
    **dict.fromkeys(("qa6", "qa9", "qa10"), ask_place),
    "qa7": lambda rng, world: f"How many objects is {rng.choice(sorted(world.holds) or ['Mary'])} carrying?",
    "qa8": lambda rng, world: f"What is {rng.choice(sorted(world.holds) or ['Mary'])} carrying?",
}
MADE = tuple(sorted(QUESTIONS, key=lambda name: int(name[2:])))


# --- facts in a long text ----------------------------------------------------------------------

Tokens = Sequence[int]


def background(sentences: Sequence[Tokens], n_tokens: int) -> list[list[int]]:
    """Sentences in their order until there are so many tokens; the last one is cut."""
    kept, left = list[list[int]](), n_tokens
    for sentence in sentences:
        if left <= 0:
            break
        kept.append(list(sentence[:left]))
        left -= len(kept[-1])
    return kept


def mixed(sentences: Sequence[Tokens], facts: Sequence[Tokens], positions: Sequence[int]) -> list[int]:
    """All tokens, each fact before the sentence of its position; facts stay in their order."""
    ids = list[int]()
    for i in range(len(sentences) + 1):
        for fact, position in zip(facts, positions, strict=True):
            if position == i:
                ids += fact
        if i < len(sentences):
            ids += sentences[i]
    return ids
