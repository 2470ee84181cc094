"""Finished runs as pandas' DataFrames: a row a sample and variant (`frame`), or a row a run (`runs`).

Draws and turns of a sample have a row each; `sample` says which belong together, and are not independent. `columns`
says what each column means and its unit, from the one declaration in `results/keys.py` and `results/schema.py`.

    run, shown_task, asked          the run's folder; its task and budget as tables print them
    sample, prompt                  whose answer a row is; by what it is paired with the same of other methods
    method.KEY, prefill.KEY, task.KEY, config.KEY    parameters, and all else that config.yaml says
    measures.KEY, timing.KEY, report.KEY             a task's other figures, its times, what the method says of it

What was never measured is missing. Names have few values and are categories. Whoever has many runs waits once: what
was read is kept as one Parquet file in the cache folder, and folders that did not change are taken from it. A Parquet
file that `kvbench export` wrote can be named in place of folders.

Not here: tables for people (`kvbench table`).
"""
# pyright: basic

import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from kvbench import checkout
from kvbench.engine.errors import ConfigError
from kvbench.engine.foreign import cache_home, one_line
from kvbench.engine.terminal import console
from kvbench.results.files import replacing
from kvbench.results.keys import FIELDS, LEDGER, Key
from kvbench.results.ledger import pyarrow
from kvbench.results.read import Whole, read_whole
from kvbench.results.schema import RunResult, SampleRow

if TYPE_CHECKING:
    from pandas import DataFrame

RESULT = "result.json"
STAMPED = (RESULT, "samples.jsonl", "scores.jsonl", "config.yaml")  # files that a row is made of
MANY = 20_000  # rows, from which on they are kept in the cache folder
MANY_FOLDERS = 100  # that were read, for which the same holds
BAR = 50  # folders, from which on a terminal has a bar
OF_RUNS = (  # what identifies a run, in addition to each of its samples
    *("method", "method_label", "task", "model", "ratio", "ratio_exact", "budget", "memory_exact", "comm_exact"),
    *("prefill", "allocator", "reuse", "keeping", "protocol", "seed", "dtype", "device", "data_source", "task_version"),
    *("score_version", "adapts", "simulated", "key_share", "notes", "config_hash"),
)
OWN = {  # columns that no file has
    "run": Key("folder of the run"),
    "shown_task": Key(
        "the task as tables print it: a set of ours that stands in for a benchmark has a name of its own"
    ),
    "asked": Key("the budget in words: `ratio 0.2`, `256 tokens`, `memory 1/8`"),
    "sample": Key("sample that the row is of: the cluster of its turns and draws"),
    "prompt": Key("by what an answer is paired with other methods': the hash of its prompt, of turns the sample"),
    "checkpoint": Key("digest of the model's files"),
    "nulls": Key("parameters of the run that are null: in their columns they look like those that it does not have"),
}
NESTED = {"measures": "measures", "timing": "timing", "method_report": "report"}


@cache
def declared() -> dict[str, Key]:
    """Every column whose name is fixed, and what it means."""
    found = dict(OWN)
    for kind in (RunResult, SampleRow):
        hints = get_type_hints(kind, include_extras=True)
        found |= {name: hint.__metadata__[0] for name, hint in hints.items() if hasattr(hint, "__metadata__")}
    return found | LEDGER | {name: key for name, (key, _) in FIELDS.items()}


def frame(*folders: Path | str, left_out: list[str] | None = None) -> "DataFrame":
    """A row a sample of each finished run in or below the folders, or of a Parquet file; of `runs/` without any.

    Raises `ConfigError` for a run that is damaged; with a list as `left_out` such a run is named there instead.
    """
    return to_pandas(table_of_all(folders, left_out, of_samples, "samples"))


def runs(*folders: Path | str, left_out: list[str] | None = None) -> "DataFrame":
    """A row a finished run in or below the folders; of `runs/` where none is given."""
    return to_pandas(table_of_all(folders, left_out, of_run, "runs"))


def columns(table: "DataFrame") -> "DataFrame":
    """A frame's columns: name, unit, meaning, and how many rows have a value."""
    from pandas import DataFrame

    known, counts = declared(), table.count()
    units = [known[str(name)].unit if name in known else "" for name in table]
    words = [known[str(name)].about if name in known else "" for name in table]
    return DataFrame({"column": [*table], "unit": units, "about": words, "rows": [*counts]})


# --- folders ---------------------------------------------------------------------------------------


class NoRuns(ConfigError):
    """A folder that holds no finished run."""


def found(folders: Iterable[Path | str], left_out: list[str] | None = None) -> Iterator[Path]:
    """The folder of every finished run, each once; `NoRuns` for a folder that has none. No link is followed.

    Folders that cannot be read are named in `left_out`.
    """
    known = set[Path]()

    def unreadable(error: OSError) -> None:
        if left_out is not None:
            left_out.append(one_line(f"{error.filename} cannot be read ({error.strerror})"))

    for folder in map(Path, folders or (checkout.runs(),)):
        walked = os.walk(folder.expanduser(), onerror=unreadable if folder.exists() else None)
        inside = sorted(Path(at) for at, _, names in walked if RESULT in names)
        if not inside:
            raise NoRuns(f"no finished run in or below {folder}; give the folder of a run, or one that holds some")
        for one in inside:
            if (real := one.resolve()) not in known:
                known.add(real)
                yield one


def table_of_all(folders: Sequence[Path | str], left_out: list[str] | None, of: Any, level: str) -> Any:
    pa, pq = pyarrow()
    files = [Path(one) for one in folders if Path(one).is_file()]
    if files and len(files) == len(folders):
        try:
            return together([pq.read_table(file, partitioning=None) for file in files])
        except (pa.ArrowException, OSError) as error:
            raise ConfigError(one_line(f"{', '.join(map(str, files))} cannot be read as Parquet: {error}")) from None
    inside = list(found(folders, left_out))
    kept, stamps = Kept(inside, level), {str(folder): stamp(folder) for folder in inside}
    tables = [kept.table] if kept.table is not None else []
    new = 0
    others = [folder for folder in inside if stamps[str(folder)] != kept.stamps.get(str(folder))]
    for folder in watched(others):
        try:
            table = of(folder, read_whole(folder))
        except (ValueError, OSError) as error:
            if left_out is None:
                raise ConfigError(f"{folder} cannot be read: {error}") from None
            left_out.append(one_line(str(error)))
            del stamps[str(folder)]
            continue
        new += len(table)
        tables.append(table)
    if not tables:
        return pa.table({})
    made = together(tables)
    if new >= MANY or len(others) >= MANY_FOLDERS:
        kept.keep(made, stamps)
    return made


def watched(folders: Sequence[Path]) -> Iterable[Path]:
    """The folders, with a bar on a terminal where they are many."""
    if len(folders) < BAR or not sys.stderr.isatty():
        return folders
    from rich.progress import track

    return track(folders, "Reading runs", console=console(stderr=True), transient=True)


# --- rows ------------------------------------------------------------------------------------------


def of_samples(folder: Path, whole: Whole) -> Any:
    """The samples of one run."""
    result, rows, config = whole
    flat = [of_sample(row) for row in rows]
    names = dict.fromkeys(name for row in flat for name in row)
    lines = {name: [row.get(name) for row in flat] for name in names}
    if "dataset" not in lines:
        lines["dataset"] = [result.dataset] * len(rows)
    else:
        lines["dataset"] = [result.dataset if name is None else str(name) for name in lines["dataset"]]
    shared = of_folder(folder, result, config) | {key: getattr(result, key) for key in OF_RUNS}
    shared |= of_settings(result, config)
    clashing = {name: f"sample.{name}" for name in lines if name in shared}  # a task's own column called "model"
    return arrow(shared, {clashing.get(name, name): values for name, values in lines.items()}, len(rows))


def of_sample(row: SampleRow) -> dict[str, Any]:
    """The line, its ledger and what a task or method adds side by side; what is nested more deeply is left out."""
    flat: dict[str, Any] = {
        "sample": row.sample_id,
        "prompt": row.sample_id if "turn" in row.fields else row.prompt_sha256,
    }
    for key, value in row.to_dict().items():
        if key == "ledger":
            flat |= value
        elif key in NESTED and isinstance(value, Mapping):
            flat |= {f"{NESTED[key]}.{name}": one for name, one in value.items() if not isinstance(one, list | dict)}
            quartiles = {name: one for name, one in value.items() if name.endswith("_q") and isinstance(one, list)}
            for i, end in ((1, 0), (3, -1)):
                flat |= {f"{NESTED[key]}.{name}{i}": ends[end] for name, ends in quartiles.items() if ends}
        elif key not in flat and not isinstance(value, dict):
            flat[key] = value
    return flat


def of_run(folder: Path, whole: Whole) -> Any:
    result, _, config = whole
    low, high = result.score_ci95 or (None, None)
    facts = {spec.name: getattr(result, spec.name) for spec in fields(result)}
    plain = {key: value for key, value in facts.items() if not isinstance(value, dict | list)}
    measures = {f"measures.{key}": value for key, value in (result.measures or {}).items()}
    versions = {f"versions.{key}": value for key, value in result.versions.items()}
    head = of_folder(folder, result, config) | {"score_low": low, "score_high": high} | plain
    return arrow(head | measures | of_settings(result, config) | versions, {}, 1)


def of_folder(folder: Path, result: RunResult, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "run": str(folder), "shown_task": result.shown_task, "asked": result.asked,
        "checkpoint": config.get("model_digest"),
    }  # fmt: skip


def of_settings(result: RunResult, config: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of method, prefill and task, and all other keys of config.yaml."""
    task = config.get("task")
    params = task.get("params") if isinstance(task, Mapping) else None
    own = {"method": result.params, "prefill": result.prefill_params, "task": params or {}}
    found = {f"{kind}.{key}": value for kind, each in own.items() for key, value in each.items()}
    found["nulls"] = " ".join(key for key, value in found.items() if value is None) or None
    return found | {f"config.{key}": value for key, value in flattened(config) if ".params." not in key}


def flattened(node: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


# --- columns of Arrow, which take a byte for a name and hold no Python object ---------------------------


def arrow(shared: Mapping[str, Any], lines: Mapping[str, Sequence[Any]], n: int) -> Any:
    pa, _ = pyarrow()
    every = {name: repeated(value, n) for name, value in shared.items() if value is not None}
    every |= {name: array(values, name) for name, values in lines.items()}
    return pa.table({name: column for name, column in every.items() if column.null_count < n})


def repeated(value: Any, n: int) -> Any:
    pa, _ = pyarrow()
    if isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < 1 << 63):
        return pa.array([value] * n)
    return pa.DictionaryArray.from_arrays(pa.array([0] * n, pa.int32()), pa.array([as_text(value)]))


def array(values: Sequence[Any], name: str) -> Any:
    pa, _ = pyarrow()
    kinds = set(map(type, values)) - {type(None)}
    if kinds <= {int, float} and kinds:
        if kinds == {int} and all(value is None or abs(value) < 1 << 63 for value in values):
            return pa.array(values, pa.int64())
        return pa.array([None if value is None else float(value) for value in values], pa.float64())
    if kinds == {bool}:
        return pa.array(values, pa.bool_())
    texts = pa.array([None if value is None else as_text(value) for value in values], pa.string())
    key = declared().get(name)
    return texts if key is not None and key.is_long else texts.dictionary_encode()


def as_text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text.encode("utf-8", "replace").decode()  # a text may hold half a character


def together(tables: Sequence[Any]) -> Any:
    """One table of all; a column that is of numbers in some runs and of texts in others is of texts."""
    pa, _ = pyarrow()
    kinds: dict[str, set[Any]] = {}
    for table in tables:
        for column in table.schema:
            kinds.setdefault(column.name, set()).add(column.type)
    wanted = {name: kind_of(each) for name, each in kinds.items() if len(each) > 1}
    made = []
    for table in tables:
        for i, column in enumerate(table.schema):
            if (kind := wanted.get(column.name)) is not None and column.type != kind:
                table = table.set_column(i, column.name, cast_to(table[column.name], kind))
        made.append(table)
    return pa.concat_tables(made, promote_options="default").unify_dictionaries()


def kind_of(kinds: Iterable[Any]) -> Any:
    pa, _ = pyarrow()
    each = [*kinds]
    if all(pa.types.is_integer(kind) or pa.types.is_floating(kind) for kind in each):
        return pa.float64()
    return pa.string() if pa.string() in each else pa.dictionary(pa.int32(), pa.string())


def cast_to(column: Any, kind: Any) -> Any:
    pa, _ = pyarrow()
    if not pa.types.is_dictionary(kind):
        return column.cast(kind)
    texts = column.cast(pa.string()) if not pa.types.is_dictionary(column.type) else column
    return texts if pa.types.is_dictionary(texts.type) else texts.dictionary_encode()


def to_pandas(table: Any) -> "DataFrame":
    """Flags that are missing in places stay flags."""
    from pandas import BooleanDtype

    pa, _ = pyarrow()
    flags = {pa.bool_(): BooleanDtype()}
    return table.to_pandas(types_mapper=flags.get, split_blocks=True, self_destruct=True)


# --- what was read before ----------------------------------------------------------------------------


def stamp(folder: Path) -> str:
    """What changes when a file of a run does."""
    words = [str(sorted(declared().items()))]
    for name in STAMPED:
        try:
            at = (folder / name).stat()
            words.append(f"{name} {at.st_mtime_ns} {at.st_ctime_ns} {at.st_size} {at.st_ino}")
        except OSError:
            continue
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:16]


class Kept:
    """The rows of folders that were read before and are as they were; of a file that cannot be read there are none."""

    def __init__(self, folders: Sequence[Path], level: str) -> None:
        root = os.path.commonpath([folder.absolute() for folder in folders])
        name = hashlib.sha256(root.encode("utf-8", "surrogateescape")).hexdigest()[:16]
        self.path = cache_home() / f"frames-{os.geteuid()}" / f"{name}-{level}.parquet"
        self.table: Any = None
        self.stamps: dict[str, str] = {}
        if self.path.is_symlink() or not self.path.is_file() or self.path.stat().st_uid != os.geteuid():
            return
        pa, pq = pyarrow()
        try:
            table = pq.read_table(self.path, partitioning=None)
            stamps = json.loads(table.schema.metadata[b"stamps"])
        except (pa.ArrowException, OSError, ValueError, KeyError, TypeError):
            return
        same = {str(f): at for f in folders if (at := stamps.get(str(f))) is not None and at == stamp(f)}
        if len(same) < len(stamps):
            compute = import_module("pyarrow.compute")
            table = table.filter(compute.is_in(table["run"].cast(pa.string()), pa.array(same, pa.string())))
        self.table, self.stamps = (table if len(table) else None), same

    def keep(self, table: Any, stamps: Mapping[str, str]) -> None:
        """A cache folder that cannot be written to costs the time and nothing else."""
        _, pq = pyarrow()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self.path) as file:
                pq.write_table(table.replace_schema_metadata({"stamps": json.dumps(stamps)}), file, compression="zstd")
        except OSError:
            return
