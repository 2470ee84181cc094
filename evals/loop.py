"""The loop over samples: one prefill for all cells that share a prompt, one batch to decode them, a line for each.

Cells that agree on model, task, data, prefill, dtype and seed form a group. Per sample, the group's unfinished cells
share one prefill and decode as rows of one batch. A cell's folder holds the same as if the cell had run alone: exactly
in float32 on a CPU; elsewhere the order of sums, and so a close decision, may depend on the rows beside it.

Not here: what a cell is (`evals/cells.py`), what a line says (`evals/lines.py`), how a row decodes (`engine`).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from time import process_time
from types import MappingProxyType
from typing import Any

from engine.books.clock import Clock
from engine.books.spans import recording
from engine.budget import Frame
from engine.decode import Answer, decode
from engine.errors import ConfigError, NotFiniteError, one_line
from engine.passes.probe import probe
from engine.prefill import Thinning, Trace, prefill
from engine.sampling.cues import cues_of
from engine.sampling.draws import Draws
from engine.sampling.finite import why_lost
from engine.width import free_memory, is_out_of_memory, room_bytes, variant_bytes, waves
from evals.asked import CellRefused, leave_out, naming
from evals.cells import Cell, check_loaded, is_finished
from evals.lines import answer_line, facts, lost_line, sample_hash, shortened, standing
from evals.models import Models, made_with, tokenizer_of, vocabulary_of
from evals.outside import staying
from evals.screen.estimate import Estimate, bends_of
from evals.screen.expect import expect, is_worth_while, words
from evals.screen.progress import Progress, Standing, say
from evals.studies import accesses
from evals.turns.converse import converse
from evals.turns.encode import TalkPrompt, encode_talk
from evals.turns.waiting import Waiting, check_memory, check_window, line_ids_of
from methods.base import SelectiveAttention
from methods.full import Full
from methods.variant import Variant
from results import RunFolder, RunResult, SampleRow, environment, summarise
from results.files import file_stem
from results.opened import open_folders, results_of
from tasks.base import Sample
from tasks.forced import ForcedContinuation, ForcedTask
from tasks.latency import Latency, Timed
from tasks.prompt import Prompt, answer_text, check_ids, encode, newline_ids, stop_ids, tokenizing, uses_chat
from tasks.turns.conversation import line_ids


class Group:
    """Cells with one model, one task and the same samples.

    `answered` are samples of cells that stand in no folder of this process.
    """

    def __init__(self, cells: Sequence[Cell], answered: Mapping[Path, frozenset[str]] = MappingProxyType({})) -> None:
        # One task for all: what it learns with the samples, such as a tokenizer, their scores and pictures need too.
        self.cells = self.every = [replace(cell, task=cells[0].task) for cell in cells]
        self.folders: dict[Path, RunFolder] = {}
        self.answered = answered
        self.first, self.cells_asked = self.cells[0], self.cells
        self.started = datetime.now(UTC)
        self.newlines: frozenset[int] | None = None
        self.cpu_started = process_time()
        self.variants: dict[tuple[Path, int, Frame], Variant] = {}  # by cell, prompt length and frame
        self.prompts: list[Waiting] | None = None  # every sample that is asked, in the task's order

    def check_prompts(self) -> None:
        """Make and encode each sample once; a cell that cannot answer it is refused, or left out of its sweep.

        Where all cells have a result, nothing is read.
        """
        self.cells_asked = [cell for cell in self.cells if not is_finished(cell.path)]
        if self.cells_asked:
            with tokenizing(self.first.settings.model.name):
                self.read_samples(tokenizer_of(self.first.settings))
                self.prompts = [self.check_sample(i, self.samples[i]) for i in range(self.n)]
            self.samples = ()  # their texts are needed no more, and other groups hold theirs

    def read_samples(self, tokenizer: Any) -> None:
        """Read the task's samples, in its order; the cells answer the first `n`."""
        self.tokenizer, self.n_vocabulary = tokenizer, vocabulary_of(self.first.settings)
        self.samples = self.first.task.samples(tokenizer)  # some tasks make them one by one
        limit = self.first.settings.limit
        self.n = len(self.samples) if limit is None else min(limit, len(self.samples))

    def enter(self, folders: dict[Path, RunFolder]) -> list[Waiting]:
        """Go on in these folders: the samples that some cell has not answered."""
        self.folders = folders
        self.cells = [cell for cell in self.cells if folders[cell.path].finished is None]
        if not self.cells:
            return []
        self.first = self.cells[0]
        if self.prompts is None:  # a result was there, and is damaged
            self.check_prompts()
        assert self.prompts is not None, "a cell without a result has prompts"
        return self.missing(self.prompts)

    def missing(self, prompts: Iterable[Waiting]) -> list[Waiting]:
        """The samples that some cell has not answered."""
        waiting = []
        for one in prompts:
            for cell in self.cells:
                for id in line_ids_of(one, cell):
                    self.folders[cell.path].check_prompt(id, one.sha)
            if not all(self.has(draw, one.sample) for cell in self.cells for draw in cell.draws()):
                waiting.append(one)
        return waiting

    def run(self, models: Models, waiting: Sequence[Waiting]) -> None:
        """Let every cell answer the samples that it has not answered yet."""
        self.model = models.get(self.first.settings)
        check_loaded(self.cells, self.model.checkpoint)
        n_done = self.n - len(waiting)
        self.say_what_follows(waiting)
        with Progress(self.title(), self.n, n_done, self.standings(), self.estimate(waiting)) as self.progress:
            self.ask_all(waiting)
        for cell in self.cells:
            self.finish(cell)

    def say_what_follows(self, waiting: Sequence[Waiting]) -> None:
        """How many samples there are, and how long they will take, where that is long."""
        loads = [one.load for one in waiting]
        if not self.first.task.is_timed and is_worth_while(loads):
            expected = expect(
                self.model, waiting[0].prompt.context_ids, loads, bends_of(self.first.shape), len(self.cells)
            )
            say(f"{self.title()}: {words(len(waiting), self.n, self.first.settings.limit)}, {expected}")

    @property
    def ids(self) -> list[str]:
        """Of the samples, in the task's order."""
        return [one.sample.id for one in self.prompts or ()]

    def ask_all(self, waiting: Iterable[Waiting]) -> None:
        with self.model.hooked(), staying(cell.settings.method.target for cell in self.cells):
            for one in waiting:
                self.ask_or_leave_out(one)

    def ask_or_leave_out(self, waiting: Waiting) -> None:
        """Let all cells answer; one that is refused on the way is left out of its sweep, and the others answer."""
        try:
            self.ask(waiting)
        except CellRefused as error:
            self.cells.remove(refused := next(cell for cell in self.cells if cell.settings is error.settings))
            leave_out(error.settings, error, lambda cell: cell, self.cells)
            self.folders.pop(refused.path).discard()
            self.ask_or_leave_out(waiting)

    def estimate(self, waiting: Sequence[Waiting]) -> Estimate:
        return Estimate([one.load for one in waiting], bends_of(self.first.shape))

    def title(self) -> str:
        names = list(dict.fromkeys(cell.settings.method.name for cell in self.cells))
        return f"{self.first.task.name} {','.join(names) if len(names) <= 3 else f'{len(self.cells)} variants'}"

    def variant(self, cell: Cell, prompt: Prompt) -> Variant:
        """What the cell is on prompts of this length and frame, made once."""
        key = (cell.path, len(prompt.context_ids), prompt.frame)
        if key not in self.variants:
            self.variants[key] = cell.variant(len(prompt.context_ids), prompt.frame)
        return self.variants[key]

    def encode(self, sample: Sample) -> Prompt:
        asked = self.first.settings
        by = {"chat": asked.model.chat, "system_prompt": asked.model.system_prompt}
        if sample.ids is not None:
            return Prompt(sample.ids, ())
        if sample.conversation is not None:
            return encode_talk(self.tokenizer, sample, **by)
        return encode(self.tokenizer, sample, **by, scope=asked.scope)

    def check_sample(self, place: int, sample: Sample) -> Waiting:
        """The sample's prompt; a cell that cannot answer it is refused, or left out of its sweep."""
        prompt = self.encode(sample)
        check_ids(prompt.every_id(sample), self.n_vocabulary, sample)
        check_window(self.first, sample, prompt)
        for cell in self.cells_asked:
            try:
                self.variant(cell, prompt)
            except ConfigError as error:
                others = (x for x in self.cells_asked if x is not cell)
                leave_out(cell.settings, error, lambda x: self.variant(x, prompt), others)
                self.cells, self.every, self.cells_asked = (
                    [one for one in cells if one is not cell] for cells in (self.cells, self.every, self.cells_asked)
                )
        check_memory(self.cells_asked, [self.variant(cell, prompt) for cell in self.cells_asked], sample, prompt)
        short = shortened(sample, prompt, self.tokenizer)
        return Waiting.of(place, short, sample_hash(sample, prompt), prompt)

    def has(self, cell: Cell, sample: Sample) -> bool:
        return not self.missing_lines(cell, sample)

    def missing_lines(self, cell: Cell, sample: Sample) -> list[str]:
        """The ids of the sample's lines that are not there yet: its own, or one for each turn."""
        n_turns = 0 if sample.conversation is None else len(sample.conversation.turns)
        elsewhere, folder = self.answered.get(cell.path, ()), self.folders[cell.path]
        ids = line_ids(cell.line_id(sample.id), n_turns)
        return [id for id in ids if id not in elsewhere and not folder.has(id)]

    def ask(self, waiting: Waiting) -> None:
        """Let all cells answer one sample at once; where the task takes times, one cell after the other."""
        sample, prompt = waiting.sample, waiting.prompt
        todo = [draw for cell in self.cells for draw in cell.draws() if not self.has(draw, sample)]
        self.forced = self.forced_of(sample, prompt)
        for thinning, cells in self.by_prefill(todo, prompt).items():
            for together in [[cell] for cell in cells] if self.first.task.is_timed else [cells]:
                self.ask_together(sample, prompt, together, thinning)
        self.progress.sample_done(sample.id, self.standings())

    def by_prefill(self, cells: Sequence[Cell], prompt: Prompt) -> dict[Thinning | None, list[Cell]]:
        """Cells that can share a pass over a prompt: all of them, but those that leave tokens out of it."""
        shared: dict[Thinning | None, list[Cell]] = {}
        for cell in cells:
            shared.setdefault(self.variant(cell, prompt).thinning, []).append(cell)
        return dict(sorted(shared.items(), key=lambda item: item[0] is not None))  # the ordinary pass first

    def ask_together(self, sample: Sample, prompt: Prompt, cells: Sequence[Cell], thinning: Thinning | None) -> None:
        """Let cells answer behind one pass over the prompt; where memory is short, one half and then the other."""
        try:
            if self.first.task.is_timed:
                self.time(sample, prompt, cells[0])
            else:
                with self.profiled(sample, cells):
                    self.answer(sample, prompt, cells, thinning)
            return
        except NotFiniteError as error:
            return self.lose(sample, prompt, cells, "failed", str(error))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            reason = one_line(error)
        free_memory()
        if len(cells) == 1:
            return self.lose(sample, prompt, cells, "oom", reason)
        self.progress.say(
            f"{sample.id}: {len(cells)} variants at once run out of memory; asking one half and then the other"
        )
        left = [cell for cell in cells if not self.has(cell, sample)]
        middle = (len(left) + 1) // 2
        for half in filter(None, (left[:middle], left[middle:])):
            self.ask_together(sample, prompt, half, thinning)

    def lose(self, sample: Sample, prompt: Prompt, cells: Iterable[Cell], status: str, reason: str) -> None:
        """Write the lines of cells that have no answer."""
        for cell in cells:
            for id in self.missing_lines(cell, sample):
                self.keep(cell, replace(lost_line(sample, prompt, status, reason, cell), id=id), None)

    def answer(self, sample: Sample, prompt: Prompt, cells: Sequence[Cell], thinning: Thinning | None) -> None:
        """One prefill, one line per cell; one batch for all cells, or one per wave of those that fit into memory."""
        n_new = len(prompt.question_ids) + sample.max_new_tokens
        if isinstance(prompt, TalkPrompt):
            n_new = prompt.n_new
        first, *others = self.waves(cells, prompt, n_new)
        rows: list[SelectiveAttention] = []
        clock = Clock()  # of what the variants build beside the prefill

        def build(trace: Trace, layer: int) -> None:
            """Every variant takes the layer over while the prefill goes on with the next one."""
            with clock.running(trace.keys(layer).device):
                if not rows:
                    rows.extend(self.row(cell, prompt, trace, n_new) for cell in first)
                build_rows(first, rows, layer)
                if others:
                    trace.hold(layer)
            self.progress.advance()

        self.progress.reading(sample.id, len(prompt), len(self.model.shape.attention_layers))
        observations = [what for cell in cells for what in self.variant(cell, prompt).observations]
        sparsity, chunk = self.first.sparsity, self.first.settings.chunk
        trace = prefill(self.model, prompt.context_ids, observations, build, thinning, sparsity, chunk)
        prefill_s = trace.seconds - sum(clock.seconds())
        self.probe(sample, prompt, cells, trace)
        self.decode_wave(sample, prompt, first, rows, trace, thinning, prefill_s)
        for wave in others:
            rows.clear()
            rows.extend(self.row(cell, prompt, trace, n_new) for cell in wave)
            for layer in trace.shape.attention_layers:
                build_rows(wave, rows, layer)
            self.decode_wave(sample, prompt, wave, rows, trace, thinning, prefill_s)

    def probe(self, sample: Sample, prompt: Prompt, cells: Sequence[Cell], trace: Trace) -> None:
        """Read behind the prompt what cells ask for; who asks for what cannot be read is named."""
        for cell in cells:
            if probes := self.variant(cell, prompt).probes:
                with naming(cell.settings):
                    probe(self.model, trace, probes)

    def row(self, cell: Cell, prompt: Prompt, trace: Trace, n_new: int) -> SelectiveAttention:
        """The cell's variant on one sample, not built yet."""
        row = self.variant(cell, prompt).row(trace, n_new)
        if cell.settings.accesses:
            row.store.accesses = []
        return row

    def waves(self, cells: Sequence[Cell], prompt: Prompt, n_new: int) -> list[Sequence[Cell]]:
        """Cells that are decoded at once, by `sweep.max_variants` or by what fits into memory."""
        model, element_bytes = self.model, self.model.dtype.itemsize
        variants = [self.variant(cell, prompt) for cell in cells]
        sizes = [variant_bytes(variant, model.shape, n_new, element_bytes) for variant in variants]
        room = room_bytes(model.shape, len(prompt.context_ids), element_bytes, model.layers_on)
        return [cells[where] for where in waves(sizes, room, self.first.settings.max_variants)]

    def decode_wave(
        self, sample: Sample, prompt: Prompt, cells: Sequence[Cell], rows: Sequence[SelectiveAttention],
        trace: Trace, thinning: Thinning | None, prefill_s: float,
    ) -> None:  # fmt: skip
        """Decode built rows as one batch; write each cell's line."""
        for row in rows:
            row.complete()
        forced, feed, watch, beside = self.forced, prompt.question_ids, None, []
        if forced is not None:
            is_plain = thinning is None and self.first.sparsity is None
            beside = forced.beside(trace, is_plain)
            feed, watch = forced.feed, forced.task.probe(sample, forced, rows)
        trace.settle()
        if isinstance(prompt, TalkPrompt):
            return converse(self, sample, prompt, cells, rows, trace, prefill_s)
        n_steps = len(prompt.question_ids) + sample.max_new_tokens - (not prompt.question_ids)
        self.progress.answering(sample.id, len(rows), n_steps)
        sampling = self.first.settings.sampling
        draws = None
        if not (sampling.is_greedy or forced):
            assert trace.logits is not None
            seeds = [cell.seed(sample.id) for cell in cells]
            draws = Draws(sampling, seeds, sample.max_new_tokens, trace.logits.device)
        decoded = decode(
            self.model, trace, [*rows, *beside], draws=draws, cues=cues_of(rows, self.model.tokenizer),
            max_new_tokens=0 if forced else sample.max_new_tokens, stop_ids=self.stops(sample), feed=feed,
            min_new_tokens=sample.min_new_tokens, on_step=lambda step, speaking: self.progress.advance(), watch=watch,
        )  # fmt: skip
        outcomes = [None] * len(rows) if watch is None else watch.outcomes()
        answers, is_sound = decoded.answers[: len(rows)], all(one.is_finite for one in decoded.answers[len(rows) :])
        for cell, row, answer, outcome in zip(cells, rows, answers, outcomes, strict=True):
            if not (answer.is_finite and is_sound):
                self.lose(sample, prompt, [cell], "failed", why_lost(len(answer.ids)))
                continue
            text = answer_text(sample, self.model.tokenizer.decode(answer.ids, skip_special_tokens=True))
            line = answer_line(sample, prompt, cell, row, answer, text, decoded, prefill_s, outcome)
            accesses.keep(self.folders[cell.path].placing, file_stem(line.id), row.store)
            self.keep(cell, line, row)

    def time(self, sample: Sample, prompt: Prompt, cell: Cell) -> None:
        """The task's own passes, of this cell and of full attention in turn."""
        task = cell.task
        assert isinstance(task, Latency), f"{task.name} is timed and no Latency"
        self.progress.stage(f"{sample.id}: {cell.settings.method.name}", task.n_passes)
        timed = Timed(self.variant(cell, prompt), cell.sparsity, cell.settings.chunk)
        timing = task.measure(self.model, timed, sample, self.progress.advance)
        if cell.settings.profile:
            with self.file_beside(cell, "trace", sample, "json") as path:
                timing.record.write_chrome_trace(path)
        line = answer_line(
            sample, prompt, cell, timing.row, Answer(), "", timing.decoded, timing.prefill_s, timing.outcome
        )
        self.keep(cell, line, timing.row)

    @contextmanager
    def profiled(self, sample: Sample, cells: Sequence[Cell]) -> Iterator[None]:
        """With `trace=true`, where the time went, as a file in each folder."""
        if not self.first.settings.profile:
            yield
            return
        with recording(self.model.device) as record:
            yield
        for cell in cells:
            with self.file_beside(cell, "trace", sample, "json") as path:
                record.write_chrome_trace(path)

    def forced_of(self, sample: Sample, prompt: Prompt) -> ForcedContinuation | None:
        """The sample's continuation, where the task feeds one."""
        task = self.first.task
        if not task.is_forced:
            return None
        assert isinstance(task, ForcedTask), f"{task.name} is forced and no ForcedTask"
        return ForcedContinuation(self.model, task, sample, prompt, self.stops(sample))

    def stops(self, sample: Sample) -> frozenset[int]:
        chat_used = uses_chat(self.model.tokenizer, sample, self.first.settings.model.chat)
        if sample.stop_at_newline and self.newlines is None:  # scans the vocabulary, once
            self.newlines = newline_ids(self.model.tokenizer)
        return stop_ids(self.model.tokenizer, self.model.hf.generation_config, sample, chat_used, self.newlines)

    def keep(self, cell: Cell, line: SampleRow, row: SelectiveAttention | None) -> None:
        self.folders[cell.path].append(line, None if row is None else row.store.ledger.columns())

    @contextmanager
    def file_beside(self, cell: Cell, what: str, sample: Sample, suffix: str) -> Iterator[Path]:
        """A file of one sample in the run's folder, there when it is whole."""
        with self.folders[cell.path].placing() as folder:
            yield folder / f"{what}-{file_stem(sample.id)}.{suffix}"

    def standings(self) -> list[Standing]:
        """Scores so far, for whoever watches."""
        return [standing(cell, self.folders[cell.path].rows) for cell in self.cells]

    def finish(self, cell: Cell) -> None:
        """Summarise a cell's samples; its result is written last."""
        folder, settings = self.folders[cell.path], cell.settings
        folder.sort([id for one in self.prompts or () for id in line_ids_of(one, cell)])
        full = next((self.folders[other.path].rows for other in self.every if other.rules is Full), ())
        result = summarise(folder.rows, facts(cell, folder.rows), full)
        title = f"{cell.label}, {settings.budget.label()}, {settings.model.name}"
        with folder.placing() as beside:
            cell.task.artifacts(beside, [row.to_dict() for row in folder.rows], title)
        folder.finish(
            result,
            environment()
            | made_with(settings)
            | {
                "started": self.started.isoformat(timespec="seconds"),
                "ended": datetime.now(UTC).isoformat(timespec="seconds"),
                "cpu_s": round(process_time() - self.cpu_started, 1),
            },
        )


def build_rows(cells: Sequence[Cell], rows: Sequence[SelectiveAttention], layer: int) -> None:
    """Let every variant take over a layer of the prompt; what one refuses names it."""
    for cell, row in zip(cells, rows, strict=True):
        with naming(cell.settings):
            row.build(layer)


def run_group(group: Group, models: Models) -> dict[Path, RunResult]:
    """Run the cells of one group: each cell's result."""
    cells = group.cells
    with staying([cell.settings.method.target for cell in cells]), ExitStack() as stack:
        folders = open_folders(cells, stack, say)
        waiting = group.enter(folders)
        if group.cells:
            group.run(models, waiting)
        return results_of(cells, folders)
