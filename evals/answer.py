"""Answers prepared samples: one pass over a prompt for all cells that share it, one batch to decode them.

Where memory is short, cells decode in waves behind one pass; where it runs out all the same, in halves. What a cell
gives to a sample is a `Given`, as soon as it is there.

Not here: how a row decodes (`engine`), in which order turns are read (`evals/conversation.py`), what is written of an
answer (`evals/write.py`).
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.books.clock import Clock
from engine.books.spans import Record, recording
from engine.decode import Answer, Decoded, decode
from engine.errors import NotFiniteError, one_line
from engine.machine import free_memory, is_out_of_memory
from engine.model import Model
from engine.passes.probe import probe
from engine.passes.trace import Trace
from engine.prefill import Thinning, prefill
from engine.sampling.cues import cues_of
from engine.sampling.draws import Draws
from engine.sampling.finite import why_lost
from engine.width import room_bytes, variant_bytes, waves
from evals.asked import naming
from evals.cells import Cell
from evals.conversation import Asker, Said
from evals.prepare import PreparedSample
from evals.screen.progress import Progress
from methods.base import SelectiveAttention
from tasks.base import Sample
from tasks.forced import ForcedContinuation, ForcedTask, Outcome
from tasks.latency import Latency, Timed
from tasks.prompt import answer_text, decoded_answer, newline_ids, stop_ids, uses_chat
from tasks.turns.encode import TalkPrompt


@dataclass
class Given:
    """What one cell gave to a sample, or to one turn of it."""

    cell: Cell
    row: SelectiveAttention | None = None  # the method behind its answer; None: there is no answer
    answer: Answer = field(default_factory=Answer)
    decoded: Decoded = field(default_factory=lambda: Decoded([], []))
    prefill_s: float = 0.0
    outcome: Outcome | None = None  # where the task measured what was read, not a text
    said: Said | None = None  # of a turn
    lost: tuple[str, str] | None = None  # status and reason, where there is no answer
    text: str = ""  # of the answer


class Profile(NamedTuple):
    """Where the time of a cell's answer went."""

    cell: Cell
    record: Record


class Answering:
    """A loaded model, and what the cells of a group share."""

    def __init__(self, model: Model, first: Cell, progress: Progress) -> None:
        self.model, self.first, self.progress = model, first, progress
        self.newlines: frozenset[int] | None = None

    def answer(self, one: PreparedSample, cells: Sequence[Cell]) -> Iterator[Given | Profile]:
        """What each cell gives to a sample.

        Cells share a pass over its prompt, but those that leave tokens out of it; where the task takes times, each has
        passes of its own.
        """
        forced, task = None, self.first.task
        if task.is_forced:
            assert isinstance(task, ForcedTask), f"{task.name} is forced and no ForcedTask"
            forced = ForcedContinuation(self.model, task, one.sample, one.prompt, self.stops(one.sample))
        passes: dict[Thinning | None, list[Cell]] = {}
        for cell in cells:
            passes.setdefault(one.variants[cell.path].thinning, []).append(cell)
        for _, sharing in sorted(passes.items(), key=lambda item: item[0] is not None):  # the ordinary pass first
            for together in [[cell] for cell in sharing] if task.is_timed else [sharing]:
                for given in self.together(one, together, forced):
                    if isinstance(given, Given) and given.answer.ids:
                        text = decoded_answer(self.model.tokenizer, one.sample, given.answer.ids)
                        given.text = answer_text(one.sample, text)
                    yield given

    def together(
        self, one: PreparedSample, cells: Sequence[Cell], forced: ForcedContinuation | None
    ) -> Iterator[Given | Profile]:
        """What cells give behind one pass; where memory is short, one half and then the other."""
        n_given: Counter[int] = Counter()  # by cell: several may be draws of one
        try:
            for given in self.time(one, cells[0]) if self.first.task.is_timed else self.behind(one, cells, forced):
                n_given[id(given.cell)] += isinstance(given, Given)
                yield given
            return
        except NotFiniteError as error:
            status, reason = "failed", str(error)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            status, reason = "oom", one_line(error)
        left = [cell for cell in cells if n_given[id(cell)] < one.n_lines]
        if status == "oom":
            free_memory()
        if status == "failed" or len(cells) == 1:
            yield from (Given(cell, lost=(status, reason)) for cell in left)
            return
        self.progress.say(
            f"{one.sample.id}: {len(cells)} variants at once run out of memory; asking one half and then the other"
        )
        middle = (len(left) + 1) // 2
        for half in filter(None, (left[:middle], left[middle:])):
            yield from self.together(one, half, forced)

    def behind(
        self, one: PreparedSample, cells: Sequence[Cell], forced: ForcedContinuation | None
    ) -> Iterator[Given | Profile]:
        """One prefill; one batch behind it for all cells, or one per wave of those that fit into memory."""
        profile = self.first.settings.profile
        with recording(self.model.device) if profile else nullcontext() as record:
            n_new = one.packed.n_behind(one.sample)
            first, *others = self.waves(one, cells, n_new)
            rows: list[SelectiveAttention] = []
            clock = Clock()  # of what the variants build beside the prefill

            def build(trace: Trace, layer: int) -> None:
                """Every variant takes the layer over while the prefill goes on with the next one."""
                with clock.running(trace.keys(layer).device):
                    if not rows:
                        rows.extend(begin(one, cell, trace, n_new) for cell in first)
                    build_rows(first, rows, layer)
                    if others:
                        trace.hold(layer)
                self.progress.advance()

            self.progress.reading(one.sample.id, len(one.packed), len(self.model.shape.attention_layers))
            variants = [one.variants[cell.path] for cell in cells]
            observations = [what for variant in variants for what in variant.observations]
            sparsity, chunk = self.first.sparsity, self.first.settings.chunk
            trace = prefill(
                self.model, one.prompt.context_ids, observations, build, variants[0].thinning, sparsity, chunk
            )
            if not rows:  # the model chooses by itself, and no layer was taken over
                rows.extend(begin(one, cell, trace, n_new) for cell in first)
            prefill_s = trace.seconds - sum(clock.seconds())
            for cell, variant in zip(cells, variants, strict=True):
                if variant.probes:
                    with naming(cell.settings):  # who asks for what cannot be read
                        probe(self.model, trace, variant.probes)
            yield from self.wave(one, first, rows, trace, prefill_s, forced)
            for wave in others:
                rows.clear()
                rows.extend(begin(one, cell, trace, n_new) for cell in wave)
                for layer in trace.shape.attention_layers:
                    build_rows(wave, rows, layer)
                yield from self.wave(one, wave, rows, trace, prefill_s, forced)
        if record is not None:
            yield from (Profile(cell, record) for cell in cells)

    def waves(self, one: PreparedSample, cells: Sequence[Cell], n_new: int) -> list[Sequence[Cell]]:
        """Cells that are decoded at once, by `sweep.max_variants` or by what fits into memory."""
        model = self.model
        sizes = self.sizes(one, cells, n_new)
        settings, s = self.first.settings, len(one.packed.context_ids)
        room = room_bytes(model.shape, s, model.dtype.itemsize, model.layers_on, settings.chunk)
        return [cells[where] for where in waves(sizes, room, settings.max_variants)]

    def sizes(self, one: PreparedSample, cells: Sequence[Cell], n_new: int) -> list[int]:
        """Bytes that each cell's variant takes."""
        model = self.model
        return [variant_bytes(one.variants[cell.path], model.shape, n_new, model.dtype.itemsize) for cell in cells]

    def wave(
        self, one: PreparedSample, cells: Sequence[Cell], rows: Sequence[SelectiveAttention], trace: Trace,
        prefill_s: float, forced: ForcedContinuation | None,
    ) -> Iterator[Given]:  # fmt: skip
        """Let built rows answer as one batch: each in its own words, or all reading what the task feeds and watches."""
        sample, prompt = one.sample, one.prompt
        for row in rows:
            row.complete()
        feed, watch, beside, draws, n_new = prompt.question_ids, None, [], None, sample.max_new_tokens
        n_steps = len(feed) + n_new - (not feed)
        if forced is not None:
            beside = forced.beside(trace, is_plain=self.first.sparsity is None and rows[0].variant.thinning is None)
            feed, watch, n_new = forced.feed, forced.task.watch(sample, forced, rows), 0
        trace.settle()
        if isinstance(prompt, TalkPrompt):
            yield from self.converse(one, prompt, cells, rows, trace, prefill_s)
            return
        self.progress.answering(sample.id, len(rows), n_steps)
        if not (self.first.settings.sampling.is_greedy or forced):
            assert trace.logits is not None
            seeds = [cell.seed(sample.id) for cell in cells]
            draws = Draws(self.first.settings.sampling, seeds, n_new, trace.logits.device)
        decoded = decode(
            self.model, trace, [*rows, *beside], draws=draws, cues=cues_of(rows, self.model.tokenizer),
            max_new_tokens=n_new, min_new_tokens=sample.min_new_tokens, stop_ids=self.stops(sample), feed=feed,
            on_step=lambda step, speaking: self.progress.advance(), watch=watch,
        )  # fmt: skip
        outcomes = [None] * len(rows) if watch is None else watch.outcomes()
        answers, is_sound = decoded.answers[: len(rows)], all(other.is_finite for other in decoded.answers[len(rows) :])
        for cell, row, answer, outcome in zip(cells, rows, answers, outcomes, strict=True):
            if answer.is_finite and is_sound:
                yield Given(cell, row, answer, decoded, prefill_s, outcome)
            else:
                yield Given(cell, lost=("failed", why_lost(len(answer.ids))))

    def converse(
        self, one: PreparedSample, prompt: TalkPrompt, cells: Sequence[Cell], rows: Sequence[SelectiveAttention],
        trace: Trace, prefill_s: float,
    ) -> Iterator[Given]:  # fmt: skip
        """Every row answers every turn."""
        talk, stops, at_once = one.sample.conversation, self.stops(one.sample), self.rows_at_once(one, cells)
        assert talk is not None, one.sample.id
        n_new = [turn.max_new_tokens for turn in talk.turns]
        self.progress.answering(one.sample.id, len(rows), sum(n_new))
        grows = talk.asking.budget_base == "conversation"
        asker = Asker(
            self.model, trace, rows, prompt, talk.asking, n_new, stops, prompt.end_ids(stops),
            at_once, self.progress.advance,
            (lambda row, n: cells[row].variant(n, prompt.frame)) if grows else None,
        )  # fmt: skip
        for said in asker.ask():
            if not said.answer.is_finite:
                yield Given(cells[said.variant], said=said, lost=("failed", why_lost(len(said.answer.ids))))
                continue
            decoded = Decoded([said.answer] * said.n_rows, said.step_s)
            yield Given(cells[said.variant], said.row, said.answer, decoded, prefill_s, said=said)

    def rows_at_once(self, one: PreparedSample, cells: Sequence[Cell]) -> int:
        """How many rows are decoded at once: those of several questions, where there is memory for them."""
        if (limit := self.first.settings.max_variants) is not None:
            return limit
        model, sizes = self.model, self.sizes(one, cells, one.packed.n_behind(one.sample))
        room = room_bytes(model.shape, 0, model.dtype.itemsize, model.layers_on)
        return len(cells) * max(1, room // max(1, sum(sizes)))

    def time(self, one: PreparedSample, cell: Cell) -> Iterator[Given | Profile]:
        """The task's own passes, of this cell and of full attention in turn."""
        task = cell.task
        assert isinstance(task, Latency), f"{task.name} is timed and no Latency"
        self.progress.stage(f"{one.sample.id}: {cell.settings.method.name}", task.n_passes)
        timed = Timed(one.variants[cell.path], cell.sparsity, cell.settings.chunk)
        timing = task.measure(self.model, timed, one.sample, self.progress.advance)
        if cell.settings.profile:
            yield Profile(cell, timing.record)
        yield Given(cell, timing.row, Answer(), timing.decoded, timing.prefill_s, timing.outcome)

    def stops(self, sample: Sample) -> frozenset[int]:
        """The tokens that end an answer."""
        chat_used = sample.is_rendered or uses_chat(self.model.tokenizer, sample, self.first.settings.model.chat)
        if sample.stop_at_newline and self.newlines is None:  # scans the vocabulary, once
            self.newlines = newline_ids(self.model.tokenizer)
        return stop_ids(self.model.tokenizer, self.model.hf.generation_config, sample, chat_used, self.newlines)


def begin(one: PreparedSample, cell: Cell, trace: Trace, n_new: int) -> SelectiveAttention:
    """The cell's variant on one sample, not built yet."""
    row = one.variants[cell.path].row(trace, n_new)
    if cell.settings.accesses:
        row.store.accesses = []
    return row


def build_rows(cells: Sequence[Cell], rows: Sequence[SelectiveAttention], layer: int) -> None:
    """Let every variant take over a layer of the prompt; what one refuses names it."""
    for cell, row in zip(cells, rows, strict=True):
        with naming(cell.settings):
            row.build(layer)
