"""Parameters that several tasks share: their types, names of datasets, and room for a prompt.

Not here: how types are read (`engine/declared.py`), and what a single task asks for (its own `Params`).
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge

from kvbench.engine.declared import Count, Once
from kvbench.engine.errors import ConfigError
from kvbench.engine.shapes import ModelShape

OnBadRow = Literal["refuse", "skip"]  # what becomes of a row that cannot be used
Prompts = Literal["auto", "official", "own"]  # auto: upstream's wording if it is there
Counts = Annotated[tuple[Count, ...], Once()]
Lengths = Annotated[tuple[Annotated[int, Ge(500)], ...], Once()]  # in tokens
SLACK = 100  # tokens kept free for a chat wrapper, and for what a second tokenising may add


def chosen(datasets: str | tuple[str, ...], lists: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """The datasets that `task.datasets` names, one by one or by the name of a list."""
    return lists.get(datasets, (datasets,)) if isinstance(datasets, str) else datasets


class OfDatasets:
    """Parameters of a task that has several datasets."""

    source: str
    datasets: str | tuple[str, ...]  # names, or that of a list of them
    lists: ClassVar[Mapping[str, tuple[str, ...]]]
    drawn: ClassVar[Sequence[str] | None] = None  # what source=embedded draws; None: all, or there is no such source

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the chosen datasets."""
        return chosen(self.datasets, self.lists)

    @property
    def listed(self) -> str:
        """One name for the chosen datasets together."""
        return self.datasets if isinstance(self.datasets, str) else "+".join(self.names)

    def __post_init__(self) -> None:
        if self.source == "embedded" and self.drawn is not None:
            if other := next((name for name in self.names if name not in self.drawn), None):
                drawn = f"{', '.join(self.drawn[:-1])} and {self.drawn[-1]}"
                raise ConfigError(
                    f"task.source=embedded draws {drawn} only, not {other}; leave it out of task.datasets, or choose "
                    "another source"
                )


def check_length(length: int, shape: ModelShape) -> None:
    """Generated rows of `task.length` tokens fit into the model's window."""
    if length > shape.window:
        raise ConfigError(
            f"task.length={length} is more than the {shape.window} tokens of {shape.name}; give that or less"
        )


def check_lengths(lengths: Sequence[int], shape: ModelShape) -> None:
    """Drawn samples of `task.lengths` tokens fit into the model's window."""
    if max(lengths) > shape.window:
        raise ConfigError(
            f"task.lengths={list(lengths)} asks for more than the {shape.window} tokens of {shape.name}; give shorter "
            "ones"
        )


def prompt_room(window: int, n_new: int) -> int:
    """Tokens that a window leaves for the prompt, besides an answer of up to `n_new`."""
    return window - n_new - SLACK


def check_room(kind: str, name: str, n_new: int, limit: int | None, shape: ModelShape) -> None:
    """The window holds the longest answer of this dataset and a prompt of `task.max_prompt_tokens`.

    `kind` says what the benchmark calls its datasets.
    """
    room = prompt_room(shape.window, n_new)
    if room < 2 * SLACK or (limit or 0) > room:
        raise ConfigError(
            f"{name} answers with up to {n_new} tokens, which leaves {max(room, 0)} of the "
            f"{shape.window} of {shape.name} for the prompt"
            + (f", not task.max_prompt_tokens={limit}" if limit else "")
            + f"; give smaller ones, or leave the {kind} out of task.datasets"
        )
