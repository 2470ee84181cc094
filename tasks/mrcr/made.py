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
WORDS = (40, 200)  # of a piece
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

    @property
    def n_chars(self) -> int:
        return sum(len(message["content"]) for message in self.messages)


def dialogue(pieces: Sequence[Piece], format: str, topic: str, wanted: int, start: str) -> Dialogue:
    """All pieces one behind the other, then the question."""
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


class Plan:
    """One dialogue that can be made of any number of words: more of them only add to its pieces."""

    def __init__(self, rng: random.Random, n_alike: int, sentences: Sequence[str]) -> None:
        self.n_alike = n_alike
        self.format, self.topic = rng.choice(FORMATS), rng.choice(TOPICS)
        self.wanted = rng.randint(1, n_alike)
        self.start = "".join(rng.choices(string.ascii_letters + string.digits, k=PREFIX))
        first = rng.randrange(len(sentences))
        texts = self.cut(rng, [*sentences[first:], *sentences[:first]])
        names = [(self.format, self.topic)] * n_alike + [self.other(rng) for _ in texts[n_alike:]]
        self.pieces = [Piece(*name, text) for name, text in zip(names, texts, strict=True)]
        self.places = [rng.random() for _ in self.pieces]  # by which they are ordered

    def cut(self, rng: random.Random, sentences: Sequence[str]) -> list[str]:
        """All sentences as pieces, each of a drawn length or a little more."""
        pieces, piece, least = list[str](), list[str](), rng.randint(*WORDS)
        for sentence in sentences:
            piece += sentence.split()
            if len(piece) >= least:
                pieces.append(" ".join(piece[: WORDS[1]]))
                piece, least = [], rng.randint(*WORDS)
        return pieces

    def other(self, rng: random.Random) -> tuple[str, str]:
        """Another format, another topic, or both: half of them have one of the two."""
        format = rng.choice([one for one in FORMATS if one != self.format])
        topic = rng.choice([one for one in TOPICS if one != self.topic])
        return rng.choice([(format, topic)] * 2 + [(self.format, topic), (format, self.topic)])

    @property
    def fewest(self) -> int:
        """Words that it needs: the pieces that are alike, and one more."""
        return sum(len(piece.text.split()) for piece in self.pieces[: self.n_alike]) + WORDS[0]

    @property
    def most(self) -> int:
        return sum(len(piece.text.split()) for piece in self.pieces)

    def of(self, words: int) -> Dialogue:
        """The dialogue with so many words; what is too short for a piece lengthens the one before it."""
        kept, places = list[Piece](), list[float]()
        for piece, place in zip(self.pieces, self.places, strict=True):
            text = piece.text.split()
            if words <= 0:
                break
            if words < min(len(text), WORDS[0]) and kept:
                kept[-1] = Piece(kept[-1].format, kept[-1].topic, " ".join([kept[-1].text, *text[:words]]))
                break
            kept.append(Piece(piece.format, piece.topic, " ".join(text[:words])))
            places.append(place)
            words -= len(text)
        order = sorted(range(len(kept)), key=lambda i: places[i])
        return dialogue([kept[i] for i in order], self.format, self.topic, self.wanted, self.start)
