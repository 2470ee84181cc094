"""One run of a submission: its configuration, prompts, scores and result, each compared with what follows from the rest
of its files, from the code of today and from a frozen benchmark.

Not here: what a submission must have besides its runs (`evals/verify.py`), samples answered again (`again.py`), the
ledger: whoever makes up answers makes it up alike, and only answering again shows it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from math import isclose
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvbench.engine.errors import ConfigError
from kvbench.engine.foreign import refuse_depth
from kvbench.evals import rescore
from kvbench.evals.cells import Cell, cell_without_task, class_and_params
from kvbench.evals.lines import facts
from kvbench.evals.submission import frozen
from kvbench.evals.submission.folder import Finding
from kvbench.evals.submission.settings import settings_of
from kvbench.results import RunFacts, RunResult, SampleRow, config_hash, read_config, read_run, summarise
from kvbench.tasks.base import Task

LEVELS = ("reported", "rescored", "reproduced")
# What runs must share to be compared: plots/site/compare.py pairs by the same keys.
SAME = ("model", "model_digest", "task", "task_version", "data_digest", "compression_scope", "seed", "dtype", "device")
# Of a result: what is of the machine, or of its files and not of what they say.
OF_THE_MACHINE = ("versions", "git_sha", "peak_rss_bytes", "notes")
NOT_RECOMPUTED = {"schema_version", "ledger_crc32", "samples_crc32", "score_version", "scores_crc32"}
KINDS = {
    **dict.fromkeys((spec.name for spec in fields(RunFacts)), "configuration"),
    **dict.fromkeys(("ratio_exact", "budget", "comm_exact", "memory_exact", "within_budget"), "budget"),
    **{"score": "score", "score_ci95": "interval"},
}
CLOSE = 1e-9


@dataclass
class Checked:
    """Findings about a run."""

    run: str
    level: int = 0  # of LEVELS
    findings: list[Finding] = field(default_factory=list[Finding])
    why: list[str] = field(default_factory=list[str])  # it is no more than its level says
    result: RunResult | None = None  # None where it cannot be read
    n_again: int = 0  # samples that were answered again


def same_key(config: Mapping[str, Any]) -> str:
    return json.dumps([config.get(key) for key in SAME], sort_keys=True)


def is_full(config: Mapping[str, Any]) -> bool:
    """Whether a run is of full attention with an exact prefill."""
    method = config.get("method")
    return isinstance(method, Mapping) and method.get("name") == "full" and "prefill" not in config


def read_safely(folder: Path) -> dict[str, Any]:
    """A configuration that later code may walk; ValueError for any other."""
    config = read_config(folder)
    refuse_depth(config)
    json.dumps(config, sort_keys=True, allow_nan=False)
    return config


class Check:
    """A run that is being checked; `methods` are files by which it may be, which are then imported."""

    def __init__(
        self, root: Path, run: str, full: str | None, registry: Path = frozen.FOLDER, methods: Sequence[Path] = ()
    ) -> None:
        self.folder, self.full = root / run, None if full is None else root / full
        self.registry, self.methods = registry, methods
        self.done = Checked(run)

    def find(self, kind: str, words: str) -> None:
        self.done.findings.append(Finding(self.done.run, kind, words))

    def all(self) -> Checked:
        """Every check; each needs what the ones before it found to be whole."""
        try:
            self.result, self.rows = read_run(self.folder)
            self.config, self.done.result = read_safely(self.folder), self.result
            if (found := config_hash(self.config)) != self.result.config_hash:
                self.find("configuration", f"its hash is {found}, and result.json is of {self.result.config_hash}")
            self.whole = self.rows_of_full()
            if not self.done.findings and self.is_ours():
                self.check_run()
            if self.whole is not None:
                self.check_full(self.whole)
        except (*rescore.DAMAGE, ConfigError) as error:
            words = " ".join(str(error).replace(f"{self.folder}/", "").split())
            self.find("damaged", f"{type(error).__name__}: {words[:300]}")
        if self.done.findings:
            self.done.level = 0
        return self.done

    def rows_of_full(self) -> list[SampleRow] | None:
        """What full attention answered; None where that is damaged."""
        try:
            return [] if self.full is None else read_run(self.full)[1]
        except (*rescore.DAMAGE, ConfigError):
            self.find("full attention", f"{self.full} cannot be read")
            return None

    def check_full(self, whole: Sequence[SampleRow]) -> None:
        """Full attention must have answered the same prompts."""
        there = {(row.id, row.prompt_sha256) for row in whole}
        lacking = [row.id for row in self.rows if (row.id, row.prompt_sha256) not in there]
        if self.full is None:
            self.find("full attention", "no run of full attention was asked the same")
        elif lacking:
            words = f"full attention has not answered {len(lacking)} of its samples, such as {lacking[0]!r:.60}"
            self.find("full attention", words)

    def is_ours(self) -> bool:
        """Whether code of today can give again what it says."""
        for group in ("method", "task"):
            part = self.config.get(group)
            if isinstance(part, Mapping) and "package" in part:
                self.done.why.append(f"its {group} is of the package {part['package']!r:.80}, which is not imported")
            elif isinstance(part, Mapping) and "digest" in part and not (group == "method" and self.methods):
                self.done.why.append(f"its {group} is a file of its own, which is not run here")
        if self.benchmark is None:
            self.done.why.append("its prompts are of no frozen benchmark, so that nobody knows what was asked")
        return not self.done.why

    @cached_property
    def benchmark(self) -> frozen.Benchmark | None:
        return frozen.find(self.config, self.registry)

    def check_run(self) -> None:
        benchmark = self.benchmark
        assert benchmark is not None
        try:
            task, _ = rescore.judge_of(self.folder)
        except ConfigError:
            self.done.why.append("its task scores what it saw while it decoded, which no folder has")
            return
        if task.version != (version := self.config.get("task_version")):
            self.done.why.append(f"its task has version {task.version} today, and the run {version!r:.40}")
            return
        try:
            cell = self.cell(benchmark, task)
        except ConfigError as error:
            self.find("configuration", f"{error}; a run of other code is verified with that code")
            return
        self.check_prompts(benchmark)
        if not self.done.findings:
            self.check_scores(benchmark, task)
        self.check_result(cell)
        self.done.level = 1

    def cell(self, benchmark: frozen.Benchmark, judge: Task) -> Cell:
        """What was asked, from the configuration alone."""
        settings = settings_of(self.config, self.methods)
        asking = class_and_params(settings.task)[1].asking if benchmark.has_turns else None
        task: Any = SimpleNamespace(
            asking=asking, notes=(), version=judge.version, metric=judge.metric, dataset=benchmark.dataset,
            data_source=benchmark.data_source,
        )  # fmt: skip
        return replace(cell_without_task(settings, benchmark.shape, self.config, self.folder), task=task)

    def check_prompts(self, benchmark: frozen.Benchmark) -> None:
        """Every answer that is asked for is there once, to the prompt that is frozen."""
        limit, draws, offset = self.config.get("limit"), self.config.get("n_answers", 1), self.config.get("offset", 0)
        lines = benchmark.lines[offset : None if limit is None else offset + int(limit)]
        if (limit is not None or offset) and benchmark.has_turns:
            self.done.why.append("it is limited to some conversations")
            lines = benchmark.lines
        elif limit is not None or offset:
            which = f"{len(lines)} behind {offset}" if offset else f"the first {limit}"
            self.done.why.append(f"it answers {which} of {len(benchmark.lines)} samples")
        asked = {f"{line.id}#{i}" if draws > 1 else line.id: line for line in lines for i in range(draws)}
        rows = {row.id: row for row in self.rows}
        if lacking := sorted(asked.keys() - rows.keys()):
            self.find("samples", f"{len(lacking)} of {len(asked)} samples were left out, such as {lacking[0]!r:.60}")
        if strange := sorted(rows.keys() - asked.keys()):
            self.find("samples", f"it has {strange[0]!r:.60}, which the benchmark has not")
        lost = [row.id for row in self.rows if row.status != "ok"]
        if lost:
            self.find("samples", f"{len(lost)} samples have no answer, such as {lost[0]!r:.60}")
        for id in asked.keys() & rows.keys():
            self.check_prompt(rows[id], asked[id], benchmark)

    def check_prompt(self, row: SampleRow, line: frozen.Line, benchmark: frozen.Benchmark) -> None:
        if row.prompt_sha256 != line.prompt:
            self.find("prompts", f"sample {row.id!r:.60} was asked with another prompt than the frozen one")
        elif not benchmark.has_turns and row.prompt_tokens != line.tokens:
            self.find(
                "prompts", f"sample {row.id!r:.60} says {row.prompt_tokens} tokens, and its prompt has {line.tokens}"
            )
        elif frozen.digest(row.references, self.own(row, benchmark)) != line.asked:
            self.find("prompts", f"sample {row.id!r:.60} has other references or columns than the benchmark")

    @staticmethod
    def own(row: SampleRow, benchmark: frozen.Benchmark) -> dict[str, Any]:
        """The columns that the task gave the sample; a score sees no other."""
        return {key: row.fields[key] for key in benchmark.columns if key in row.fields}

    def check_scores(self, benchmark: frozen.Benchmark, task: Task) -> None:
        """Each score that its answer does not give is found."""
        for row in self.rows:
            if row.fields.get("metric") != task.metric:
                self.find("score", f"sample {row.id!r:.60} has the metric {row.fields.get('metric')!r:.40}")
                continue
            score = rescore.judge(self.folder, task, replace(row, fields=self.own(row, benchmark)))
            if not same(score.score, row.score):
                self.find("score", f"sample {row.id!r:.60} says {row.score}, and its answer scores {score.score}")
            elif not benchmark.has_turns and not same(score.measures, row.fields.get("measures", {})):
                self.find("score", f"sample {row.id!r:.60} has other measures than its answer gives")

    def check_result(self, cell: Cell) -> None:
        """What result.json says that follows from the configuration and the lines."""
        said = {name: getattr(self.result, name) for name in OF_THE_MACHINE}
        found = summarise(self.rows, replace(facts(cell, self.rows), **said), self.whole or ())
        for spec in fields(RunResult):
            told, computed = getattr(self.result, spec.name), getattr(found, spec.name)
            if spec.name == "footprint_vs_full" and told is None:
                continue  # full attention was no cell of its group
            if spec.name not in NOT_RECOMPUTED and not same(told, computed):
                words = f"result.json says {spec.name} {told!r:.80}, and what it was made of says {computed!r:.80}"
                self.find(KINDS.get(spec.name, "result"), words)


def same(said: Any, found: Any) -> bool:
    """Equal, numbers but for the order of a sum."""
    if isinstance(said, bool) or isinstance(found, bool):
        return said is found
    if isinstance(said, int | float) and isinstance(found, int | float):
        return isclose(said, found, rel_tol=CLOSE, abs_tol=CLOSE)
    if isinstance(said, Mapping) and isinstance(found, Mapping):
        return said.keys() == found.keys() and all(same(said[key], found[key]) for key in said)
    if isinstance(said, list | tuple) and isinstance(found, list | tuple):
        return len(said) == len(found) and all(map(same, said, found))
    return said == found
