"""Asks a conversation: every variant answers every turn, as rows of as few batches as memory allows.

independent   each variant is copied once per question, and all copies read and answer side by side.
golden        all variants read the next feed, copies of them answer, and are dropped.
dialogue      all variants read the next feed and answer; each goes on with its own answer.

The last token of an answer that stays is read with the next feed.

Not here: the prefill (`evals/answer.py`), tokens (`tasks/turns/encode.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from engine.books.ledger import Ledger
from engine.decode import Answer
from engine.model import Model
from engine.passes.trace import Trace
from engine.row import Row
from engine.turns.talk import Talk
from methods.base import SelectiveAttention, Variant
from tasks.turns.conversation import Asking
from tasks.turns.encode import TalkPrompt


@dataclass(frozen=True)
class Said:
    """What one variant answered in one turn."""

    turn: int  # from 0
    variant: int  # its place among the rows
    row: SelectiveAttention  # as it is after the answer, with the turn's ledger
    answer: Answer
    feed_ids: tuple[int, ...]  # read in this turn, the last token of an earlier answer included
    feed_s: float  # of the pass over the feed, shared by all rows of its batch
    step_s: list[float]  # of the answer's steps
    n_rows: int  # of the batch
    n_fed: int  # entries' steps that are the feed's
    n_before: int = 0  # fetches noted before this turn


class Asker:
    """A conversation with built rows."""

    def __init__(
        self, model: Model, trace: Trace, rows: Sequence[SelectiveAttention], prompt: TalkPrompt, asking: Asking,
        max_new_tokens: Sequence[int], stop_ids: frozenset[int], end_ids: Sequence[int], n_rows: int,
        on_step: Callable[[], None], grown: Callable[[int, int], Variant] | None = None,
    ) -> None:  # fmt: skip
        """`n_rows` may be decoded at once; `end_ids` are those of a turn's end, where a chat template has one.

        Where budgets grow with the conversation, `grown` is what a row's variant is on a prompt of so many tokens.
        """
        self.grown = grown
        self.model, self.trace, self.rows, self.prompt, self.asking = model, trace, rows, prompt, asking
        self.max_new, self.stop_ids, self.end_ids = list(max_new_tokens), stop_ids, tuple(end_ids)
        self.n_rows, self.on_step = n_rows, on_step
        self.apart = trace.shape.n_own > 0  # rows whose lengths differ

    def ask(self) -> Iterator[Said]:
        """Each turn's answers, in the order in which they are there."""
        which = range(len(self.rows))
        if self.asking.mode == "independent":
            yield from self.independent()
        elif self.asking.mode == "dialogue" and self.apart:
            for i in which:
                yield from self.in_turn([i])
        else:
            yield from self.in_turn(which)

    def independent(self) -> Iterator[Said]:
        n, at_once = len(self.prompt.feeds), max(1, self.n_rows // len(self.rows))
        at_once = 1 if self.apart else at_once
        for start in range(0, n, at_once):
            pairs = [(i, v) for i in range(start, min(n, start + at_once)) for v in range(len(self.rows))]
            talk = Talk(self.model, self.trace, [self.rows[v].fork() for _, v in pairs])
            feeds = [self.prompt.feeds[i] for i, _ in pairs]
            logits = talk.read(feeds, self.asking.feed)
            n_passes = len(talk.clock.stretches)
            answers = talk.answer(logits, [self.max_new[i] for i, _ in pairs], self.stop_ids, on_step=self.on_step)
            seconds = talk.seconds()
            for at, (i, v) in enumerate(pairs):
                yield self.said(i, v, talk.rows[at], answers[at], feeds[at], seconds, n_passes, len(pairs))

    def in_turn(self, which: Sequence[int]) -> Iterator[Said]:
        """Turn behind turn: where references stay in the history copies answer, else the rows themselves."""
        assert self.trace.logits is not None, "the trace has no logits"
        talk = Talk(self.model, self.trace, [self.rows[v] for v in which])
        logits, stays = self.trace.logits.expand(len(which), -1), self.asking.mode == "dialogue"
        before: list[Answer] = []  # what stays of the turn before
        for i, feed in enumerate(self.prompt.feeds):
            n_before, fetched = len(talk.clock.stretches), [n_fetches(row) for row in talk.rows]
            feeds = [self.after(answer, feed) for answer in before] or [feed] * len(which)
            if all(feeds):
                logits = talk.read(feeds, self.asking.feed, self.grown_to(which, talk.positions, feeds))
            read_s = talk.seconds()[n_before:]
            fed = [] if stays else [take_ledger(row) for row in talk.rows]
            speaking = talk if stays else talk.fork()
            n_passes = len(speaking.clock.stretches)
            answers = speaking.answer(logits, [self.max_new[i]] * len(which), self.stop_ids, on_step=self.on_step)
            for answer, earlier in zip(answers, before, strict=False):
                answer.is_finite &= earlier.is_finite  # what would have followed a lost one is not known
            seconds = [*read_s, *speaking.seconds()[n_passes:]]
            for at, v in enumerate(which):
                row = speaking.rows[at]
                if not stays:
                    put_before(row, fed[at])
                yield self.said(i, v, row, answers[at], feeds[at], seconds, len(read_s), len(which), fetched[at])
                if stays:
                    take_ledger(row)
            before = answers if stays else []

    def grown_to(
        self, which: Sequence[int], positions: Sequence[int], feeds: Sequence[tuple[int, ...]]
    ) -> list[Variant | None]:
        """What the rows' variants are on prompts as long as the conversation is behind their feeds."""
        if self.grown is None:
            return [None] * len(which)
        return [self.grown(v, n + len(feed)) for v, n, feed in zip(which, positions, feeds, strict=True)]

    def after(self, answer: Answer, feed: tuple[int, ...]) -> tuple[int, ...]:
        """The next feed, behind the answer's last token; the turn's end stands there once."""
        if not answer.ids:
            return feed
        n_end = len(self.end_ids)
        has_end = n_end > 0 and feed[:n_end] == self.end_ids
        if answer.stopped and has_end and answer.ids[-1] == self.end_ids[0]:
            return (answer.ids[-1], *feed[n_end:])
        if self.prompt.end_id is not None and not answer.stopped:
            return (answer.ids[-1], self.prompt.end_id, *feed)
        return (answer.ids[-1], *feed)

    def said(
        self, turn: int, variant: int, row: Row, answer: Answer, feed: tuple[int, ...],
        seconds: Sequence[float], n_passes: int, n_rows: int, n_before: int = 0,
    ) -> Said:  # fmt: skip
        n_steps = len(answer.ids) - 1
        steps = [*seconds[n_passes : n_passes + n_steps]]
        own = cast(SelectiveAttention, row)  # of `rows`, or a copy of one
        return Said(
            turn, variant, own, answer, feed, sum(seconds[:n_passes]), steps, n_rows, len(feed), n_before
        )  # fmt: skip


def n_fetches(row: Row) -> int:
    """Of those that a row notes."""
    return len(row.store.accesses or ())


def take_ledger(row: Row) -> Ledger:
    """The row's ledger, in whose place a new one begins."""
    row.store.ledger, ledger = Ledger(), row.store.ledger
    return ledger


def put_before(row: Row, earlier: Ledger) -> None:
    """Put what another ledger has in front of the row's own."""
    row.store.ledger = row.store.ledger.behind(earlier)
