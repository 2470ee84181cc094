"""Samples that are made when they are asked for, and drawn samples that fill a length.

A drawn sample has a number of units (noise lines, records, words …). A task says what a unit is and draws a sample of n
of them; how many fill a length depends on the tokenizer, so it is tried out here.

Not here: what a sample holds (each task).
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, TypeVar

from kvbench.engine.errors import ConfigError
from kvbench.tasks.base import Sample
from kvbench.tasks.prompt import encode

T = TypeVar("T")


def in_turns(columns: Sequence[Sequence[Any]]) -> list[Any]:
    """The first of each column, then the second of each, and so on; shorter columns end earlier."""
    turns = zip_longest(*columns)
    return [one for turn in turns for one in turn if one is not None]


def most_units(n_tokens: Callable[[int], int], limit: int, fewest: int, guess: int) -> int | None:
    """The most units that fit into `limit` tokens, of which more take more; None where the fewest do not fit.

    A good guess, such as what fitted another sample, saves tries.
    """
    if n_tokens(fewest) > limit:
        return None
    low, high, step = fewest, max(fewest + 1, guess), max(1, guess // 64)
    while n_tokens(high) <= limit:
        low, high, step = high, high + step, 2 * step
    back = 1
    while low == fewest and high - back > fewest:
        if n_tokens(high - back) <= limit:
            low = high - back
        else:
            high, back = high - back, 2 * back
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if n_tokens(middle) <= limit else (low, middle)
    return low


class LazySamples(Sequence[Sample]):
    """A sequence whose samples are made one by one: all of them at once could fill the memory."""

    places: Sequence[Any]  # what each sample is made from

    def __len__(self) -> int:
        return len(self.places)

    @abstractmethod
    def sample(self, i: int) -> Sample:
        """Sample number i, from 0."""

    def __getitem__(self, i: Any) -> Any:
        numbers = range(len(self))[i]
        return self.sample(numbers) if isinstance(numbers, int) else [self.sample(j) for j in numbers]


class Drawn(LazySamples):
    """The first sample of every cell, then the second of every one, each with as many units as its length holds.

    A cell is what its samples share; a length in tokens stands last in it. A place is a cell and a number.
    """

    fewest = 1  # units of a sample
    of_fewest = "one unit"  # what a length is too short for, in words
    per_unit = 40  # tokens that a unit takes, as a first guess

    def __init__(self, task: Any, tokenizer: Any, cells: Mapping[tuple[Any, ...], int]) -> None:
        """`cells` says how many samples each has."""
        self.task, self.tokenizer, self.cells = task, tokenizer, cells
        self.places = in_turns([[(*cell, number) for number in range(n)] for cell, n in cells.items()])
        self.fitted: dict[Any, int] = {}  # units that filled a length last, which are near the next sample's

    def draw(self, *place_and_units: Any) -> Sample:
        """The sample of a place with so many units; who fills otherwise has none."""
        raise NotImplementedError

    def size(self, sample: Sample) -> int:
        """Tokens that count against the length."""
        return n_tokens(self.tokenizer, sample) + sample.max_new_tokens

    def sample(self, i: int) -> Sample:
        place = self.places[i]
        units = self.filling(place[-2], lambda n: self.size(self.draw(*place, n)), self.fewest)
        if units is None:
            raise ConfigError(f"task.lengths={place[-2]} is too short for {self.of_fewest}; give more tokens")
        return self.draw(*place, units)

    def filling(self, length: int, size: Callable[[int], int], fewest: int, key: Any = None) -> int | None:
        """The most units that the length holds; None where the fewest do not fit. `key`: whose units are near."""
        units = most_units(size, length, fewest, self.fitted.get(key or length) or length // self.per_unit)
        if units is not None:
            self.fitted[key or length] = units
        return units


class Alike(Drawn):
    """Cells, each of a dataset and a length, whose samples are alike: the first one says how many units fit.

    Another one whose units are longer takes fewer of them.
    """

    @abstractmethod
    def least(self, dataset: str) -> int:
        """Units that a sample of this dataset needs."""

    @abstractmethod
    def surplus(self, units: int, excess: int) -> int:
        """How many units to leave out of a sample that has `excess` tokens too many; at least one is."""

    def sample(self, i: int) -> Sample:
        dataset, length, number = self.places[i]
        least = self.least(dataset)
        if dataset not in self.fitted and self.size(self.draw(dataset, length, 0, least)) <= length:
            self.fitted[dataset] = doubled(lambda n: self.size(self.draw(dataset, length, 0, n)) <= length, least)
        units = self.fitted.get(dataset, 0)
        while units >= least:
            sample = self.draw(dataset, length, number, units)
            excess = self.size(sample) - length
            if excess <= 0:
                return sample
            units -= max(1, self.surplus(units, excess))
        raise ConfigError(
            f"task.length={length} is too short for {dataset}; give more tokens, or leave it out of task.datasets"
        )


def doubled(fits: Callable[[int], bool], fewest: int, part: int | None = None) -> int:
    """The most units that fit, of which the fewest do; exactly, or to a part of them."""
    low, high = fewest, 2 * fewest
    while fits(high) and high < 1 << 20:
        low, high = high, 2 * high
    while high - low > max(1, low // part if part else 0):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def fitting(rows: Iterable[T], most: int | None, make: Callable[[T], Sample | None]) -> tuple[list[Sample], int]:
    """The first samples that are made, and how many before the last of them are None, since they do not fit."""
    found, left_out = list[Sample](), 0
    for row in rows:
        if len(found) == most:
            break
        sample = make(row)
        if sample is None:
            left_out += 1
        else:
            found.append(sample)
    return found, left_out


def note_left_out(notes: list[str], n: int, what: str, room: int, of: str = "") -> None:
    """Say how many do not fit; once, however often samples are made."""
    note = f"{of}{n} {what} left out that do not fit {room} tokens"
    if n and note not in notes:
        notes.append(note)


def n_tokens(tokenizer: Any, sample: Sample) -> int:
    """Tokens of a sample's prompt, chat template included."""
    return len(encode(tokenizer, sample, chat="auto", system_prompt="", scope="full_prompt"))
