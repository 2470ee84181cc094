"""`python -m kvbench.evals.rescore [--write] RUN…`: the answers of runs scored again, from their folders alone.

A line of samples.jsonl holds what its score needs: the prediction, the references and the task's own columns;
config.yaml has the task's parameters. Neither data nor a model is read.

Without `--write`, every score that differs from the run's is printed, nothing is written, and the exit code is 1 where
one differs. With it, the new scores count from then on: they stand in scores.jsonl, next to answers, with the version
of the task that gave them, and result.json, the task's tables and its pictures are made again from them. The answers
stay as they are. Killed on the way, the same command goes on after the last score.

Not here: tasks that score what they saw while they decoded (perplexity, fidelity, latency): that takes the model.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from math import fsum
from pathlib import Path
from typing import Any

import yaml

from kvbench.engine.budget import show
from kvbench.engine.declared import build_params
from kvbench.engine.errors import ConfigError, RunError, one_line
from kvbench.engine.terminal import printable, say
from kvbench.evals import outside, plugins
from kvbench.evals.screen.progress import Progress
from kvbench.evals.settings import Choice, load_class
from kvbench.results import Holder, RunFolder, RunResult, SampleRow, read_config, read_samples
from kvbench.results.scores import Score, Scores, crc_of_answer
from kvbench.tasks.base import Sample, Task

CONF = Path(__file__).resolve().parents[1] / "conf" / "task"
DAMAGE = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)  # what a folder or a row may raise
Pairs = list[tuple[SampleRow, Score]]  # answered samples, and their scores by the code of today


def new_scores(folder: Path) -> Pairs:
    """Every answered sample of a run with its score by the code of today."""
    task, _ = judge_of(folder)
    try:
        rows = answers_of(read_samples(folder))
    except DAMAGE as error:
        raise unreadable(folder, error) from None
    return list(scores_of(folder, task, rows, {}))


def write_scores(folder: Path) -> Pairs:
    """Write what `new_scores` finds; the scores are the run's from now on."""
    task, config = judge_of(folder)
    text = (folder / "config.yaml").read_text(encoding="utf-8")
    with RunFolder.open(folder, config, text, on_wait=waiting(folder)) as run:
        for note in run.notes:
            say(note, file=sys.stderr)
        if run.finished is None:
            raise ConfigError(f"{folder} is not finished; give its own command again, and score its answers then")
        pairs: Pairs = []
        before = run.scores_so_far()
        for row, score in scores_of(folder, task, answers_of(run.rows), before):
            if score != before.get(row.id):
                run.keep_score(score)
            pairs.append((row, score))
        if pairs:
            result = run.put_scores([score for _, score in pairs])
            with run.placing() as beside:
                task.artifacts(beside, [row.to_dict() for row in run.rows], title(result))
    return pairs


def scores_of(
    folder: Path, task: Task, rows: Sequence[SampleRow], before: dict[str, Score]
) -> Iterator[tuple[SampleRow, Score]]:
    """Rows with their scores: that of an earlier process, where it judged the same answer in the same version."""
    with Progress(f"scores of {folder.name}", len(rows), 0) as progress:
        for row in rows:
            score = before.get(row.id)
            kind = (task.metric, task.version)
            if score is None or not score.is_of(row) or (score.metric, score.task_version) != kind:
                score = judge(folder, task, row)
            yield row, score
            if task.scores_later:
                progress.sample_done(row.id, [])


def judge(folder: Path, task: Task, row: SampleRow) -> Score:
    """One answer's score; this is what may take minutes."""
    sample = Sample(row.id, "", "", references=tuple(row.references), fields=row.fields)  # as far as a score looks
    try:
        value, measures = task.verdict(sample, row.prediction)
        score = Score(
            id=row.id, answer_crc32=crc_of_answer(row), score=value, metric=task.metric, task_version=task.version,
            measures=measures,
        )  # fmt: skip
        Scores.of([score]).lay_over([row])  # ValueError for a score that the metric does not allow
        return score
    except DAMAGE as error:
        raise ConfigError(f"{folder}: the answer to {row.id!r} cannot be scored ({error!r})") from None


def judge_of(folder: Path) -> tuple[Task, dict[str, Any]]:
    """A run's task, able to score and to do nothing else, and the run's configuration."""
    try:
        config = read_config(folder)
        name, params = config["task"]["name"], config["task"]["params"]
        if "digest" in config["task"] and "package" not in config["task"]:
            raise ConfigError(
                f"{folder}: task={name} is a file of the user's own, which a run does not keep; run it again"
            )
        defaults = node_of_package(name, config["task"]["package"]) if "package" in config["task"] else conf_of(name)
        kind: Any = load_class(Choice("task", name, defaults.pop("_target_"), params))
        if not (kind.is_forced or kind.is_timed):
            task = object.__new__(kind)  # without its __init__, which looks for data
            task.params = build_params(kind, defaults | params, "task")  # a run from before a key existed
            return task, config
    except DAMAGE as error:
        raise unreadable(folder, error) from None
    raise ConfigError(f"task={name} scores what it saw while it decoded; its folder has no answers to judge")


def conf_of(name: str) -> dict[str, Any]:
    """The YAML of a task; of a preset, that of the task which it begins with or is named after."""
    file = CONF / f"{name}.yaml"
    content = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if "_target_" in content or ("defaults" not in content and "_" not in name):
        return content
    return conf_of(content["defaults"][0] if "defaults" in content else name.rpartition("_")[0])


def node_of_package(name: str, package: str) -> dict[str, Any]:
    """What a file of conf/ would say of an installed package's task, in the version of today."""
    plugin = plugins.find("task", name, ours=())
    if plugin is None:
        raise ConfigError(f"task={name} is of the package {package}, which is not installed here; install it")
    return outside.node_of(plugin)


def unreadable(folder: Path, error: Exception) -> ConfigError:
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    return ConfigError(f"{folder} is no folder of a run that can be read ({kind}{one_line(error)})")


def answers_of(rows: Sequence[SampleRow]) -> list[SampleRow]:
    return [row for row in rows if row.status == "ok"]


def title(result: RunResult) -> str:
    """The title of the task's pictures, as the run gave it to them."""
    budget = f"budget={result.budget}" if result.ratio_exact is None else f"ratio={result.ratio_exact}"
    if result.memory is not None:
        said = f"memory={show(result.memory)}"
        is_alone = result.budget is None and result.ratio_exact in (None, result.memory_exact)
        budget = said if is_alone else f"{budget} {said}"
    return f"{result.method_label}, {budget}, {result.model}"


def waiting(folder: Path) -> Callable[[Holder], None]:
    def on_wait(holder: Holder) -> None:
        say(f"{folder} is in use by {holder}; waiting for it to end", file=sys.stderr)

    return on_wait


def report(folder: Path, pairs: Pairs) -> int:
    """Print the scores that changed; how many."""
    changed = [(row, score.score) for row, score in pairs if score.score != row.score]
    for row, score in changed:
        was = "without a score" if row.score is None else row.score
        say(f"{folder}: {printable(row.id)} {was} is now {score}")
    mean = fsum(score.score for _, score in pairs) / len(pairs) if pairs else float("nan")
    say(f"{folder}: {mean:.6f} over {len(pairs)}, {len(changed)} differ")
    return len(changed)


def main(arguments: Sequence[str]) -> int:
    writes = "--write" in arguments
    folders = [Path(word) for word in arguments if word != "--write"]
    if not folders or any(str(folder).startswith("--") for folder in folders):
        say("usage: python -m kvbench.evals.rescore [--write] RUN..., folders of runs", file=sys.stderr)
        return 2
    n_changed = 0
    try:
        for folder in folders:
            n_changed += report(folder, write_scores(folder) if writes else new_scores(folder))
    except (ConfigError, RunError) as error:
        say(error, file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return int(n_changed > 0 and not writes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
