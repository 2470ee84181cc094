"""A task of the user's own: rows, a prompt and a score, in one YAML file.

    rows: mine.jsonl                             # next to this file; or a hub dataset, with revision and split
    context: "{text}\\n\\n"
    question: "Question: {question}\\nAnswer:"
    references: answer                           # a field: a text, a number or a list of them
    score: contains                              # a name of `scorers.py`

A name in braces is a field of the row, with dots below another one (`{answers.text}`); a list's texts are put on lines.
Other braces stay as they are. Values may be set on the command line like any task's (`task.max_new_tokens=64`).

Not here: how a command line finds the file, and what of it identifies a run (`evals/outside.py`).
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar

import yaml

from kvbench.engine.declared import Count, Named
from kvbench.engine.errors import ConfigError, first_line, unknown_name
from kvbench.engine.foreign import read_text
from kvbench.engine.shapes import ModelShape
from kvbench.tasks.base import Sample
from kvbench.tasks.checks import OnBadRow
from kvbench.tasks.download import cache_root, replaced
from kvbench.tasks.own.scorers import SCORERS
from kvbench.tasks.published import Row, RowsTask
from kvbench.tasks.rows import BadRow

FIELD = re.compile(r"\{([^\W\d][\w.-]*)\}")
KINDS = (".jsonl", ".json")
HUB = re.compile(r"[\w.-]+/[\w.-]+")
TEMPLATES = ("context", "question", "answer_prefix")


class NamesField:
    """A template with a field of the rows in it."""

    def holds(self, value: str) -> bool:
        return FIELD.search(value) is not None

    def refusal(self, key: str, value: str) -> str:
        return f"{key}={value!r} names no field of the rows; write one, like {{text}}"


@dataclass(frozen=True)
class Params:
    rows: str
    context: Annotated[str, NamesField()]
    references: str
    score: Annotated[str, Named(tuple(SCORERS))]
    question: str = ""
    answer_prefix: str = ""  # an answer cue after the user's turn
    max_new_tokens: Count = 32
    stop_at_newline: bool = False
    licence: str = ""  # of the rows
    revision: str | None = None  # of a hub dataset: a commit
    subset: str | None = None
    split: str = "test"
    on_bad_row: OnBadRow = "refuse"
    source: ClassVar[str] = "local"  # as a benchmark's parameters have it

    def named(self) -> dict[str, str]:
        """The fields that it reads, and which key names each first."""
        found = {field: key for key in reversed(TEMPLATES) for field in FIELD.findall(getattr(self, key))}
        return {self.references: "references"} | found


class OwnTask(RowsTask):
    """One sample a row, in the file's order. A file's own class has its `name` and `folder`."""

    version = 1
    Params = Params
    folder: ClassVar[Path]  # that `rows` is looked up from

    def __init__(self, params: Params, data_dir: str | None, seed: int) -> None:
        file = self.folder / Path(params.rows).expanduser()
        is_hub = not file.exists() and HUB.fullmatch(params.rows) and file.suffix not in KINDS
        self.file = None if is_hub else file
        super().__init__(params, data_dir, seed)
        self.data_source = "hub" if is_hub else "local"

    @property
    def most(self) -> None:
        """All rows are asked, and `limit` says how many."""

    def title(self) -> str:
        return self.file.stem if self.file else f"{self.params.rows}/{self.params.split}"

    def prepare(self, shape: ModelShape) -> None:
        if self.file and self.file.suffix not in KINDS:
            raise ConfigError(
                f"task.rows={self.params.rows} is no file of rows by its name; give a .jsonl file, such as pandas' "
                "to_json(path, orient='records', lines=True) writes, or a dataset of the hub as org/name"
            )
        self.notes = [f"licence: {self.params.licence}"] if self.params.licence else []

    def files(self, only: Sequence[str] | None = None) -> dict[str, Path]:
        return {self.name: self.file or hub_file(self.params)}

    def check_row(self, name: str, row: Row) -> None:
        for field, key in self.params.named().items():
            texts = [*texts_of(row, field, key)]
            if key in ("context", "references") and not any(text.strip() for text in texts):
                raise BadRow(f"field {field!r}, which task.{key} names, is empty")
            if key == "references" and any(SCORERS[self.params.score].reads(text) is None for text in texts):
                raise BadRow(
                    f"field {field!r} is {texts[0]!r:.60}, in which task.score={self.params.score} finds nothing"
                )

    def sample(self, tokenizer: Any, name: str, number: int, row: Row) -> Sample:
        params = self.params
        context, question, prefix = (filled(getattr(params, key), row, key) for key in TEMPLATES)
        return Sample(
            id=f"{number}",
            context=context,
            question=question,
            answer_prefix=prefix,
            references=tuple(texts_of(row, params.references, "references")),
            max_new_tokens=params.max_new_tokens,
            stop_at_newline=params.stop_at_newline,
        )

    def score(self, sample: Sample, prediction: str) -> float:
        return SCORERS[self.params.score].of(prediction, sample.references)


def filled(template: str, row: Row, key: str) -> str:
    return FIELD.sub(lambda found: "\n".join(texts_of(row, found[1], key)), template)


def texts_of(row: Row, field: str, key: str) -> Iterator[str]:
    """The texts that a row has in a field, numbers as they are written."""
    value: Any = row
    for name in [field] if field in row else field.split("."):
        if not isinstance(value, Mapping) or name not in value:
            have = value if isinstance(value, Mapping) else row
            raise BadRow(f"task.{key}: {unknown_name('field', field, have)}")
        value = value[name]
    for one in value if isinstance(value, list) else [value]:
        if not isinstance(one, str | int | float) or isinstance(one, bool):
            raise BadRow(f"field {field!r}, which task.{key} names, is no text, no number and no list of them")
        yield f"{one}"


def hub_file(params: Params) -> Path:
    """The rows of a hub dataset as a file in the cache, which is downloaded once for each revision."""
    where = f"task.rows={params.rows}"
    if params.revision is None:
        raise ConfigError(f"{where} is a dataset of the hub, which may change; give task.revision=COMMIT with it")
    parts = (params.rows, params.subset or "default", params.revision)
    file = cache_root() / "hub" / "@".join(re.sub(r"\W+", "-", part) for part in parts) / f"{params.split}.jsonl"
    if file.exists():
        return file
    try:
        from datasets import load_dataset

        rows: Any = load_dataset(params.rows, params.subset, revision=params.revision, split=params.split)
    except ImportError:
        raise ConfigError(f"{where} takes the package datasets; run pip install -c constraints.txt datasets") from None
    except Exception as error:  # whatever the hub, its files or the network raise
        raise ConfigError(
            f"{where} cannot be loaded ({first_line(error)}); check its name, task.revision, task.subset and "
            "task.split, or save its rows as JSON lines and name that file"
        ) from None
    file.parent.mkdir(parents=True, exist_ok=True)
    with replaced(file) as new, new.open("w", encoding="utf-8") as lines:
        lines.writelines(f"{json.dumps(row, default=str)}\n" for row in rows)
    return file


# --- the file ----------------------------------------------------------------------------------


def read_task(path: Path) -> tuple[str, dict[str, Any]]:
    """The name of the task in a YAML file, and all its values; `ConfigError` for keys that are not those of a task."""
    try:
        tree = yaml.safe_load(read_text(path))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is no YAML ({' '.join(str(error).split())[:200]}); put texts into quotes") from None
    known = {field.name: field.default for field in fields(Params)}
    needed = [name for name, default in known.items() if default is MISSING]
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{path} holds no task; write the keys {', '.join(needed)} (docs/adding-a-task.md)")
    for key in tree:
        if key not in (*known, "name"):
            raise ConfigError(f"{path}: {unknown_name('key of a task', str(key), [*known, 'name'])}")
    if lacking := [name for name in needed if name not in tree]:
        raise ConfigError(f"{path} has no {' and no '.join(lacking)}; see docs/adding-a-task.md")
    if braces := [name for name, value in tree.items() if isinstance(value, Mapping)]:
        raise ConfigError(f"{path}: {braces[0]} begins with a brace, which means something to YAML; put it into quotes")
    values = {name: tree.get(name, default) for name, default in known.items()}
    return str(tree.get("name", path.stem)), values


def class_of(path: Path, name: str) -> type[OwnTask]:
    return type("Own", (OwnTask,), {"name": name, "folder": path.parent, "__module__": __name__})
