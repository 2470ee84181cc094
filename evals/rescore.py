"""`python -m evals.rescore RUN…`: the answers of runs scored again, from their folders alone.

A line of samples.jsonl holds what its score needs: the prediction, the references and the task's own columns;
config.yaml has the task's parameters. Neither data nor a model is read, and nothing is written. Exit code 1 where a
score differs from the stored one.

Not here: tasks that score what they saw while they decoded (perplexity, fidelity, latency): that takes the model.
"""

import sys
from collections.abc import Sequence
from math import fsum
from pathlib import Path
from typing import Any

import yaml

from engine.errors import ConfigError
from evals.foreign import printable
from evals.results import SampleRow, read_config, read_samples
from evals.settings import Choice, build_params, load_class
from evals.tasks.base import Sample, Task

CONF = Path(__file__).resolve().parents[1] / "conf" / "task"


def rescored(folder: Path) -> list[tuple[SampleRow, float]]:
    """Every answered sample of a run with its score by the code of today."""
    try:
        config = read_config(folder)
        task = judge_of(config["task"]["name"], config["task"]["params"])
        rows = [row for row in read_samples(folder) if row.score is not None]
        return [(row, task.score(answered(row), row.prediction)) for row in rows]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{folder} is no folder of a run that can be read ({error!r})") from None


def judge_of(name: str, params: dict[str, Any]) -> Task:
    """The task with these parameters, able to score and to do nothing else."""
    target = yaml.safe_load((CONF / f"{name}.yaml").read_text(encoding="utf-8"))["_target_"]
    kind: Any = load_class(Choice("task", name, target, params))
    if kind.is_forced or kind.is_timed:
        raise ConfigError(f"task={name} scores what it saw while it decoded; its folder has no answers to judge")
    task = object.__new__(kind)  # without its __init__, which looks for data
    task.params = build_params(kind, params, "task")
    return task


def answered(row: SampleRow) -> Sample:
    """A sample as far as a score looks at it."""
    return Sample(row.id, "", "", references=tuple(row.references), fields=row.fields)


def main(arguments: Sequence[str]) -> int:
    if not arguments:
        sys.stderr.write("usage: python -m evals.rescore RUN..., folders of runs\n")
        return 2
    n_changed = 0
    try:
        for folder in map(Path, arguments):
            pairs = rescored(folder)
            changed = [(row, score) for row, score in pairs if score != row.score]
            for row, score in changed:
                sys.stdout.write(f"{folder}: {printable(row.id)} {row.score} is now {score}\n")
            mean = fsum(score for _, score in pairs) / len(pairs) if pairs else float("nan")
            sys.stdout.write(f"{folder}: {mean:.6f} over {len(pairs)}, {len(changed)} differ\n")
            n_changed += len(changed)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return int(n_changed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
