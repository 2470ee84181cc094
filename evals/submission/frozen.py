"""Benchmarks that are frozen: what was asked and what a score looks at, as digests that are committed.

    python -m kvbench.evals.submission.frozen task=needle_brief [model=…] […]    writes one, from the task's own samples

A benchmark is a task with its settings, on a model, whose tokenizer and window a prompt depends on. Its file has a line
per answer: the prompt's digest, and one of references and columns. Nothing of the texts is in it.

Not here: answers, and whether they are any good.
"""

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

from kvbench.engine.errors import ConfigError
from kvbench.engine.shapes import ModelShape
from kvbench.engine.terminal import say

FOLDER = Path(__file__).resolve().parent / "frozen"
# What of a configuration decides which prompts are asked; `limit` takes the first of them.
ASKED = ("task", "task_version", "data_digest", "seed", "compression_scope", "model", "model_digest")


@dataclass(frozen=True)
class Line:
    """One answer that is asked for."""

    id: str
    prompt: str  # `prompt_hash`
    tokens: int  # of the prompt
    asked: str  # digest of references and columns


@dataclass(frozen=True)
class Benchmark:
    """A frozen benchmark, by the name of its file."""

    name: str
    asked: Mapping[str, Any]
    shape: ModelShape
    dataset: str  # as the task says it, and where it took it from: readers name a benchmark by both
    data_source: str
    columns: tuple[str, ...]  # that the task gives each sample, and that a score may look at
    has_turns: bool
    lines: tuple[Line, ...]

    @classmethod
    def read(cls, path: Path) -> Self:
        found = json.loads(path.read_text(encoding="utf-8"))
        shape = {key: tuples(value) for key, value in found["shape"].items()}
        lines = tuple(Line(*row) for row in found["lines"])
        return cls(
            path.stem, found["asked"], ModelShape(**shape), found["dataset"], found["data_source"],
            tuple(found["columns"]), found["has_turns"], lines,
        )  # fmt: skip

    def to_json(self) -> str:
        keys = ("asked", "dataset", "data_source", "columns", "has_turns")
        head = {"shape": asdict(self.shape)} | {key: getattr(self, key) for key in keys}
        said = "".join(f"  {json.dumps(key)}: {json.dumps(value)},\n" for key, value in head.items())
        rows = ",\n".join("    " + json.dumps([*vars(line).values()]) for line in self.lines)
        return f'{{\n{said}  "lines": [\n{rows}\n  ]\n}}\n'


def tuples(value: Any) -> Any:
    return tuple(map(tuples, value)) if isinstance(value, list) else value


def digest(references: Sequence[str], columns: Mapping[str, Any]) -> str:
    """Digest of all that a score looks at besides the answer."""
    text = json.dumps([list(references), dict(columns)], sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def asked_of(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: config.get(key) for key in ASKED}


@cache
def registry(folder: Path = FOLDER) -> tuple[Benchmark, ...]:
    """Every frozen benchmark."""
    return tuple(Benchmark.read(path) for path in sorted(folder.glob("*.json")))


def find(config: Mapping[str, Any], folder: Path = FOLDER) -> Benchmark | None:
    """The benchmark that a run with this configuration was asked."""
    asked = asked_of(config)
    return next((one for one in registry(folder) if one.asked == asked), None)


def freeze(words: Sequence[str]) -> Benchmark:
    """The benchmark of a command line, from the samples of today."""
    from kvbench.evals.lines import own_columns
    from kvbench.evals.prepare import Preparation
    from kvbench.evals.runner import prepare
    from kvbench.evals.settings import from_words
    from kvbench.tasks.prompt import tokenizing
    from kvbench.tasks.turns.questions import one_question

    (cell,) = prepare([from_words(["method=full", *words])])
    with tokenizing(cell.settings.model.name):
        asked = Preparation([cell])
        samples = [asked.prepare(i, asked.samples[i]) for i in range(len(asked.samples))]
    if len({one.n_lines for one in samples}) > 1:
        raise ConfigError("its samples have different numbers of turns, which no frozen benchmark has")
    columns: set[str] = set()
    lines: list[Line] = []
    for one in samples:
        for turn, id in enumerate(one.lines[cell.draw]):
            sample = one_question(one.sample, turn) if one.sample.conversation else one.sample
            own = json.loads(json.dumps(own_columns(sample)))
            columns |= own.keys()
            lines.append(Line(id, one.sha, len(one.packed), digest(sample.references, own)))
    config = json.loads(json.dumps(cell.config))
    hashed = hashlib.sha256(json.dumps(asked_of(config), sort_keys=True).encode()).hexdigest()
    name = f"{config['task']['name']}-{config['model']['name']}-{hashed[:8]}"
    task, has_turns = cell.task, samples[0].sample.conversation is not None
    return Benchmark(
        name, asked_of(config), cell.shape, task.dataset, task.data_source, tuple(sorted(columns)), has_turns,
        tuple(lines),
    )  # fmt: skip


def write(words: Sequence[str], folder: Path = FOLDER) -> Path:
    """Freeze the benchmark of a command line; one that is frozen stays as it is."""
    found = freeze(words)
    path = folder / f"{found.name}.json"
    if path.exists() and path.read_text(encoding="utf-8") != found.to_json():
        raise ConfigError(f"{path} holds other prompts; a changed benchmark needs another version of its task")
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(found.to_json(), encoding="utf-8")
    registry.cache_clear()
    return path


if __name__ == "__main__":
    try:
        say(write(sys.argv[1:]))
    except ConfigError as error:
        say(error, file=sys.stderr)
        sys.exit(2)
