"""Built rows answer: as one batch, each in its own words or all reading what a task feeds and watches; or turn by turn.

The turns of a conversation are answered by rows of as few batches as memory allows.

independent   each variant is copied once per question, and all copies read and answer side by side.
golden        all variants read the next feed, copies of them answer, and are dropped.
dialogue      all variants read the next feed and answer; each goes on with its own answer.

A feed is read in one pass, or in several where the turn begins with texts that are only read.

The last token of an answer that stays is read with the next feed.

Not here: the prefill (`evals/batch/reading.py`), how rows answer (`engine/batch.py`), tokens of turns
(`tasks/turns/encode.py`).
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import cast

from kvbench.engine.batch import Answer, Batch
from kvbench.engine.books.width import room_bytes
from kvbench.engine.decode import Decoded, decode
from kvbench.engine.model import Model
from kvbench.engine.row import Row
from kvbench.engine.sampling.finite import why_lost
from kvbench.engine.turns.state import fork_of
from kvbench.evals.batch.reading import Wave
from kvbench.evals.batch.reply import Reply, TurnReply
from kvbench.evals.prepare import PreparedSample
from kvbench.evals.screen.progress import Progress
from kvbench.methods.base import SelectiveAttention, Variant
from kvbench.tasks.forced import ForcedContinuation
from kvbench.tasks.turns.encode import TalkPrompt


def answers(
    model: Model, one: PreparedSample, wave: Wave, stop_ids: frozenset[int], forced: ForcedContinuation | None,
    progress: Progress,
) -> Iterator[Reply]:  # fmt: skip
    """The reply of each cell of a wave to a sample."""
    sample, trace, settings = one.sample, wave.trace, wave.cells[0].settings
    feed, watch, beside, n_new = one.prompt.question_ids, None, [], sample.max_new_tokens
    n_steps = len(feed) + n_new - (not feed)
    encode = partial(model.tokenizer.encode, add_special_tokens=False)
    made = enumerate(each.cue(encode) for each in wave.rows)
    cues = {i: cue for i, cue in made if cue is not None}
    seeds = [one.seeds[cell.draw or 0] for cell in wave.cells]
    sampling = None if settings.sampling.is_greedy or forced else settings.sampling
    if forced is not None:
        beside = forced.beside(model)
        feed, watch, n_new = forced.feed, forced.task.watch(sample, forced, wave.rows), 0
    trace.settle()
    progress.answering(sample.id, len(wave.rows), n_steps)
    decoded = decode(
        model, trace, [*wave.rows, *beside], sampling=sampling, seeds=seeds, cues=cues, feed=feed,
        max_new_tokens=n_new, min_new_tokens=sample.min_new_tokens, stop_ids=stop_ids,
        on_step=lambda step, speaking: progress.advance(), watch=watch,
    )  # fmt: skip
    n = len(wave.rows)
    outcomes = [None] * n if watch is None else watch.outcomes()
    is_sound = all(answer.is_finite for answer in decoded.answers[n:])
    for cell, row, answer, outcome in zip(wave.cells, wave.rows, decoded.answers[:n], outcomes, strict=True):
        if outcome is not None and outcome.lost_at is not None:
            yield Reply(cell, lost=("failed", why_lost(outcome.lost_at, "fed")))
        elif answer.is_finite and is_sound:
            yield Reply(cell, row, answer, decoded, wave.prefill_s, outcome)
        else:
            yield Reply(cell, lost=("failed", why_lost(len(answer.ids))))


Round = Sequence[tuple[int, int]]  # for each row of a batch: which turn it is asked, and which cell it belongs to


class Conversation:
    """The turns of a sample, which built rows are asked."""

    def __init__(self, model: Model, one: PreparedSample, wave: Wave, stop_ids: frozenset[int]) -> None:
        conversation, prompt = one.sample.conversation, one.prompt
        assert conversation is not None and isinstance(prompt, TalkPrompt), one.sample.id
        self.model, self.one, self.wave, self.prompt = model, one, wave, prompt
        self.asking, self.turns = conversation.asking, conversation.turns
        self.stop_ids = stop_ids
        self.apart = wave.trace.shape.n_own > 0  # rows whose lengths differ

    def replies(self, progress: Progress) -> Iterator[Reply]:
        """Each cell's reply to each turn, as soon as it is there."""
        wave, mode = self.wave, self.asking.mode
        wave.trace.settle()
        assert wave.trace.logits is not None, "the trace has no logits"
        progress.answering(self.one.sample.id, len(wave.rows), sum(turn.max_new_tokens for turn in self.turns))
        for rows, rounds in self.batches():
            batch = Batch(self.model, wave.trace, rows)
            logits, earlier = wave.trace.logits.expand(len(rows), -1), list[Answer]()
            for turns in rounds:
                feeds = self.feeds(turns, earlier)
                n_passes, n_before = batch.n_steps, [len(row.store.accesses or ()) for row in batch.rows]
                for pieces in self.pieces(turns, feeds):
                    logits = batch.read(pieces, self.asking.feed, self.grown(turns, batch.positions, pieces))
                feed_s = sum(batch.seconds()[n_passes:])
                read = [row.store.take_ledger() for row in batch.rows] if mode == "golden" else []
                speaking = batch.fork() if mode == "golden" else batch
                n_passes = speaking.n_steps
                n_new = [self.turns[i].max_new_tokens for i, _ in turns]
                answers = speaking.answer(logits, n_new, self.stop_ids, on_step=lambda *_: progress.advance())
                for answer, before in zip(answers, earlier, strict=False):
                    answer.is_finite &= before.is_finite  # what would have followed a lost one is not known
                step_s = speaking.seconds()[n_passes:]
                for at, (i, v) in enumerate(turns):
                    row, answer, turn = speaking.rows[at], answers[at], TurnReply(i, feeds[at], feed_s, n_before[at])
                    if read:
                        row.store.books = row.store.ledger.behind(read[at])
                    if answer.is_finite:
                        decoded = Decoded([answer] * len(turns), step_s[: len(answer.ids) - 1])
                        own = cast(SelectiveAttention, row)  # of the wave, or a copy of one
                        yield Reply(wave.cells[v], own, answer, decoded, wave.prefill_s, turn=turn)
                    else:
                        yield Reply(wave.cells[v], turn=turn, lost=("failed", why_lost(len(answer.ids))))
                    row.store.take_ledger()
                earlier = answers if mode == "dialogue" else []

    def batches(self) -> Iterator[tuple[Sequence[Row], Sequence[Round]]]:
        """Rows that read and answer side by side, and what they are asked one after the other."""
        rows, n_turns = self.wave.rows, len(self.turns)
        if self.asking.mode == "independent":
            at_once = self.at_once()
            for start in range(0, n_turns, at_once):
                turns = [(i, v) for i in range(start, min(n_turns, start + at_once)) for v in range(len(rows))]
                yield [fork_of(rows[v]) for _, v in turns], [turns]
            return
        alone = self.asking.mode == "dialogue" and self.apart
        for which in [[v] for v in range(len(rows))] if alone else [[*range(len(rows))]]:
            yield [rows[v] for v in which], [[(i, v) for v in which] for i in range(n_turns)]

    def at_once(self) -> int:
        """How many questions are asked at once, of all rows each: those that there is memory for."""
        model, settings = self.model, self.wave.cells[0].settings
        if self.apart:
            return 1
        if settings.max_variants is not None:
            return max(1, settings.max_variants // len(self.wave.rows))
        size = sum(self.one.n_bytes[cell.path] for cell in self.wave.cells)
        return max(1, room_bytes(model.layers_on) // max(1, size))

    def feeds(self, turns: Round, earlier: Sequence[Answer]) -> list[tuple[int, ...]]:
        """Tokens that each row reads: its turn's feed, in a dialogue after the last token of its earlier answer."""
        feeds = [self.prompt.feeds[i] for i, _ in turns]
        return [self.behind(answer, feed) for answer, feed in zip(earlier, feeds, strict=True)] if earlier else feeds

    def pieces(self, turns: Round, feeds: Sequence[tuple[int, ...]]) -> Iterator[Sequence[Sequence[int]]]:
        """What the rows read at once, one piece of their feeds after the other."""
        return zip(*(self.prompt.pieces(i, feed) for (i, _), feed in zip(turns, feeds, strict=True)), strict=True)

    def behind(self, answer: Answer, feed: tuple[int, ...]) -> tuple[int, ...]:
        """The next feed, after the answer's last token; the turn's end stands there once."""
        if not answer.ids:
            return feed
        if answer.stopped and feed[:1] == (answer.ids[-1],):
            return feed
        end = self.prompt.end_id
        if end is not None and not answer.stopped and feed[:1] != (end,):
            return (answer.ids[-1], end, *feed)
        return (answer.ids[-1], *feed)

    def grown(self, turns: Round, positions: Sequence[int], feeds: Sequence[Sequence[int]]) -> list[Variant]:
        """The rows' variants where budgets grow: on prompts as long as the conversation after their feeds."""
        if self.asking.budget_base != "conversation":
            return []
        lengths = [n + len(feed) for n, feed in zip(positions, feeds, strict=True)]
        return [self.wave.cells[v].variant(n, self.prompt.frame) for (_, v), n in zip(turns, lengths, strict=True)]
