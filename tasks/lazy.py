"""Samples that are made when they are asked for, and drawn samples that fill a length.

A drawn sample has a number of units (noise lines, records, words …). A task says what a unit is and draws a sample of n
of them; how many fill a length depends on the tokenizer, so it is tried out here.

Not here: what a sample holds (each task).
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
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

    A cell is what its samples share; a length in tokens stands last in it.
    """

    fewest = 1  # units of a sample
    of_fewest = "one unit"  # what a length is too short for, in words
    per_unit = 40  # tokens that a unit takes, as a first guess

    def __init__(self, task: Any, tokenizer: Any, cells: Sequence[tuple[Any, ...]], rows: int) -> None:
        self.task, self.tokenizer = task, tokenizer
        self.places = in_turns([[(*cell, number) for number in range(rows)] for cell in cells])
        self.fitted: dict[Any, int] = {}  # units of the last sample of a length, which are near the next one's

    def draw(self, *place_and_units: Any) -> Sample:
        """The sample of a place, which is a cell and a number, with so many units; who fills otherwise has none."""
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

    def filling(self, length: int, size: Callable[[int], int], fewest: int) -> int | None:
        """The most units that the length holds; None where the fewest do not fit."""
        units = most_units(size, length, fewest, self.fitted.get(length) or length // self.per_unit)
        if units is not None:
            self.fitted[length] = units
        return units


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


class FilledSamples(LazySamples):
    """Generated samples of several datasets, each with as many units as `length` tokens hold, answer included.

    The first sample of a dataset says how many units fit. Another one whose units are longer takes fewer of them.
    """

    def __init__(self, tokenizer: Any, length: int, datasets: Sequence[str]) -> None:
        self.tokenizer, self.length = tokenizer, length
        self.datasets = datasets  # of each sample
        self.most: dict[str, int] = {}  # units, by dataset

    @abstractmethod
    def fewest(self, dataset: str) -> int:
        """Units that a sample of this dataset needs."""

    @abstractmethod
    def draw(self, i: int, units: int) -> Sample:
        """Sample number i with so many units."""

    @abstractmethod
    def surplus(self, units: int, excess: int) -> int:
        """How many units to leave out of a sample that has `excess` tokens too many; at least one is."""

    def sample(self, i: int) -> Sample:
        dataset = self.datasets[i]
        if dataset not in self.most:
            self.most[dataset] = self._most(dataset)
        units = self.most[dataset]
        while units >= self.fewest(dataset):
            sample = self.draw(i, units)
            excess = self._excess(sample)
            if excess <= 0:
                return sample
            units -= max(1, self.surplus(units, excess))
        raise self._too_short(dataset)

    def _most(self, dataset: str) -> int:
        """The largest number of units that fits, found on the dataset's first sample."""
        first, low = self.datasets.index(dataset), self.fewest(dataset)

        def fits(units: int) -> bool:
            return self._excess(self.draw(first, units)) <= 0

        if not fits(low):
            raise self._too_short(dataset)
        high = low
        while fits(high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def _excess(self, sample: Sample) -> int:
        """Tokens of prompt and answer beyond the length."""
        prompt = encode(self.tokenizer, sample, chat="auto", system_prompt="", scope="full_prompt")
        return len(prompt) + sample.max_new_tokens - self.length

    def _too_short(self, dataset: str) -> ConfigError:
        return ConfigError(
            f"task.length={self.length} is too short for {dataset}; give more tokens, or leave it out of task.datasets"
        )
