"""Prepares samples: each is made, encoded and checked once, for all cells that share it, before weights are loaded.

Not here: what a sample holds (`tasks`), who answers it (`evals/answer.py`).
"""

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kvbench.engine.books.width import answers_bytes, most_at_once, prompt_bytes, variant_bytes
from kvbench.engine.budget import Frame, gigabytes
from kvbench.engine.errors import ConfigError
from kvbench.engine.machine import machine_bytes
from kvbench.engine.sampling.spec import draw_id, draw_seed
from kvbench.evals.cells import Cell
from kvbench.evals.models import image_ids_of, tokenizer_of, vocabulary_of
from kvbench.evals.refusals import leave_out
from kvbench.methods.base import Variant
from kvbench.results import RunFolder, prompt_hash
from kvbench.tasks.base import Sample
from kvbench.tasks.ending import Ending
from kvbench.tasks.prompt import Prompt, check_ids, tokenizing, uses_chat
from kvbench.tasks.turns.conversation import line_ids
from kvbench.tasks.turns.encode import TalkPrompt, prompt_of

SHOWN = 600  # characters of a prompt's texts that a line repeats, so that a report can show what was asked
AROUND = 150  # characters before and after a part that holds the answer
SHOWN_TOKENS = 200  # of a prompt that has no texts
USED = 0.75  # of its allowance, an answer: of several variants the longest counts


@dataclass(frozen=True)
class Load:
    """What a sample asks of a machine: tokens to read, and tokens that may follow."""

    n_read: int
    n_new: int

    @property
    def n_steps(self) -> float:
        """Steps that the answer is likely to take."""
        return USED * self.n_new


@dataclass(frozen=True)
class PreparedSample:
    """A sample as tokens, which every cell of its group can answer.

    All of a task's samples may wait at once. Their tokens are packed, because tuples take nine times as much memory,
    and only the ends of their texts are left.
    """

    place: int  # in the task's order
    sample: Sample
    lines: Mapping[int | None, tuple[str, ...]]  # what those of each draw are called, one for each turn; None: of all
    n_lines: int  # of each answer
    sha: str  # of the prompt
    packed: Prompt  # arrays in place of tuples
    stop_ids: frozenset[int]  # that end an answer, in addition to the model's own
    seeds: tuple[int, ...]  # of each draw
    variants: Mapping[Path, Variant]  # what each cell is on this prompt, by the cell's folder
    n_bytes: Mapping[Path, int]  # the most that each cell's answer takes on its device
    prompt_bytes: int  # that the prompt and the pass over it take there

    @property
    def prompt(self) -> Prompt:
        return with_ids(self.packed, tuple)

    @property
    def load(self) -> Load:
        return Load(len(self.packed.context_ids), self.packed.n_behind(self.sample))


@dataclass(frozen=True)
class Behind(Sequence[Sample]):
    """The samples after the first `offset` ones."""

    every: Sequence[Sample]
    offset: int

    def __len__(self) -> int:
        return len(self.every) - self.offset

    def __getitem__(self, i: Any) -> Any:
        return self.every[i + self.offset]


class Preparation:
    """The samples of cells with one model, one task and the same data; cells that cannot answer one leave."""

    def __init__(self, cells: Sequence[Cell], tokenizer: Any = None) -> None:
        self.cells, self.refused = [*cells], list[Cell]()
        self.first = cells[0]
        self.tokenizer = tokenizer_of(self.first.settings) if tokenizer is None else tokenizer
        self.n_vocabulary = vocabulary_of(self.first.settings)
        self.image_ids = image_ids_of(self.first.settings)
        self.ending = Ending(self.tokenizer)
        every = self.first.task.samples(self.tokenizer)  # some tasks make them one by one
        limit, offset = self.first.settings.limit, self.first.settings.offset
        if offset >= max(1, len(every)):
            raise ConfigError(f"offset={offset} leaves none of the {len(every)} samples of {self.first.task.name}")
        self.samples = Behind(every, offset) if offset else every
        self.n = len(self.samples) if limit is None else min(limit, len(self.samples))  # that are asked
        self.variants: dict[tuple[Path, int, Frame], Variant] = {}  # by cell, prompt length and frame

    def prepare(self, place: int, sample: Sample) -> PreparedSample:
        """Prepare one sample; a cell that cannot answer it is refused, or left out of its sweep."""
        model = self.first.settings.model
        by = {"chat": model.chat, "system_prompt": model.system_prompt}
        prompt = prompt_of(self.tokenizer, sample, **by, scope=self.first.settings.scope)
        ids = [*prompt.every_id(sample)]
        check_ids(ids, self.n_vocabulary, sample, self.image_ids)
        check_window(self.first, sample, prompt)
        variants = self.variants_of(prompt)
        check_memory(self.cells, [*variants.values()], sample, prompt)
        packed = with_ids(prompt, lambda ids: array("i", ids))
        stop_ids = self.ending.stop_ids(sample, sample.is_rendered or uses_chat(self.tokenizer, sample, model.chat))
        short = shortened(sample, prompt, self.tokenizer)
        names = line_ids(sample.id, len(sample.turns))
        asked = self.first.settings
        draws = asked.sampling.draws()
        lines = {draw: tuple(draw_id(name, draw) for name in names) for draw in draws}
        lines[None] = tuple(draw_id(name, draw) for name in names for draw in draws)
        seeds = tuple(draw_seed(asked.seed, sample.id, draw or 0) for draw in draws)
        n_new, element = prompt.n_behind(sample), getattr(torch, asked.dtype).itemsize
        n_bytes = {path: variant_bytes(each, self.first.shape, n_new, element) for path, each in variants.items()}
        return PreparedSample(
            place, short, lines, len(names), prompt_hash(ids), packed, stop_ids, seeds, variants, n_bytes,
            prompt_bytes(self.first.shape, len(prompt.context_ids), element, asked.chunk),
        )  # fmt: skip

    def variants_of(self, prompt: Prompt) -> dict[Path, Variant]:
        """Each cell's variant on a prompt; a cell that has none is refused, or left out of its sweep."""
        found: dict[Path, Variant] = {}
        for cell in [*self.cells]:
            try:
                found[cell.path] = self.variant(cell, prompt)
            except ConfigError as error:
                others = (other for other in self.cells if other is not cell)
                leave_out(cell.settings, error, lambda other: self.variant(other, prompt), others)
                self.cells = [other for other in self.cells if other is not cell]
                self.refused.append(cell)
        return found

    def variant(self, cell: Cell, prompt: Prompt) -> Variant:
        """The cell's variant on prompts of this length and frame, made once."""
        key = (cell.path, len(prompt.context_ids), prompt.frame)
        if key not in self.variants:
            self.variants[key] = cell.variant(len(prompt.context_ids), prompt.frame)
        return self.variants[key]


def prepared(cells: Sequence[Cell]) -> tuple[list[PreparedSample], list[Cell]]:
    """Every sample that the cells are asked, in the task's order, and the cells that cannot answer one."""
    with tokenizing(cells[0].settings.model.name):
        preparation = Preparation(cells)
        return [preparation.prepare(i, preparation.samples[i]) for i in range(preparation.n)], preparation.refused


def with_ids(prompt: Prompt, kind: Callable[[Iterable[int]], Any]) -> Prompt:
    """The prompt with its tokens in another container."""
    feeds = {"feeds": tuple(map(kind, prompt.feeds))} if isinstance(prompt, TalkPrompt) else {}
    return replace(prompt, context_ids=kind(prompt.context_ids), question_ids=kind(prompt.question_ids), **feeds)


def shortened(sample: Sample, prompt: Prompt, tokenizer: Any) -> Sample:
    """The sample with no more of its texts than a line repeats: their ends, and what stands around the evidence."""
    context, talk = sample.texts_read, sample.conversation
    if not context and prompt.context_ids:
        context = tokenizer.decode(prompt.context_ids[-SHOWN_TOKENS:])
    around = tuple(piece for part in sample.evidence if (piece := around_of(part.strip(), context)))
    talk = talk and replace(talk, turns=tuple(replace(turn, reads=()) for turn in talk.turns))
    return replace(
        sample, context=end_of(context), question=end_of(sample.question), evidence=around, conversation=talk
    )  # fmt: skip


def end_of(text: str) -> str:
    return text if len(text) <= SHOWN else "… " + text[-SHOWN:]


def around_of(part: str, text: str) -> str:
    """A part of a text on one line, with as much before it as after it; "" where the text has no such part."""
    at = text.find(part)
    if at < 0 or not part:
        return ""
    start, stop = max(0, at - AROUND), at + len(part) + AROUND
    words = " ".join(text[start:stop].split())
    return f"{'… ' if start else ''}{words}{' …' if stop < len(text) else ''}"


def check_window(cell: Cell, sample: Sample, prompt: Prompt) -> None:
    """Raise `ConfigError` where the model's window does not hold prompt and answer, or a whole conversation."""
    window, model = cell.shape.window, cell.settings.model.name
    if isinstance(prompt, TalkPrompt):
        if len(prompt.context_ids) + prompt.n_new > window:
            raise ConfigError(
                f"sample {sample.id!r} has a context of {len(prompt.context_ids)} tokens, and its turns "
                f"put up to {prompt.n_new} behind it, more than the {window} of model {model!r}; use fewer questions, "
                "a shorter context or a longer model"
            )
    elif len(prompt) + sample.max_new_tokens > window:
        raise ConfigError(
            f"sample {sample.id!r} has {len(prompt)} tokens and an answer of up to {sample.max_new_tokens}, more than "
            f"the {window} of model {model!r}; use a shorter task or a longer model"
        )


def check_memory(cells: Sequence[Cell], variants: Sequence[Variant], sample: Sample, prompt: Prompt) -> None:
    """Raise `ConfigError` where answers that are decoded at once have more keys and values than memory has bytes.

    Without `sweep.max_variants` as few are decoded at once as memory holds. Of workers elsewhere nothing is known.
    """
    if not cells or cells[0].settings.pool is not None:
        return
    asked, shape, n_new = cells[0].settings, cells[0].shape, prompt.n_behind(sample)
    each = answers_bytes(variants, shape, n_new, getattr(torch, asked.dtype).itemsize)
    device = torch.device(asked.device)
    n_devices = torch.cuda.device_count() if asked.device_map is not None else 1
    needed = most_at_once(each * asked.sampling.n_answers, asked.max_variants)
    if needed > (has := machine_bytes(device) * n_devices):
        n = min(asked.max_variants or 1, len(each) * asked.sampling.n_answers)
        raise ConfigError(
            f"sample {sample.id!r}: keys and values of {n} answers of up to {n_new} tokens at once take "
            f"{gigabytes(needed)}, and {asked.device} has {gigabytes(has)}; give shorter answers or a smaller "
            "sweep.max_variants"
        )


def refuse_folders(asked: Iterable[tuple[Sequence[Cell], Sequence[PreparedSample]]]) -> None:
    """Raise `ConfigError` for folders that `open_folders` would refuse, before any is made."""
    for cells, samples in asked:
        for cell in cells:
            shas = {id: one.sha for one in samples for id in one.lines[cell.draw]}
            RunFolder.refuse(cell.path, cell.config, shas)
