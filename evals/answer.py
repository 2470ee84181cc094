"""Answers prepared samples: one pass over a prompt for all cells that share it, one batch to decode them.

Where memory is short, cells decode in waves after one pass; where it runs out all the same, in halves. What a cell
gives to a sample is a `Reply`, as soon as it is there.

Not here: a pass and what is decoded after it (`evals/batch`), what is written of an answer (`evals/write.py`).
"""

from collections import Counter
from collections.abc import Generator, Hashable, Iterator, Sequence
from contextlib import nullcontext

from kvbench.engine.batch import Answer
from kvbench.engine.books.spans import recording
from kvbench.engine.books.width import room_bytes, waves
from kvbench.engine.errors import LengthError, NotFiniteError, one_line
from kvbench.engine.machine import free_memory, is_out_of_memory
from kvbench.engine.model import Model
from kvbench.evals.batch.answers import Conversation, answers
from kvbench.evals.batch.reading import pass_of, read
from kvbench.evals.batch.reply import Profile, Reply
from kvbench.evals.cells import Cell
from kvbench.evals.prepare import PreparedSample
from kvbench.evals.screen.progress import Progress
from kvbench.tasks.ending import Ending
from kvbench.tasks.forced import ForcedContinuation, ForcedTask
from kvbench.tasks.latency import Latency, Timed
from kvbench.tasks.turns.encode import TalkPrompt


class Answering:
    """A loaded model, and what the cells of a group share."""

    def __init__(self, model: Model, first: Cell, progress: Progress) -> None:
        self.model, self.first, self.progress = model, first, progress
        self.ending = Ending(model.tokenizer, model.hf.generation_config)

    def stop_ids(self, one: PreparedSample) -> frozenset[int]:
        """Tokens that end an answer: the sample's, and those of the model's own files."""
        return one.stop_ids | self.ending.eos

    def answer(self, one: PreparedSample, cells: Sequence[Cell]) -> Iterator[Reply | Profile]:
        """Each cell's replies to a sample.

        Cells share a pass over its prompt, but those that leave tokens out of it, which come after the ordinary one;
        where the task takes times, each has passes of its own.
        """
        forced, task = None, self.first.task
        if task.is_forced:
            assert isinstance(task, ForcedTask), f"{task.name} is forced and no ForcedTask"
            forced = ForcedContinuation(task, one.sample, one.sample.forced, one.prompt.context_ids, self.stop_ids(one))
        passes: dict[Hashable, list[Cell]] = {}
        for cell in cells:
            passes.setdefault(pass_of(cell, one.variants[cell.path]), []).append(cell)
        ordered = sorted(passes.items(), key=lambda item: item[0] is not None)  # the ordinary pass first
        waiting = [
            batch for _, sharing in ordered for batch in ([[x] for x in sharing] if task.is_timed else [sharing])
        ]
        n_done = 0
        while waiting:
            self.progress.batch(n_done, n_done + len(waiting))
            n_done, (cells, *waiting) = n_done + 1, waiting
            waiting = [*(yield from self.attempt(one, cells, forced)), *waiting]

    def attempt(
        self, one: PreparedSample, cells: Sequence[Cell], forced: ForcedContinuation | None
    ) -> Generator[Reply | Profile, None, list[list[Cell]]]:
        """Replies of cells after one pass; returns the halves that are still to be asked where memory runs out."""
        n_given: Counter[int] = Counter()  # by cell: several may be draws of one
        try:
            for reply in self.time(one, cells[0]) if self.first.task.is_timed else self.behind(one, cells, forced):
                n_given[id(reply.cell)] += isinstance(reply, Reply)
                yield reply
            return []
        except (LengthError, NotFiniteError) as error:
            status, reason = "failed", str(error)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            status, reason = "oom", one_line(error)
        left = [cell for cell in cells if n_given[id(cell)] < one.n_lines]
        if status == "oom":
            free_memory()
        if status == "failed" or len(cells) == 1:
            yield from (Reply(cell, lost=(status, reason)) for cell in left)
            return []
        self.progress.say(
            f"{one.sample.id}: {len(cells)} variants at once run out of memory; asking one half and then the other"
        )
        middle = (len(left) + 1) // 2
        return [half for half in (left[:middle], left[middle:]) if half]

    def time(self, one: PreparedSample, cell: Cell) -> Iterator[Reply | Profile]:
        """The task's own passes, of this cell and of full attention in turn."""
        task = cell.task
        assert isinstance(task, Latency), f"{task.name} is timed and no Latency"
        self.progress.stage(f"{one.sample.id}: {cell.settings.method.name}", task.n_passes)
        timed = Timed(one.variants[cell.path], cell.sparsity, cell.settings.chunk, cell.settings.evicts)
        timing = task.measure(self.model, timed, one.sample, self.progress.advance, cell.path)
        if cell.settings.profile:
            yield Profile(cell, timing.record)
        yield Reply(cell, timing.row, Answer(), timing.decoded, timing.prefill_s, timing.outcome)

    def behind(
        self, one: PreparedSample, cells: Sequence[Cell], forced: ForcedContinuation | None
    ) -> Iterator[Reply | Profile]:
        """Decode after one prefill: one batch after it for all cells, or one per wave of those that fit into memory."""
        model, settings = self.model, self.first.settings
        stop_ids = self.stop_ids(one)
        with recording(model.device) if settings.profile else nullcontext() as record:
            room = room_bytes(model.layers_on) - one.prompt_bytes
            sizes = [one.n_bytes[cell.path] for cell in cells]
            at_once = [cells[where] for where in waves(sizes, room, settings.max_variants)]
            for i, wave in enumerate(read(model, one, at_once, forced, self.progress)):
                self.progress.wave(i, len(at_once))
                if isinstance(one.packed, TalkPrompt):
                    replies = Conversation(model, one, wave, stop_ids).replies(self.progress)
                else:
                    replies = answers(model, one, wave, stop_ids, forced, self.progress)
                for reply in replies:
                    reply.text = self.ending.text(one.sample, reply.answer.ids)
                    yield reply
        if record is not None:
            yield from (Profile(cell, record) for cell in cells)
