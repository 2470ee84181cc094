"""`kvbench.compare`: methods side by side, from Python.

    import kvbench

    table = kvbench.compare("smollm2-135m", ["full", "snapkv", "path/to/mine.py"], ratio=[0.1, 0.2], task="needle")
    table[["method_label", "ratio", "score"]]

What it does is what the command line does with the same words: runs go to folders, and those that are finished are not
run again. A list is swept; every other value stands for all cells.

Not here: how anything is run (`kvbench/run.py`), the columns (`results/frame.py`).
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.engine.declared import word
from kvbench.engine.errors import ConfigError

if TYPE_CHECKING:
    from pandas import DataFrame

FIRST = (  # columns that a reader looks at first
    *("method_label", "asked", "score", "score_low", "score_high", "n_samples", "tokens_attended_mean"),
    *("bytes_resident_device", "bytes_resident_host", "moved_bytes_per_step", "bytes_index_read_per_step"),
    *("prefill_s", "tpot_s", "task", "dataset", "model"),
)


def compare(model: str, methods: "Sequence[str | Path | type]", **keys: Any) -> "DataFrame":
    """Run every method at every budget and give a row a run, as `results.frame.runs` has them.

    `model` and `methods` are what `model=` and `method=` take: names and paths. A method may be a class as well, of a
    file or of a notebook's cell.
    `keys` are those of the command line, such as `ratio`, `memory`, `task`, `limit`, `out`; those with a point in their
    name stand in a dict: `**{"task.lengths": [1000]}`. What is refused there raises `ConfigError` here.
    """
    from kvbench.evals import outside
    from kvbench.evals.overrides import check_overrides
    from kvbench.results.frame import runs
    from kvbench.run import compose_and_run

    if isinstance(methods, str) or not methods:
        raise ConfigError(f"methods={methods!r} is no list of methods; give one, such as ['full', 'snapkv']")
    swept = {"method": [outside.word_of(one) if isinstance(one, type) else str(one) for one in methods]} | keys
    words = ["-m", f"model={word(model)}", *(f"{key}={values(key, value)}" for key, value in swept.items())]
    with as_command(words):
        done = compose_and_run(check_overrides(words))
    table = runs(*(folder for folder, _ in dict(done).items()))
    first = [name for name in FIRST if name in table]
    return table.loc[:, first + [name for name in table if name not in first]]


def values(key: str, value: Any) -> str:
    """The words of a key's values; a list at the top is a sweep, but for keys of a group, whose lists are one value."""
    if isinstance(value, list | tuple) and "." not in key:
        return ",".join(map(word, value))
    return word(value)


@contextmanager
def as_command(words: Sequence[str]) -> Iterator[None]:
    """Hydra reads the process's own words, and prints errors of ours where it is not told to raise them."""
    before, full = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv, os.environ["HYDRA_FULL_ERROR"] = ["kvbench", *words], "1"
    try:
        yield
    finally:
        sys.argv = before
        if full is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full
