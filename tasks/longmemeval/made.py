"""Rows of LongMemEval's layout that are drawn: a user tells small facts in small talk, and is asked for one later.

Small talk is sentences of the embedded prose. A fact stands in one message: what somebody's dog is called, that
somebody bought a kite today. Besides the user other people have such facts, so that the form of a statement doesn't
answer a question; with `task.others=0` there are none, which a small model answers better, and a guess among what was
told is right. By type, of three others:

single-session-user   told once by the user, and of three others: a guess among what was told is right once in four
knowledge-update      told and changed later by the user, and told of two others: once in four
multi-session         how many things the user bought, two to five, in six statements of which the others are somebody
                      else's: once in four
temporal-reasoning    days between two things that the user did, 2 to 21 by the dates of the sessions: once in twenty
abstention            told of four others and not by the user: who always says that it isn't known is right

Not here: how a row becomes a prompt (`task.py`).
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from itertools import pairwise
from typing import Any

from kvbench.tasks.longbench.facts import FIRST_NAMES, LAST_NAMES

THINGS = {
    "dog's name": FIRST_NAMES,
    "doctor's name": LAST_NAMES,
    "locker number": tuple(str(n) for n in range(113, 1000, 37)),
    "home town": ("Emden", "Leer", "Norden", "Aurich", "Varel", "Jever", "Esens", "Wittmund", "Papenburg", "Rhede"),
    "favorite fruit": ("mango", "plum", "cherry", "quince", "papaya", "grape", "melon", "apricot", "lychee", "pear"),
    "car's color": ("red", "green", "purple", "orange", "silver", "yellow", "brown", "turquoise", "white", "pink"),
    "instrument": ("cello", "oboe", "trumpet", "banjo", "harp", "piano", "bassoon", "ukulele", "tuba", "flute"),
    "job": ("baker", "pilot", "dentist", "plumber", "lawyer", "florist", "welder", "librarian", "surgeon", "tailor"),
}  # fmt: skip
OTHERS = ("sister", "neighbor", "boss", "cousin", "uncle", "landlord")
BOUGHT = ("kite", "teapot", "lantern", "chess set", "scarf", "globe", "tent", "violin", "rug", "vase")
EVENTS = (
    "planted the roses", "sold the old car", "finished the marathon", "visited the dentist", "painted the kitchen",
    "repaired the roof", "adopted the cat", "returned the library books", "baked the wedding cake", "cut the hedge",
)  # fmt: skip
OPENINGS = (
    "What do you have on this today?", "Tell me something new.", "Go on, please.", "And what else is there?",
    "I have a minute. What should I read?", "One more, please.", "Is there more to know?", "What comes next?",
)  # fmt: skip
REPLIES = ("Good to know.", "Thanks for telling me.", "I see.", "Noted.")
TYPES = ("single-session-user", "knowledge-update", "multi-session", "temporal-reasoning", "abstention")
COUNTS, DAYS = (2, 5), (2, 21)
FEWEST = 6  # sessions
MOST_OTHERS = 3
START = date(2023, 1, 9)
WEEKDAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
UNTOLD = "You did not tell me."


@dataclass(frozen=True)
class Told:
    """What the user says in a session."""

    session: int
    text: str
    is_evidence: bool
    place: float  # in the session's small talk, 0 to 1


@dataclass(frozen=True)
class Plan:
    """One row but for its small talk."""

    question: str
    cue: str  # with which the answer begins, for small models; it says nothing of the type
    answer: str
    rivals: tuple[str, ...]
    told: tuple[Told, ...]
    dates: tuple[date, ...]  # of the sessions


def placed(rng: random.Random, n_sessions: int, texts: Sequence[tuple[str, bool]]) -> tuple[Told, ...]:
    """Statements in their order, each in a session of its own."""
    places = sorted(rng.sample(range(n_sessions), len(texts)))
    return tuple(Told(at, text, is_own, rng.random()) for at, (text, is_own) in zip(places, texts, strict=True))


def drawn_dates(rng: random.Random, n: int, first: int = 0, second: int = 1, days: int = 0) -> tuple[date, ...]:
    """Dates of `n` sessions that differ, of which two are so many days apart; 0: as it comes."""
    steps = [rng.randint(1, 9) for _ in range(n - 1)]
    if days:
        between = [0, *sorted(rng.sample(range(1, days), second - first - 1)), days]
        steps[first:second] = [b - a for a, b in pairwise(between)]
    now, dates = START + timedelta(rng.randrange(300)), list[date]()
    for step in [0, *steps]:
        now += timedelta(step)
        dates.append(now)
    return tuple(dates)


def plan(rng: random.Random, kind: str, n_sessions: int, n_others: int = MOST_OTHERS) -> Plan:
    """A row of this type."""
    if kind == "multi-session":
        return count_plan(rng, n_sessions, n_others)
    if kind == "temporal-reasoning":
        return days_plan(rng, n_sessions, n_others)
    thing = rng.choice([*THINGS])
    values = rng.sample(THINGS[thing], 4)
    others = [
        f"By the way, my {other}'s {thing} is {value}."
        for other, value in zip(rng.sample(OTHERS, 4), values[::-1], strict=True)
    ]
    answer, rivals = values[0], values[1:]
    if kind == "abstention":
        texts, answer, rivals = [(text, False) for text in others[: n_others and n_others + 1]], UNTOLD, values
    elif kind == "single-session-user":
        texts = [(f"By the way, my {thing} is {answer}.", True), *((text, False) for text in others[:n_others])]
    else:
        texts = [
            (f"By the way, my {thing} has changed: now it is {answer}.", True),
            *((text, False) for text in others[: max(0, n_others - 1)]),
        ]
    rng.shuffle(texts)
    if kind == "knowledge-update":
        at = next(i for i, (_, is_own) in enumerate(texts) if is_own)
        texts.insert(rng.randint(0, at), (f"By the way, my {thing} is {values[1]}.", False))
    return Plan(
        f"What is my {thing}?",
        f"Your {thing} is",
        answer,
        tuple(rivals),
        placed(rng, n_sessions, texts),
        drawn_dates(rng, n_sessions),
    )


def count_plan(rng: random.Random, n_sessions: int, n_others: int) -> Plan:
    thing, other, n = rng.choice(BOUGHT), rng.choice(OTHERS), rng.randint(*COUNTS)
    texts = [(f"By the way, I bought a {thing} today.", True)] * n
    texts += [(f"By the way, my {other} bought a {thing} today.", False)] * (FEWEST - n if n_others else 0)
    rng.shuffle(texts)
    question = f"How many times did I say that I bought a {thing}?"
    return Plan(
        question, "The number of times is", str(n), (), placed(rng, n_sessions, texts), drawn_dates(rng, n_sessions)
    )


def days_plan(rng: random.Random, n_sessions: int, n_others: int) -> Plan:
    days = rng.randint(*DAYS)
    gap = rng.randint(1, min(days, n_sessions - 1))
    first = rng.randrange(n_sessions - gap)
    one, two, three = rng.sample(EVENTS, 3)
    free = [at for at in range(n_sessions) if at not in (first, first + gap)]
    told = [
        Told(first, f"By the way, today I {one}.", True, rng.random()),
        Told(first + gap, f"By the way, today I {two}.", True, rng.random()),
    ]
    if n_others:
        told.append(Told(rng.choice(free), f"By the way, today my {rng.choice(OTHERS)} {three}.", False, rng.random()))
    question = f"How many days passed between the day I {one} and the day I {two}?"
    return Plan(
        question, "The number of days is", f"{days} days", (), tuple(sorted(told, key=lambda one: one.session)),
        drawn_dates(rng, n_sessions, first, first + gap, days),
    )  # fmt: skip


def row(id: str, kind: str, plan: Plan, talk: Sequence[str]) -> dict[str, Any]:
    """The plan as a published row, with so many sentences of small talk, shared out to its sessions."""
    n_sessions = len(plan.dates)
    sessions: list[list[dict[str, Any]]] = []
    for at in range(n_sessions):
        said = [
            (OPENINGS[(i + i // n_sessions) % len(OPENINGS)], one, False)
            for i, one in enumerate(talk)
            if i % n_sessions == at
        ]
        for one in plan.told:
            if one.session == at:
                reply = REPLIES[at % len(REPLIES)]
                said.insert(round(one.place * len(said)), (one.text, reply, one.is_evidence))
        sessions.append([
            turn for ask, reply, has_answer in said for turn in (
                {"role": "user", "content": ask, "has_answer": has_answer},
                {"role": "assistant", "content": reply, "has_answer": False},
            )
        ])  # fmt: skip
    return {
        "question_id": f"{id}_abs" if kind == "abstention" else id,
        "question_type": "single-session-user" if kind == "abstention" else kind,
        "question": plan.question,
        "answer": plan.answer,
        "question_date": written(plan.dates[-1] + timedelta(1)),
        "haystack_session_ids": [f"{id}-{at}" for at in range(n_sessions)],
        "haystack_dates": [written(day) for day in plan.dates],
        "haystack_sessions": sessions,
        "answer_session_ids": [f"{id}-{at}" for at in sorted({one.session for one in plan.told if one.is_evidence})],
    }


def written(day: date) -> str:
    return f"{day:%Y/%m/%d} ({WEEKDAYS[day.weekday()]})"
