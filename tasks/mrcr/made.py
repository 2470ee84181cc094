"""Dialogues of MRCR's kind: pieces that were asked for, several of them alike, and the i-th is wanted.

Pieces are consecutive sentences of the embedded prose, of which none is used twice.

Not here: how a dialogue becomes a prompt, and what an answer is worth (`task.py`).
"""

import random
import string
from collections.abc import Sequence
from dataclasses import dataclass

FORMATS = ("short story", "blog post", "song", "riddle", "letter", "speech", "recipe", "essay")
TOPICS = ("lanterns", "bridges", "oysters", "clocks", "meadows", "kites", "engines", "maps")
WORDS = (40, 200)  # of a piece, where nothing else is said
PREFIX = 10  # characters


@dataclass(frozen=True)
class Piece:
    format: str
    topic: str
    text: str


@dataclass(frozen=True)
class Dialogue:
    messages: tuple[dict[str, str], ...]  # the last one asks
    answer: str
    start: str  # with which an answer must begin
    n_alike: int
    wanted: int  # from 1
    place: int  # of the message that asks for the wanted piece


def dialogue(pieces: Sequence[Piece], format: str, topic: str, wanted: int, start: str) -> Dialogue:
    """All pieces one after the other, then the question."""
    messages = list[dict[str, str]]()
    for piece in pieces:
        a = "an" if piece.format[0] in "aeiou" else "a"
        messages.append({"role": "user", "content": f"write {a} {piece.format} about {piece.topic}"})
        messages.append({"role": "assistant", "content": piece.text})
    alike = [i for i, piece in enumerate(pieces) if (piece.format, piece.topic) == (format, topic)]
    asks = (
        f"Prepend {start} to the {ordinal(wanted)} (1 indexed) {format} about {topic}. Do not include any other "
        "text in your response."
    )
    messages.append({"role": "user", "content": asks})
    at = alike[wanted - 1]
    return Dialogue(tuple(messages), start + pieces[at].text, start, len(alike), wanted, 2 * at)


def ordinal(n: int) -> str:
    ends = {1: "st", 2: "nd", 3: "rd"}
    return f"{n}{'th' if 11 <= n % 100 <= 13 else ends.get(n % 10, 'th')}"


@dataclass(frozen=True)
class Question:
    """The piece that is wanted, and the beginning that an answer must have."""

    format: str
    topic: str
    wanted: int
    start: str


class Plan:
    """One dialogue that can be made of any number of words: more of them only add to its pieces.

    Every question has a piece of its own; of the kinds that are asked for there are `n_alike` pieces each.
    """

    def __init__(
        self, rng: random.Random, n_alike: int, sentences: Sequence[str], n_questions: int = 1,
        words: tuple[int, int] = WORDS,
    ) -> None:  # fmt: skip
        self.words = words
        kinds = [(rng.choice(FORMATS), rng.choice(TOPICS))]
        self.questions = [Question(*kinds[0], rng.randint(1, n_alike), start_of(rng))]
        if n_questions > 1:
            others = [(format, topic) for format in FORMATS for topic in TOPICS if (format, topic) != kinds[0]]
            kinds += rng.sample(others, -(-n_questions // n_alike) - 1)
            asked = (*kinds[0], self.questions[0].wanted)
            left = [(*kind, i) for kind in kinds for i in range(1, n_alike + 1) if (*kind, i) != asked]
            self.questions += [Question(*one, start_of(rng)) for one in rng.sample(left, n_questions - 1)]
        self.n_asked = n_alike * len(kinds)
        first = rng.randrange(len(sentences))
        texts = self.cut(rng, [*sentences[first:], *sentences[:first]])
        names = [kind for kind in kinds for _ in range(n_alike)] + [other(rng, kinds) for _ in texts[self.n_asked :]]
        self.pieces = [Piece(*name, text) for name, text in zip(names, texts, strict=True)]
        self.places = [rng.random() for _ in self.pieces]  # by which they are ordered

    def cut(self, rng: random.Random, sentences: Sequence[str]) -> list[str]:
        """All sentences as pieces, each of a drawn length or a little more."""
        pieces, piece, least = list[str](), list[str](), rng.randint(*self.words)
        for sentence in sentences:
            piece += sentence.split()
            if len(piece) >= least:
                pieces.append(" ".join(piece[: self.words[1]]))
                piece, least = [], rng.randint(*self.words)
        return pieces

    @property
    def fewest(self) -> int:
        """Words that it needs: the pieces that are alike, and one more."""
        return sum(len(piece.text.split()) for piece in self.pieces[: self.n_asked]) + self.words[0]

    @property
    def most(self) -> int:
        return sum(len(piece.text.split()) for piece in self.pieces)

    def of(self, words: int) -> list[Dialogue]:
        """The dialogue with so many words, once for each question.

        What is too short for a piece lengthens the one before it.
        """
        kept, places = list[Piece](), list[float]()
        for piece, place in zip(self.pieces, self.places, strict=True):
            text = piece.text.split()
            if words <= 0:
                break
            if words < min(len(text), self.words[0]) and kept:
                kept[-1] = Piece(kept[-1].format, kept[-1].topic, " ".join([kept[-1].text, *text[:words]]))
                break
            kept.append(Piece(piece.format, piece.topic, " ".join(text[:words])))
            places.append(place)
            words -= len(text)
        pieces = [kept[i] for i in sorted(range(len(kept)), key=lambda i: places[i])]
        return [dialogue(pieces, one.format, one.topic, one.wanted, one.start) for one in self.questions]


def start_of(rng: random.Random) -> str:
    return "".join(rng.choices(string.ascii_letters + string.digits, k=PREFIX))


def other(rng: random.Random, kinds: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """A format and a topic that are none of these kinds; half of the draws have one of the two as a kind has it."""
    while True:
        near = kinds[0] if len(kinds) == 1 else rng.choice(kinds)
        format = rng.choice([one for one in FORMATS if one != near[0]])
        topic = rng.choice([one for one in TOPICS if one != near[1]])
        found = rng.choice([(format, topic)] * 2 + [(near[0], topic), (format, near[1])])
        if found not in kinds:
            return found
