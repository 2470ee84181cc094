"""Prompts that share text, so that a prefix cache has something to find: `Texts`.

A prompt is a row of blocks (`traces.py`). A block's name draws its text from Python's help topics, so that prompts with
the same blocks have the same tokens, and a piece of 512 tokens hides a needle that the name of its first block draws.
The question is about one of the prompt's needles: what is shared can be asked for as well as what is not. Where two
offices of a prompt are in one city, either number is right.

Not here: which blocks (`traces.py`, `task.py`), prompts of their own (`tasks/needle`).
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.methods.calibration import prose
from kvbench.tasks.base import Sample
from kvbench.tasks.needle.task import Ask, ask_own
from kvbench.tasks.prompt import first_ids, token_ids
from kvbench.tasks.serving.traces import Block

PIECE = 512  # tokens with a needle
SMALL = 64  # tokens of blocks that make a piece together
ROOM = 128  # tokens behind a needle's place: for itself, and for the question


@dataclass(frozen=True)
class Fact:
    """A needle in a text."""

    ask: Ask
    stop: int  # index behind it


class Texts:
    """Tokens of blocks, for one tokenizer and seed."""

    def __init__(self, tokenizer: Any, seed: int) -> None:
        self.tokenizer, self.seed = tokenizer, seed
        self.corpus = token_ids(tokenizer, prose.embedded_prose())

    def drawn(self, name: str) -> random.Random:
        return random.Random(f"serving {self.seed} {name}")

    def filler(self, name: str, n: int) -> list[int]:
        """Running text from a drawn place on."""
        at = self.drawn(name).randrange(len(self.corpus))
        return [self.corpus[(at + i) % len(self.corpus)] for i in range(n)]

    def piece(self, blocks: Sequence[Block], is_first: bool) -> tuple[list[int], Fact | None]:
        """Text with a needle, where there is room for it.

        Other prompts may go on behind small blocks: what follows says nothing of where their needle is.
        """
        ids = [one for name, n in blocks for one in self.filler(name, n)]
        n = len(ids) if blocks[0][1] >= SMALL else 2 * ROOM if is_first else PIECE
        drawn = self.drawn(f"needle {blocks[0][0]}")
        ask, at = ask_own(drawn, 1), drawn.randrange(max(1, n - ROOM))
        needle = token_ids(self.tokenizer, ask.needles[0])
        text = [*ids[:at], *needle, *ids[at:]][: len(ids)]
        stop = at + len(needle)
        return text, Fact(ask, stop) if stop <= len(ids) else None

    def sample(self, name: str, blocks: Sequence[Block], n_prompt: int, n_new: int) -> Sample:
        """A prompt of exactly so many tokens, and a question at its end."""
        head = first_ids(self.tokenizer, ask_own(random.Random(0), 1).head)
        ids, facts = [*head], list[Fact]()
        for each in pieces(blocks):
            text, fact = self.piece(each, len(ids) == len(head))
            facts += [] if fact is None else [Fact(fact.ask, len(ids) + fact.stop)]
            ids += text
        asked = [(fact, token_ids(self.tokenizer, fact.ask.question + fact.ask.answer_prefix)) for fact in facts]
        fitting = [(fact.ask, question) for fact, question in asked if fact.stop <= n_prompt - len(question)]
        assert fitting, f"{n_prompt} tokens of {blocks} have no room for a needle"
        chosen, question = self.drawn(f"question {name}").choice(fitting)
        right = [ask for ask, _ in fitting if ask.question == chosen.question]
        return Sample(
            id=name, context="", question="", ids=(*ids[: n_prompt - len(question)], *question),
            references=tuple(ask.values[0] for ask in right), evidence=chosen.needles, max_new_tokens=n_new,
        )  # fmt: skip


def pieces(blocks: Sequence[Block]) -> list[list[Block]]:
    """Blocks that hide a needle together; a large one makes several pieces."""
    found = list[list[Block]]()
    for name, n in blocks:
        for i, at in enumerate(range(0, n, PIECE)):
            block = f"{name} {i}", min(PIECE, n - at)
            last = found[-1] if found else []
            if last and max(last[-1][1], block[1]) < SMALL and sum(n for _, n in last) + block[1] <= PIECE:
                last.append(block)
            else:
                found.append([block])
    return found
