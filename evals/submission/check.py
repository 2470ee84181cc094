"""One run of a submission: its configuration, prompts, scores, result and ledger, each compared with what follows from
the rest of its files, from the code of today and from a frozen benchmark.

It runs in a process of its own with limits (`engine/workers/limited.py`), so that nothing that a folder holds
stops the others.

Not here: what a submission must have besides its runs (`evals/verify.py`), samples answered again (`again.py`).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from math import isclose
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from kvbench.engine.books.ledger import Entry, Ledger
from kvbench.engine.budget import exact, token_bytes
from kvbench.engine.errors import ConfigError
from kvbench.engine.foreign import refuse_depth
from kvbench.evals import rescore
from kvbench.evals.cells import Cell, cell_without_task, class_and_params
from kvbench.evals.lines import variant_words
from kvbench.evals.submission import frozen
from kvbench.evals.submission.folder import Finding
from kvbench.evals.submission.settings import settings_of
from kvbench.methods.rules import Rules
from kvbench.results import (
    EVICT,
    EXACT,
    OFF,
    RunFacts,
    RunResult,
    SampleRow,
    config_hash,
    read_config,
    read_run,
    summarise,
)
from kvbench.results.ledger import ledger_damage, pyarrow
from kvbench.results.read import is_sealed

LEVELS = ("self-reported", "rescored", "budget proven", "reproduced")
# What runs must share to be compared: plots/site/compare.py pairs by the same keys.
SAME = ("model", "model_digest", "task", "task_version", "data_digest", "compression_scope", "seed", "dtype", "device")
MOST_ENTRY_BYTES = 400  # of a ledger's row, unpacked
# Keys of a line's ledger that no entry tells: what was allocated, which is the machine's; what reading the prompt took.
NOT_IN_ENTRIES = {"bytes_resident_device_actual", "bytes_prefill_peak"}
CLOSE = 1e-9
BIN_ERROR = 0.0006  # of a share that is rounded to three digits


@dataclass
class Checked:
    """Findings about a run; plain data, as it comes from another process."""

    run: str
    level: int = 0  # of LEVELS
    findings: list[Finding] = field(default_factory=list[Finding])
    why: list[str] = field(default_factory=list[str])  # it is no more than its level says
    facts: dict[str, Any] = field(default_factory=dict[str, Any])


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
    """A run that is being checked."""

    NOT_RECOMPUTED: ClassVar = {"schema_version", "ledger_crc32", "samples_crc32", "score_version", "scores_crc32"}

    def __init__(self, root: Path, run: str, full: str | None, registry: Path = frozen.FOLDER) -> None:
        self.folder, self.full, self.registry = root / run, None if full is None else root / full, registry
        self.done = Checked(run)

    def find(self, kind: str, words: str) -> None:
        self.done.findings.append(Finding(self.done.run, kind, words))

    def all(self) -> Checked:
        """Every check; each needs what the ones before it found to be whole."""
        try:
            self.read()
            self.check_configuration()
            if not self.done.findings:
                self.check_facts()
                self.done.level = self.level()
        except (ValueError, ConfigError, TypeError, RecursionError, OSError, LookupError, ArithmeticError) as error:
            words = " ".join(str(error).replace(f"{self.folder}/", "").split())
            self.find("damaged", f"{type(error).__name__}: {words[:300]}")
        if self.done.findings:
            self.done.level = 0
        return self.done

    def read(self) -> None:
        self.result, self.rows = read_run(self.folder)
        content = (self.folder / "result.json").read_bytes()
        if not is_sealed(content) or self.result.samples_crc32 is None or self.result.ledger_crc32 is None:
            self.find("seal", "its files have no crc32; make the run again with the code of today")
        self.config = read_safely(self.folder)
        result = self.result
        self.done.facts = {
            "config_hash": result.config_hash, "method": result.method, "task": result.task, "model": result.model,
            "n": result.n_samples, "score": result.score, "samples": [[row.id, row.prompt_sha256] for row in self.rows],
        }  # fmt: skip

    def check_configuration(self) -> None:
        if (found := config_hash(self.config)) != self.result.config_hash:
            self.find("configuration", f"its hash is {found}, and result.json is of {self.result.config_hash}")
        if not self.is_outside:
            try:
                _ = self.cell
            except ConfigError as error:
                self.find("configuration", f"{error}; a run of other code is verified with that code")

    @property
    def is_outside(self) -> bool:
        """Whether the method is a file of somebody's own."""
        method = self.config.get("method")
        return isinstance(method, Mapping) and "digest" in method

    @cached_property
    def benchmark(self) -> frozen.Benchmark | None:
        return frozen.find(self.config, self.registry)

    @cached_property
    def cell(self) -> Cell:
        """What was asked, from the configuration alone; without a frozen benchmark the model's shape is not known."""
        shape: Any = None if self.benchmark is None else self.benchmark.shape
        settings, task = settings_of(self.config), None
        if self.benchmark is not None and self.benchmark.has_turns:
            task = SimpleNamespace(asking=class_and_params(settings.task)[1].asking)
        cell = cell_without_task(settings, shape, dict(self.config), self.folder)
        return replace(cell, task=task)  # type: ignore[arg-type]

    def check_facts(self) -> None:
        """What result.json says of the run besides what was measured."""
        for key, said, asked in self.facts():
            if said != asked:
                kind = "budget" if key in ("ratio_exact", "budget", "comm_exact", "memory_exact") else "configuration"
                self.find(kind, f"result.json says {key} {said!r:.80}, and the configuration {asked!r:.80}")

        for row in self.rows:
            if "variant" in row.fields and not self.is_outside and row.fields["variant"] != self.variant_of(row):
                self.find("configuration", f"sample {row.id!r:.60} says another variant than the configuration")

    def variant_of(self, row: SampleRow) -> str | None:
        """The variant's name in a sample's line; None where it reports what its method cannot."""
        try:
            return variant_words(self.cell, row.fields.get("method_report") or {}, row.ledger.get("index_share") or 1)
        except (LookupError, TypeError, AttributeError):
            return None

    def facts(self) -> Iterator[tuple[str, Any, Any]]:
        """Names, what the result says, what the configuration says."""
        result, config = self.result, self.config
        method, task, model = config["method"], config["task"], config["model"]
        yield "method", result.method, method["name"]
        yield "task", result.task, task["name"]
        yield "model", result.model, model["name"]
        yield "task_version", result.task_version, config.get("task_version")
        for key in ("seed", "dtype", "device", "budget"):
            yield key, getattr(result, key), config.get(key)
        yield "ratio_exact", result.ratio_exact, ratio_of(config)
        yield "comm_exact", result.comm_exact, config.get("comm", OFF) or OFF
        yield "memory_exact", result.memory_exact, config.get("memory")
        named = config["prefill"]["name"] if "prefill" in config else EXACT
        yield "prefill", result.prefill, EVICT if config.get("prefill_evict") else named
        if self.is_outside:
            yield "params", result.params, method["params"]
            return
        cell = self.cell
        yield "params", result.params, dict(cell.settings.method.params)
        yield "method_label", result.method_label, cell.label
        yield "sampling", result.sampling, cell.settings.sampling.identity()
        allocator = cell.settings.allocator
        yield "allocator", result.allocator, None if allocator is None else allocator.label()
        if self.benchmark is not None:
            yield "dataset", result.dataset, self.benchmark.dataset
            yield "data_source", result.data_source, self.benchmark.data_source
            if not self.benchmark.has_turns:
                yield "protocol", result.protocol, cell.settings.scope
            yield "compressed_layers", result.compressed_layers, list(cell.shape.attention_layers)

    # --- how far it is believed ---

    def level(self) -> int:
        if self.benchmark is None:
            self.done.why.append("its prompts are of no frozen benchmark, so that nobody knows what was asked")
            return 0
        self.done.facts["benchmark"] = self.benchmark.name
        asked = self.check_prompts(self.benchmark)
        scored = not self.done.findings and self.check_scores(self.benchmark)
        self.check_result()
        if self.done.findings:
            return 0
        proven = self.check_ledger(self.benchmark, asked)
        if not scored:
            return 0
        return 2 if proven and not self.done.findings else 1

    def check_prompts(self, benchmark: frozen.Benchmark) -> dict[str, frozen.Line]:
        """Every answer that is asked for is there once, to the prompt that is frozen."""
        limit, draws = self.config.get("limit"), self.config.get("n_answers", 1)
        offset = self.config.get("offset", 0)
        is_part = limit is not None or offset
        lines = benchmark.lines[offset : None if limit is None else offset + int(limit)]
        if is_part and benchmark.has_turns:
            self.done.why.append("it is limited to some conversations")
            lines = benchmark.lines
        asked = {f"{line.id}#{i}" if draws > 1 else line.id: line for line in lines for i in range(draws)}
        rows = {row.id: row for row in self.rows}
        if lacking := sorted(asked.keys() - rows.keys()):
            self.find("samples", f"{len(lacking)} of {len(asked)} samples were left out, such as {lacking[0]!r:.60}")
        if strange := sorted(rows.keys() - asked.keys()):
            self.find("samples", f"it has {strange[0]!r:.60}, which the benchmark has not")
        if is_part:
            which = f"{len(lines)} behind {offset}" if offset else f"the first {limit}"
            self.done.why.append(f"it answers {which} of {len(benchmark.lines)} samples")
        lost = [row.id for row in self.rows if row.status != "ok"]
        if lost:
            self.find("samples", f"{len(lost)} samples have no answer, such as {lost[0]!r:.60}")
        for id in asked.keys() & rows.keys():
            self.check_prompt(rows[id], asked[id], benchmark)
        return asked

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

    def check_scores(self, benchmark: frozen.Benchmark) -> bool:
        """Whether the scores could be given again; each that differs is found."""
        try:
            task, _ = rescore.judge_of(self.folder)
        except ConfigError:
            self.done.why.append("its task scores what it saw while it decoded, which no folder has")
            return False
        if task.version != self.result.task_version:
            self.done.why.append(f"its task has version {task.version} today, and the run {self.result.task_version}")
            return False
        for row in self.rows:
            if row.fields.get("metric") != task.metric:
                self.find("score", f"sample {row.id!r:.60} has the metric {row.fields.get('metric')!r:.40}")
                continue
            score = rescore.judge(self.folder, task, replace(row, fields=self.own(row, benchmark)))
            if not same(score.score, row.score):
                self.find("score", f"sample {row.id!r:.60} says {row.score}, and its answer scores {score.score}")
            elif not benchmark.has_turns and not same(score.measures, row.fields.get("measures", {})):
                self.find("score", f"sample {row.id!r:.60} has other measures than its answer gives")
        return True

    def check_result(self) -> None:
        """What result.json says that follows from the lines."""
        facts = RunFacts(**{spec.name: getattr(self.result, spec.name) for spec in fields(RunFacts)})
        full = [] if self.full is None else read_run(self.full)[1]
        found = summarise(self.rows, facts, full)
        for spec in fields(RunResult):
            said, computed = getattr(self.result, spec.name), getattr(found, spec.name)
            if spec.name == "footprint_vs_full" and said is None:
                continue  # full attention was no cell of its group
            if spec.name not in self.NOT_RECOMPUTED and not same(said, computed):
                kind = {"score_ci95": "interval", "score": "score", "within_budget": "budget"}.get(spec.name, "result")
                self.find(kind, f"result.json says {spec.name} {said!r:.60}, and its lines say {computed!r:.60}")

    # --- the ledger ---

    def check_ledger(self, benchmark: frozen.Benchmark, asked: Mapping[str, frozen.Line]) -> bool:
        """Whether the entries of every step show what lines say, within the budget that was asked for."""
        path = self.folder / "ledger.parquet"
        if damage := ledger_damage(path, self.result):
            self.find("ledger", f"ledger.parquet is {damage}")
            return False
        if benchmark.has_turns:
            self.done.why.append("budgets of conversations are not computed again")
            return False
        steps = {row.id: row.generated_tokens - 1 + asked[row.id].tokens - asked[row.id].context for row in self.rows}
        entries = self.entries(path, steps, len(benchmark.shape.kept_layers))
        if entries is None:
            return False
        if (version := self.config.get("method_version")) != (None if self.is_outside else self.cell.rules.version):
            if not self.is_outside:
                self.done.why.append(f"its method has another version today than {version}")
                return False
        for row in self.rows:
            for kind, words in self.check_sample(row, entries[row.id], steps[row.id], asked[row.id], benchmark):
                self.find(kind, f"sample {row.id!r:.60} {words}")
        if self.is_outside:
            self.done.why.append("what a method's own file makes of a budget is not computed again")
            return False
        return True

    def entries(self, path: Path, steps: Mapping[str, int], n_layers: int) -> dict[str, list[Entry]] | None:
        """The entries of each sample. The file says how large it is before it is unpacked, and memory is limited."""
        _, pq = pyarrow()
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            head, names = file.metadata, file.schema_arrow.names
            expected = sum(steps.values()) * n_layers
            unpacked = sum(head.row_group(i).total_byte_size for i in range(head.num_row_groups))
            if head.num_rows != expected or unpacked > MOST_ENTRY_BYTES * expected + (1 << 20):
                self.find(
                    "ledger",
                    f"ledger.parquet has {head.num_rows:,} rows of {unpacked:,} bytes, and answers took {expected:,}",
                )
                return None
            needed = {"sample_id", *(name for name in Entry._fields if name not in Entry._field_defaults)}
            if not needed <= set(names) <= {"sample_id", *Entry._fields}:
                self.find("ledger", "ledger.parquet has other columns than a ledger")
                return None
            table = file.read().to_pydict()
        found: dict[str, list[Entry]] = {id: [] for id in steps}
        columns = [table.get(name) or [0] * head.num_rows for name in Entry._fields]
        for id, *values in zip(table["sample_id"], *columns, strict=True):
            if id not in found or not all(isinstance(value, int) and value >= 0 for value in values):
                self.find("ledger", f"ledger.parquet has a row of {id!r:.60} that no run writes")
                return None
            found[id].append(Entry(*values))
        return found

    def check_sample(
        self, row: SampleRow, entries: Sequence[Entry], n_steps: int, line: frozen.Line, benchmark: frozen.Benchmark
    ) -> Iterator[tuple[str, str]]:
        """Kind and words of what a sample's entries say otherwise."""
        shape = benchmark.shape
        layers = [entry.layer for entry in entries if entry.step == 1]
        if [(e.step, e.layer) for e in entries] != [(i + 1, layer) for i in range(n_steps) for layer in layers]:
            yield "ledger", f"has not {n_steps} steps of the same layers in ledger.parquet"
            return
        if entries and set(layers) != set(shape.kept_layers) - {reader for reader, _ in shape.readers}:
            if set(layers) != set(shape.kept_layers):
                yield "ledger", f"has {len(layers)} layers in ledger.parquet, and {shape.name} {shape.n_layers}"
                return
        for entry in entries:
            if entry.tokens != line.context + entry.step:
                yield (
                    "ledger",
                    f"has {entry.tokens} tokens at step {entry.step}, and there were {line.context + entry.step}",
                )
                return
            if entry.attended > entry.tokens * shape.h:
                yield "ledger", f"attends to more tokens than there are at step {entry.step}"
                return
        ledger = Ledger()
        for entry in entries:
            ledger.append(entry)
        if why := strip_differs(row, ledger, n_steps, line, shape.h):
            yield "ledger", why
        if self.is_outside:
            return
        cell = self.cell
        try:
            budget = cell.variant(line.context, line.frame).budget
        except ConfigError as error:
            yield "budget", f"has a budget that its method cannot meet: {error}"
            return
        rules: type[Rules] = cell.rules
        in_mean = rules.traits.keeps_budget_in == "mean" or budget.counts == "mean"
        exempt = skipped(cell)
        found = ledger.summary(budget, shape, exempt, in_mean, with_index=not rules.traits.drops)
        for key in found.keys() & row.ledger.keys() - NOT_IN_ENTRIES:
            if not same(found[key], row.ledger[key]):
                kind = "budget" if key in ("within_budget", "tokens_budget") else "ledger"
                yield kind, f"says {key} {row.ledger[key]}, and ledger.parquet says {found[key]} under {exact_of(cell)}"
        whole = line.context * len(shape.attention_layers) * token_bytes(shape)
        peak: Any = row.ledger.get("bytes_prefill_peak", whole)  # which older runs do not say
        leaves = rules.traits.prunes_prompt or cell.settings.evicts
        if peak != whole and not (leaves and isinstance(peak, int) and 0 < peak < whole):
            yield "ledger", f"says bytes_prefill_peak {peak}, and a prompt of {line.context:,} tokens takes {whole:,}"
        if found["within_budget"] is False and self.result.within_budget:
            yield "budget", f"is over its budget of {budget.tokens} tokens"


def strip_differs(row: SampleRow, ledger: Ledger, n_steps: int, line: frozen.Line, h: int) -> str:
    """Why the strip of what the last step attended to and its entries differ in how many tokens; "" if they do not."""
    bins = row.fields.get("attended_bins")
    if not isinstance(bins, list) or not bins or not n_steps:
        return ""
    s, n = line.context, len(bins)
    edges = [-(-s * i // n) for i in range(n + 1)]
    shown = sum(share * (stop - start) for share, start, stop in zip(bins, edges, edges[1:], strict=False))
    last = [entry.attended / h for entry in ledger.entries if entry.step == n_steps]
    attended = sum(last) / len(last)
    error = BIN_ERROR * s + 1
    if attended - n_steps - error <= shown <= attended + error:
        return ""
    return f"attended to {attended:.1f} tokens at the last step, and its strip shows {shown:.1f} of the prompt"


def skipped(cell: Cell) -> Sequence[int]:
    """The layers that the method leaves whole, without a prompt."""
    row: Any = object.__new__(cell.kind)
    row.params, row.trace = cell.params, SimpleNamespace(shape=cell.shape)
    return row.skipped


def ratio_of(config: Mapping[str, Any]) -> str | None:
    """What a result says of the share: none with a number of tokens, or of bytes."""
    if config.get("ratio") or config.get("budget"):
        return config.get("ratio")
    return None if str(config["memory"]).endswith("B") else config["memory"]


def exact_of(cell: Cell) -> str:
    request = cell.request
    return f"{request.label()}, comm={OFF if request.comm is None else exact(request.comm)}"


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
