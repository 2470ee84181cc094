"""`RowsTask`: a benchmark whose rows are published in files, a file for each of its datasets.

A task says as data where its files are and what a row holds (`place`, `fields`, `unique`, `upstream`), and writes what
is its own: `check_row`, `sample` (a row becomes a prompt) and `score`. Files are found or fetched here, read, named in
the notes where a row was left out, and hashed; rows are asked in turns, each made when it is asked for, so that `limit`
sees every dataset.

Where `task.source=embedded` draws samples, a task overrides `samples`; `self.rows` is empty then.

Not here: reading of a file (`rows.py`), where files are (`sources.py`), samples that are drawn (`lazy.py`).
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from kvbench.engine.shapes import ModelShape
from kvbench.tasks import sources
from kvbench.tasks.base import Sample, Task
from kvbench.tasks.lazy import LazySamples, in_turns
from kvbench.tasks.rows import Fields, read_rows, write_means
from kvbench.tasks.texts import digest

Row = Mapping[str, Any]


class RowsTask(Task):
    place: ClassVar[str]  # of a file below a data folder, such as "bench/{name}_{length}.jsonl": a dataset, parameters
    fields: ClassVar[Fields] = {}  # that every row has
    unique: ClassVar[str | None] = None  # the field that no two rows of a file share
    suffix: ClassVar[str | None] = None  # how files are read, where their own does not say it
    upstream: ClassVar[str]  # where the files are got
    instead: ClassVar[str] = ""  # what task.source=embedded asks in their place
    words_first: ClassVar[bool] = True  # whether the wording comes first in the hash of what was read
    means: ClassVar[Mapping[str, str]] = {}  # columns of a run's table of means, and the field that each shows
    params: Any

    def __init__(self, params: Any, data_dir: str | None, seed: int) -> None:
        self.params, self.data_dir, self.seed = params, data_dir, seed
        self.asking = getattr(params, "asking", None)
        self.data_source = params.source if params.source in ("embedded", "hub") else "local"
        self.dataset = self.title()
        self.notes: list[str] = []
        self.rows: dict[str, Sequence[tuple[int, Row]]] = {}  # of each dataset, with the numbers of their lines
        self.paths: dict[str, Path] = {}  # the file of each dataset
        self.words: Sequence[Path] = ()  # files of upstream's wording, where that is used
        self.window = 0

    # -- each task's own --

    @abstractmethod
    def title(self) -> str:
        """Which part of the benchmark is asked, as tables print it."""

    @property
    def names(self) -> Sequence[str]:
        """The datasets that are asked."""
        return getattr(self.params, "names", (self.name,))

    @property
    def most(self) -> int | None:
        """How many rows of a dataset are asked at most."""
        return getattr(self.params, "rows", None)

    @property
    def can_be_drawn(self) -> bool:
        """Whether source=embedded could ask what is asked for."""
        drawn = getattr(self.params, "drawn", None)
        return drawn is None or {*self.names} <= {*drawn}

    def prepare(self, shape: ModelShape) -> None:
        """Raise `ConfigError` where the model's window is too short; note what a reader must know."""

    def fields_of(self, name: str) -> Fields:
        """The fields that every row of a dataset has."""
        return self.fields

    def check_row(self, name: str, row: Row) -> None:
        """Raise `BadRow` for a row of a dataset that cannot be asked, beyond the types of its fields."""

    def sample(self, tokenizer: Any, name: str, number: int, row: Row) -> Sample:
        """A row of a dataset as a prompt; a task that overrides `samples` may do without."""
        raise NotImplementedError

    # -- the same for all --

    def check(self, shape: ModelShape) -> None:
        self.window, self.notes = shape.window, []
        self.prepare(shape)
        if not self.is_embedded:
            self.read()
        if self.paths or self.words:
            self.data_digest = digest(self.digested([*self.paths.values()]))

    def wording(self, file: str, upstream: str) -> list[Path]:
        """The file of upstream's wording that `task.prompts` wants; none where our own stands in."""
        path = None if self.is_embedded else sources.wanted(file, self.params.prompts, self.data_dir, upstream)
        return [path] if path else []

    def files(self, only: Sequence[str] | None = None) -> dict[str, Path]:
        """The file of each dataset, found or fetched; `only` as in `sources.obtain`."""
        wanted = {name: self.place.format(**{**vars(self.params), "name": name}) for name in self.names}
        source = self.params.source if self.data and self.data.pieces else "local"  # else nothing can be fetched
        instead = self.instead if self.can_be_drawn else ""
        found = sources.obtain(
            [*wanted.values()], source, self.data_dir, self.upstream, only=only, instead=instead
        )  # fmt: skip
        return dict(zip(wanted, found, strict=True))

    def read(self) -> None:
        """Find and read the rows, and note which of them were left out."""
        self.paths = self.paths or self.files()
        for name, file in self.paths.items():
            found = read_rows(
                file, self.fields_of(name), self.params.on_bad_row, unique=self.unique, suffix=self.suffix,
                check=partial(self.check_row, name),
            )  # fmt: skip
            self.notes += found.notes
            self.rows[name] = found.rows

    def digested(self, files: Sequence[Path]) -> Sequence[Path]:
        """The files whose content is part of a run's identity: those of the rows, and of the wording."""
        return [*self.words, *files] if self.words_first else [*files, *self.words]

    def places(self) -> list[tuple[str, int, Row]]:
        """The rows that are asked: the first of every dataset, then the second of every one."""
        return in_turns([[(name, *one) for one in rows[: self.most]] for name, rows in self.rows.items()])

    def samples(self, tokenizer: Any) -> Sequence[Sample]:
        return Made(self.places(), partial(self.sample, tokenizer))

    def artifacts(self, folder: Path, rows: Sequence[Mapping[str, Any]], title: str) -> None:
        """The task's table of means, in percent."""
        if self.means:
            write_means(folder / f"{self.name}.csv", rows, self.means)


class Made(LazySamples):
    """Samples that are made of their places, each when it is asked for."""

    def __init__(self, places: Sequence[tuple[Any, ...]], make: Callable[..., Sample]) -> None:
        self.places, self.make = places, make

    def sample(self, i: int) -> Sample:
        return self.make(*self.places[i])
