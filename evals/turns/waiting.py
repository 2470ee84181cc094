"""`Waiting`: a sample that was checked and encoded, and has not been asked.

Not here: who asks it (`evals/loop.py`).
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from engine.budget import Frame
from engine.checks import gigabytes
from engine.errors import ConfigError
from engine.sampling.spec import draw_id
from engine.width import answers_bytes, machine_bytes, most_at_once
from evals.cells import Cell
from evals.screen.estimate import Load
from evals.turns.encode import TalkPrompt
from methods.variant import Variant
from results import RunFolder
from tasks.base import Sample
from tasks.prompt import Prompt
from tasks.turns.conversation import line_ids


@dataclass(frozen=True)
class Waiting:
    """A sample that some cell has not answered: checked and encoded.

    Tokens are packed, because tuples take nine times as much memory and all of a task's prompts may wait at once; for
    the same reason only the ends of its texts are left.
    """

    place: int  # in the task's order
    sample: Sample
    sha: str  # of the prompt
    context_ids: "array[int]"
    question_ids: "array[int]"
    frame: Frame
    feeds: "tuple[array[int], ...]" = ()  # of a sample with turns
    n_new: int = 0  # tokens that may follow its context at once
    change_ids: tuple[int, ...] = ()  # between an answer and the next question
    end_id: int | None = None  # behind an answer

    @classmethod
    def of(cls, place: int, sample: Sample, sha: str, prompt: Prompt) -> Self:
        ids = array("i", prompt.context_ids), array("i", prompt.question_ids)
        if not isinstance(prompt, TalkPrompt):
            return cls(place, sample, sha, *ids, prompt.frame)
        feeds = tuple(array("i", feed) for feed in prompt.feeds)
        return cls(place, sample, sha, *ids, prompt.frame, feeds, prompt.n_new, prompt.change_ids, prompt.end_id)

    @property
    def prompt(self) -> Prompt:
        parts = tuple(self.context_ids), tuple(self.question_ids), self.frame
        if not self.feeds:
            return Prompt(*parts)
        return TalkPrompt(*parts, tuple(tuple(feed) for feed in self.feeds), self.n_new, self.change_ids, self.end_id)

    @property
    def line_ids(self) -> list[str]:
        return line_ids(self.sample.id, len(self.feeds))

    @property
    def load(self) -> Load:
        n_new = self.n_new or len(self.question_ids) + self.sample.max_new_tokens
        return Load(len(self.context_ids), n_new)


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
    asked, shape = cells[0].settings, cells[0].shape
    n_new = prompt.n_new if isinstance(prompt, TalkPrompt) else len(prompt.question_ids) + sample.max_new_tokens
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


def line_ids_of(one: Waiting, cell: Cell) -> list[str]:
    """What the lines of a sample are called: one, or one for each turn, for each draw."""
    return [draw_id(id, draw) for id in one.line_ids for draw in cell.settings.sampling.draws()]


def refuse_folders(asked: Iterable[tuple[Sequence[Cell], Sequence[Waiting]]]) -> None:
    """Raise `ConfigError` for folders that `open_folders` would refuse, before any is made."""
    for cells, samples in asked:
        for cell in cells:
            shas = {id: one.sha for one in samples for id in line_ids_of(one, cell)}
            RunFolder.refuse(cell.path, cell.config, shas)
