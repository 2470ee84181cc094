"""A sample as tokens; of a conversation what is compressed, and the feed of each turn.

Pieces are tokenised separately, so that every mode has the same tokens at the same places. Where the model has a chat
template, what stands between an answer and the next question is taken from a rendering of two turns.

Not here: the prompt of a single question (`tasks/prompt.py`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Any

from kvbench.engine.budget import Frame
from kvbench.tasks.base import Sample
from kvbench.tasks.prompt import (
    SENTINEL,
    Prompt,
    around,
    encode,
    first_ids,
    n_alike,
    render,
    sample_wrapper,
    token_ids,
    uses_chat,
)
from kvbench.tasks.turns.conversation import Conversation

SENTINELS = (SENTINEL, "<<what the model answers>>", "<<what the user asks then>>")


@dataclass(frozen=True)
class TalkPrompt(Prompt):
    """The context and the feeds of a conversation."""

    feeds: tuple[tuple[int, ...], ...] = ()  # of each turn; empty where the context ends with its question
    cuts: tuple[tuple[int, ...], ...] = ()  # of each turn the feed's tokens after each place where reading pauses
    n_new: int = 0  # tokens that may follow the context at once
    end_id: int | None = None  # put after an answer that did not end by itself, where no template separates turns

    def __len__(self) -> int:
        """Tokens of context and feeds."""
        return len(self.context_ids) + sum(map(len, self.feeds))

    def every_id(self, sample: Sample) -> Iterator[int]:
        return chain(super().every_id(sample), *self.feeds)

    def pieces(self, turn: int, feed: Sequence[int]) -> list[Sequence[int]]:
        """The feed of a turn, whose beginning may be another than it was encoded with, as what is read at once."""
        edges = [0, *(len(feed) - n for n in self.cuts[turn]), len(feed)]
        return [feed[start:stop] for start, stop in pairwise(edges) if start < stop]

    def n_behind(self, sample: Sample) -> int:
        return self.n_new


def prompt_of(tokenizer: Any, sample: Sample, *, chat: str, system_prompt: str, scope: str) -> Prompt:
    """The tokens of any sample."""
    if sample.ids is not None:
        return Prompt(sample.ids, ())
    if sample.conversation is not None:
        return encode_talk(tokenizer, sample, chat=chat, system_prompt=system_prompt)
    return encode(tokenizer, sample, chat=chat, system_prompt=system_prompt, scope=scope)


def encode_talk(tokenizer: Any, sample: Sample, *, chat: str, system_prompt: str) -> TalkPrompt:
    """The tokens of a sample with turns."""
    talk = sample.conversation
    assert talk is not None, f"sample {sample.id!r} has no turns"
    head, tail, between = f"{sample.system_prompt}\n\n" if sample.system_prompt else "", "", talk.joint
    if talk.is_rendered:
        head, between = "", ""
    elif uses_chat(tokenizer, sample, chat):
        head, tail = sample_wrapper(tokenizer, sample, system_prompt, chat)
        between = turn_change(tokenizer, head, tail) if chat != "inst" else tail
    first, turns = first_ids(tokenizer, head), talk.turns
    pieces = [[*turn.reads, f"{turn.question}{tail}{turn.answer_prefix}"] for turn in turns]
    context, suffix = head + sample.context, 0
    if talk.asking.mode != "independent":
        context += pieces[0].pop(0)
        for i in range(1, 1 if talk.is_rendered else len(turns)):
            before = turns[i - 1].golden if talk.asking.mode == "golden" else ""
            pieces[i][0] = f"{before}{between}{pieces[i][0]}"
    ids = first_ids(tokenizer, context)
    if not pieces[0]:
        suffix = n_alike(token_ids(tokenizer, tail + turns[0].answer_prefix)[::-1], ids[::-1])
    n_prefix = n_alike(first, ids)
    frame = Frame(n_prefix, min(suffix, len(ids) - n_prefix), postfix_ids=token_ids(tokenizer, tail))
    read = [[token_ids(tokenizer, text) for text in texts] for texts in pieces]
    feeds = tuple(tuple(chain.from_iterable(each)) for each in read)
    cuts = tuple(tuple(accumulate(map(len, each[:0:-1])))[::-1] for each in read)
    end = tokenizer.eos_token_id if talk.is_rendered else None
    return TalkPrompt(ids, (), frame, feeds, cuts, n_new(talk, [len(feed) for feed in feeds]), end)


def n_new(talk: Conversation, feeds: Sequence[int]) -> int:
    """How many tokens may follow the context at once, for feeds of these lengths."""
    answers = [turn.max_new_tokens for turn in talk.turns]
    if talk.asking.mode == "independent":
        return max(feed + answer for feed, answer in zip(feeds, answers, strict=True))
    if talk.asking.mode == "golden":
        return max(sum(feeds[: i + 1]) + answer for i, answer in enumerate(answers))
    return sum(feeds) + sum(answers) + len(answers)  # a turn's end may be put after an answer


def turn_change(tokenizer: Any, head: str, tail: str) -> str:
    """What the chat template puts between an answer and the user's next words."""
    roles = ("user", "assistant", "user")
    turns = [{"role": role, "content": text} for role, text in zip(roles, SENTINELS, strict=True)]
    return around(around(render(tokenizer, turns, False), SENTINELS[1])[1], SENTINELS[2])[0]
