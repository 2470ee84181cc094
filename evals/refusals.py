"""What becomes of a cell that is refused: named, left out of its sweep, or the end of the command.

Not here: what is refused, and why (`methods/combinations.py`, `evals/cells.py`, `evals/prepare.py`).
"""

import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from traceback import extract_tb
from typing import Any, TypeVar

from kvbench.engine.errors import ConfigError, RunError, said
from kvbench.engine.terminal import say
from kvbench.evals.outside import file_of
from kvbench.evals.settings import POOLS, Settings

S = TypeVar("S")


def leave_out(settings: Settings, error: ConfigError, check: Callable[[S], object], others: Iterable[S]) -> None:
    """Say which cell a sweep goes on without; raise what refuses it where the sweep stops at such a cell.

    Where the same `check` does not refuse all others, what is raised says how to run these.
    """
    if settings.skips_refused:
        say(f"left out: {error}", file=sys.stderr)
    elif settings.is_sweep and any(passes(check, one) for one in others):
        raise ConfigError(f"{error}; sweep.refused=skip runs the other cells without this one") from None
    else:
        raise error


def passes(check: Callable[[S], object], one: S) -> bool:
    try:
        check(one)
    except ConfigError:
        return False
    return True


def check_pool(cells: Iterable[Settings]) -> None:
    """Raise `ConfigError` where the package of a launcher is not installed."""
    kinds = {type(cell.pool) for cell in cells}
    for launcher, kind in POOLS.items():
        if kind in kinds:
            refuse_missing_package(kind.package, f"hydra/launcher={launcher}")


def refuse_missing_package(package: str, key: str) -> None:
    """Raise `ConfigError` where what a key asks for takes a package that is not installed."""
    if find_spec(package) is None:
        raise ConfigError(
            f"{key} needs the package {package}, which is not installed; run pip install -c constraints.txt {package}"
        )


def refuse_nothing_left(left: Collection[Any]) -> None:
    if not left:
        raise ConfigError("every cell of this sweep is left out; the sentences above say why")


@contextmanager
def naming(settings: Settings) -> Iterator[None]:
    """Name the method and its budget in what is refused."""
    try:
        with staying([settings.method.target]):
            yield
    except ConfigError as error:
        raise CellRefused(settings, f"{error}") from None


class CellRefused(ConfigError):
    """A refusal of one cell, which may be one of several."""

    def __init__(self, settings: Settings, sentence: str) -> None:
        super().__init__(f"method={settings.method.name} {settings.budget.label()}: {sentence}")
        self.settings = settings

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str]]:
        """Sent from a worker it is a sentence."""
        return ConfigError, (str(self),)


@contextmanager
def staying(targets: Iterable[str]) -> Iterator[None]:
    """Let nothing end the process where methods run: run.py would say that all is done."""
    try:
        yield
    except SystemExit as error:
        raise who_left(error, targets) from error


def who_left(error: SystemExit, targets: Iterable[str]) -> RunError:
    """A method that ends the process: the files among `targets` that the way there led through, else a guess."""
    files = dict.fromkeys(file for target in targets if (file := file_of(target)))
    frames = {frame.filename for frame in extract_tb(error.__traceback__)}
    way = [f"{file}, {said(error, {file})}" for file in files if file in frames]
    return RunError(
        f"{' and '.join(way) or 'something that was called raised SystemExit'}: a method must not end the process; "
        "raise an exception that says what is wrong"
    )
