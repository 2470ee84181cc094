"""The loop over samples: one prefill for all cells that ask the same, one batch to decode them, a folder for each.

A cell is one variant on one task with one model. Cells that agree on model, task, data, prefill, dtype and seed form a
group; per sample its unfinished cells share one prefill and decode as rows of one batch. What a cell's folder holds is
the same as if the cell had run alone.

Everything that can be wrong with a cell is found before a model is loaded, and what only the prompts can tell before
the first prefill.

Not here: what a folder is (`evals/results/`), what a sample is (`evals/tasks/base.py`), how a row decodes (`engine`).
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from time import perf_counter
from types import MappingProxyType
from typing import Any

import torch
import yaml

from engine import checks
from engine.budget import BudgetRequest, show
from engine.decode import Answer, Decoded, decode
from engine.digests import changed_at, first_digest_of
from engine.errors import ConfigError
from engine.model import (
    Letters,
    Model,
    digest_of,
    load,
    load_random,
    load_tokenizer,
    locate,
    read_config,
    read_shape,
    resolve_device,
    resolve_dtype,
    shape_of,
)
from engine.prefill import Thinning, Trace, prefill
from engine.shapes import ModelShape
from engine.spans import recording
from engine.sparse import VerticalSlash
from evals.logger import Copies
from evals.progress import Progress, Standing
from evals.results import (
    EXACT,
    Holder,
    RunFacts,
    RunFolder,
    RunResult,
    SampleRow,
    combined,
    config_hash,
    environment,
    peak_rss_bytes,
    prompt_hash,
    run_name,
    summarise,
)
from evals.results.files import file_stem
from evals.settings import ModelSpec, Settings, build, build_params, load_class
from evals.studies import accesses
from evals.tasks.base import Sample, Task
from evals.tasks.forced import Lesson, Mark, Taught
from evals.tasks.latency import Latency, Timed
from evals.tasks.prompt import Prompt, answer_text, encode, newline_ids, stop_ids, uses_chat
from evals.width import room_bytes, variant_bytes, waves
from methods.base import SelectiveAttention, Variant
from methods.full import Full

ROOT = Path(__file__).resolve().parents[1]
RUNS, ARCHITECTURES = ROOT / "runs", ROOT / "conf" / "architecture"
MOST_COUNT = 10_000  # of anything that a task counts


@dataclass(frozen=True)
class Cell:
    """One run, checked and ready."""

    settings: Settings  # dtype and device resolved
    kind: type[SelectiveAttention]
    params: Any
    task: Task
    shape: ModelShape
    config: dict[str, Any]  # what identifies the run
    path: Path
    sparsity: VerticalSlash | None = None  # of the prefill

    @property
    def request(self) -> BudgetRequest:
        return self.settings.budget

    @property
    def label(self) -> str:
        label = self.kind.label(self.params, self.request)
        if self.sparsity is None:
            return label
        return self.sparsity.title if self.kind is Full else f"{self.sparsity.title} + {label}"

    def variant(self, s_prompt: int) -> Variant:
        """The cell's method on prompts of so many tokens; `ConfigError` where the budget is too small for it."""
        with naming(self.settings):
            return self.kind.variant_for(self.params, self.request, self.shape, s_prompt, self.settings.cache)

    def group(self) -> tuple[Any, ...]:
        """Cells with equal groups can share a prefill."""
        own = ("method", "method_version", "ratio", "budget", "comm", "compensate", "cache")
        return tuple(sorted((key, repr(value)) for key, value in self.config.items() if key not in own))


@contextmanager
def naming(settings: Settings) -> Iterator[None]:
    """Say of which variant it is that something is refused."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"method={settings.method.name} {settings.budget.label()}: {error}") from None


def run_cells(cells: Sequence[Settings]) -> list[tuple[Path, RunResult]]:
    """Run cells, or pick up where an earlier process stopped: each cell's folder and result, in their order."""
    ready = prepare(cells)
    copies = Copies(cells, [cell.path for cell in ready])
    results: dict[Path, RunResult] = {}
    if cells and cells[0].pool is not None:
        from evals.shards import run_groups  # which imports this file

        results = run_groups(grouped(ready), cells[0].pool)
    else:
        models = Models()
        for group in grouped(ready):
            results.update(run_group(group, models))
            copies.send(results)
    copies.send(results)
    return [(cell.path, results[cell.path]) for cell in ready]


def grouped(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Cells that can share a prefill, together."""
    groups: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in cells:
        groups.setdefault(cell.group(), []).append(cell)
    return list(groups.values())


def prepare(cells: Sequence[Settings]) -> list[Cell]:
    """Check every cell, as far as that goes without a model."""
    ready, shapes, seen = [], {}, {}
    for settings in cells:
        kind = load_class(settings.method)
        params = build_params(kind, settings.method.params, "method")
        task_class: Any = load_class(settings.task)
        task_params = build_params(task_class, settings.task.params, "task")
        task = task_class(task_params, settings.data_dir, settings.seed)
        settings = resolve_hardware(settings)
        if settings.weights == "random" and not task.alone:
            raise ConfigError(
                f"weights=random answers nothing that task={task.name} could score; use it with task=latency"
            )
        key = (settings.model, settings.weights)
        if key not in shapes:
            shapes[key] = look_up(settings)
        shape, digest = shapes[key]
        with naming(settings):
            kind.check(params, settings.budget, shape)
            kind.check_cache(params, settings.cache)
        task.check(shape)
        window = f"the window of model {shape.name!r}"
        checks.sizes("method", params, shape.window, window)
        checks.sizes("cache", settings.cache, shape.window, window)
        checks.sizes("task", task_params, max(MOST_COUNT, shape.window), "for which nobody waits")
        if task.teaches and settings.scope != "full_prompt":
            raise ConfigError(
                f"compression_scope={settings.scope} has no meaning for task={task.name}, whose prompts have no "
                "question; use full_prompt"
            )
        config = settings.resolved() | {
            "model_digest": digest,
            "task_version": task.version,
            "method_version": kind.version,
        }
        if task.data_digest is not None:
            config["data_digest"] = task.data_digest
        sparsity = sparsity_of(settings, kind)
        if sparsity is not None:
            checks.sizes("prefill", sparsity, shape.window, window)
            config["prefill_version"] = sparsity.version
        config = as_begun(settings, config)
        path = place(settings, config)
        if path in seen:
            raise ConfigError(f"two cells of this sweep are the same run ({path.name}); leave one of them out")
        seen[path] = settings
        ready.append(Cell(settings, kind, params, task, shape, config, path, sparsity))
    return ready


def sparsity_of(settings: Settings, kind: type[SelectiveAttention]) -> VerticalSlash | None:
    """What the prefill leaves out; None where that is nothing."""
    chosen = settings.prefill
    if chosen is None:
        return None
    if kind.thins:
        raise ConfigError(
            f"method={settings.method.name} has a prefill of its own, which prefill={chosen.name} cannot make sparse; "
            "use prefill=exact with it"
        )
    return build(load_class(chosen), chosen.params, "prefill")


def resolve_hardware(settings: Settings) -> Settings:
    """What `auto` stands for in device and dtype. Workers may have a GPU where this process has none."""
    if settings.pool is not None and settings.device.startswith("cuda"):
        return replace(settings, dtype="bfloat16" if settings.dtype == "auto" else settings.dtype)
    device = resolve_device(settings.device)
    return replace(settings, device=device, dtype=resolve_dtype(settings.dtype, device))


def look_up(settings: Settings) -> tuple[ModelShape, str]:
    """A model's shape, and a short name of its weights, before they are loaded."""
    spec = settings.model
    if settings.weights == "random":
        return shape_of(random_config(spec), spec.name), "random"
    shape = read_shape(spec.name, spec.id, revision=spec.revision, trust_remote_code=spec.trust_remote_code)
    where, _ = locate(spec.id, spec.revision, spec.trust_remote_code)
    return shape, digest_of(where, spec.revision)


def as_begun(settings: Settings, config: dict[str, Any]) -> dict[str, Any]:
    """`config`; with the digest of earlier runs where such a run was begun, and the checkpoint not written to since.

    They knew a local checkpoint by its files' ends, which cannot tell whether it was edited in between.
    """
    spec = settings.model
    if settings.weights == "random":
        return config
    where, _ = locate(spec.id, spec.revision, spec.trust_remote_code)
    if not Path(where).exists():
        return config
    first = first_digest_of(where)
    earlier = config | {"model_digest": first}
    recorded = place(settings, earlier) / "config.yaml"
    is_begun = recorded.is_file() and first.encode() in recorded.read_bytes()
    return earlier if is_begun and changed_at(where) < recorded.stat().st_mtime else config


def random_config(spec: ModelSpec) -> Any:
    """The architecture to draw weights for: as conf/architecture has it, else from where the model is."""
    names = (spec.name, spec.name.removesuffix("-instruct"))
    file = next((path for name in names if (path := ARCHITECTURES / f"{name}.yaml").is_file()), None)
    given = None if file is None else yaml.safe_load(file.read_text())
    return read_config(spec.id, given, revision=spec.revision, trust_remote_code=spec.trust_remote_code)


def place(settings: Settings, config: dict[str, Any]) -> Path:
    """The run's folder."""
    if settings.out is not None:
        return settings.out / run_name(config) if settings.is_sweep else settings.out
    return RUNS / run_name(config)


def run_group(cells: Sequence[Cell], models: "Models") -> dict[Path, RunResult]:
    """Run the cells of one group."""
    with ExitStack() as stack:
        folders = open_folders(cells, stack)
        todo = [cell for cell in cells if folders[cell.path].finished is None]
        if todo:
            Group(todo, folders).run(models)
        return results_of(cells, folders)


def open_folders(cells: Sequence[Cell], stack: ExitStack) -> dict[Path, RunFolder]:
    """The cells' folders, locked until the stack is left, with all that earlier processes answered."""
    folders: dict[Path, RunFolder] = {}
    for cell in sorted(cells, key=lambda cell: cell.path):  # in one order: two processes must not wait for each other
        text = yaml.safe_dump(cell.config, sort_keys=False, allow_unicode=True)
        folder = RunFolder.open(cell.path, cell.config, text, on_wait=waiting(cell.path))
        folders[cell.path] = stack.enter_context(folder)
        for shard in folder.shards():
            folder.take(shard, on_wait=waiting(shard))
        for note in folder.notes:
            log(note)
    return folders


def results_of(cells: Sequence[Cell], folders: dict[Path, RunFolder]) -> dict[Path, RunResult]:
    """What finished cells say."""
    results = {}
    for cell in cells:
        result = folders[cell.path].finished
        assert result is not None, f"{cell.path} was run and has no result"
        results[cell.path] = result
    return results


def waiting(path: Path) -> Callable[[Holder], None]:
    """What to say while another process works on the same folder."""
    return lambda holder: log(f"{path} is in use by {holder}; waiting for it to end")


def log(line: str) -> None:
    """A line on standard error."""
    Progress("", 0, 0).say(line)


class Models:
    """The model that was loaded last: groups with the same one that follow each other load it once."""

    def __init__(self) -> None:
        self.key: tuple[Any, ...] | None = None
        self.model: Any = None

    def get(self, settings: Settings) -> Model:
        key = (settings.model, settings.dtype, settings.device, settings.weights)
        if key != self.key:
            self.key = self.model = None  # there may be no room for two
            self.model, self.key = load_model(settings), key
        return self.model


def tokenizer_of(settings: Settings) -> Any:
    """The model's tokenizer, before its weights are loaded."""
    spec = settings.model
    if settings.weights == "random":
        return Letters()
    return load_tokenizer(spec.id, revision=spec.revision, trust_remote_code=spec.trust_remote_code)


def load_model(settings: Settings) -> Model:
    spec, dtype, device = settings.model, settings.dtype, settings.device
    if settings.weights == "random":
        return load_random(spec.name, random_config(spec), dtype=dtype, device=device)
    return load(
        spec.name, spec.id, revision=spec.revision, trust_remote_code=spec.trust_remote_code,
        dtype=dtype, device=device,
    )  # fmt: skip


class Group:
    """Unfinished cells with one model, one task and the same samples.

    `answered` are samples of cells that stand in no folder of this process.
    """

    def __init__(
        self,
        cells: Sequence[Cell],
        folders: Mapping[Path, RunFolder],
        answered: Mapping[Path, frozenset[str]] = MappingProxyType({}),
    ) -> None:
        # One task for all: what it learns with the samples, such as a tokenizer, their scores and pictures need too.
        self.cells = [replace(cell, task=cells[0].task) for cell in cells]
        self.folders, self.answered = folders, answered
        self.first = self.cells[0]
        self.started = datetime.now(UTC)
        self.newlines: frozenset[int] | None = None
        # Of samples that were checked and wait to be asked; packed, because tuples take nine times as much memory.
        self.prompts: dict[str, tuple[array[int], array[int]]] = {}
        self.variants: dict[tuple[Path, int], Variant] = {}  # by cell and prompt length

    def run(self, models: Models) -> None:
        """Ask every sample of every cell that has not answered it yet."""
        self.read_samples(tokenizer_of(self.first.settings))
        todo = self.missing()
        self.model = models.get(self.first.settings)
        n_done = self.n - len(todo)
        with Progress(self.title(), self.n, n_done, self.standings()) as self.progress:
            self.ask_all(todo)
        for cell in self.cells:
            self.finish(cell)

    def read_samples(self, tokenizer: Any) -> None:
        """What the cells are asked, in the order of the task: the first `n` of these."""
        self.tokenizer = tokenizer
        self.samples = self.first.task.samples(tokenizer)
        limit = self.first.settings.limit
        self.n = len(self.samples) if limit is None else min(limit, len(self.samples))

    def missing(self) -> list[int]:
        """Which samples a cell has not answered; refuses what cannot be asked before anything is."""
        self.ids: list[str] = []
        todo = []
        for i in range(self.n):
            sample = self.samples[i]  # some tasks make it only now
            self.ids.append(sample.id)
            if self.check_sample(sample):
                todo.append(i)
        return todo

    def ask_all(self, todo: Iterable[int]) -> None:
        with self.model.hooked():
            for i in todo:
                self.ask(self.samples[i])

    def title(self) -> str:
        names = list(dict.fromkeys(cell.settings.method.name for cell in self.cells))
        methods = ",".join(names) if len(names) <= 3 else f"{len(self.cells)} variants"
        return f"{self.first.task.name} {methods}"

    def variant(self, cell: Cell, prompt: Prompt) -> Variant:
        """What the cell is on prompts of this length, made once."""
        key = (cell.path, len(prompt.context_ids))
        if key not in self.variants:
            self.variants[key] = cell.variant(len(prompt.context_ids))
        return self.variants[key]

    def encode(self, sample: Sample) -> Prompt:
        settings = self.first.settings
        if sample.ids is not None:
            return Prompt(sample.ids, ())
        return encode(
            self.tokenizer,
            sample,
            chat=settings.model.chat,
            system_prompt=settings.model.system_prompt,
            scope=settings.scope,
        )

    def check_sample(self, sample: Sample) -> bool:
        """Whether anything is left to ask; refuses what cannot be asked before anything is."""
        prompt = self.encode(sample)
        longest = len(prompt) + sample.max_new_tokens
        if longest > self.first.shape.window:
            raise ConfigError(
                f"sample {sample.id!r} has {len(prompt)} tokens and an answer of up to "
                f"{sample.max_new_tokens}, more than the {self.first.shape.window} of model "
                f"{self.first.settings.model.name!r}; use a shorter task or a longer model"
            )
        sha = sample_hash(sample, prompt)
        missing = False
        for cell in self.cells:
            self.folders[cell.path].check_prompt(sample.id, sha)
            self.variant(cell, prompt)
            missing |= not self.has(cell, sample)
        if missing:
            self.prompts[sample.id] = array("i", prompt.context_ids), array("i", prompt.question_ids)
        return missing

    def has(self, cell: Cell, sample: Sample) -> bool:
        is_elsewhere = sample.id in self.answered.get(cell.path, ())
        return is_elsewhere or self.folders[cell.path].has(sample.id)

    def ask(self, sample: Sample) -> None:
        """Ask one sample of all cells at once; tasks that take times ask one cell after the other."""
        prompt = Prompt(*map(tuple, self.prompts.pop(sample.id)))
        todo = [cell for cell in self.cells if not self.has(cell, sample)]
        self.lesson = self.lesson_of(sample, prompt)
        for thinning, cells in self.by_prefill(todo, prompt).items():
            for together in [[cell] for cell in cells] if self.first.task.alone else [cells]:
                self.ask_together(sample, prompt, together, thinning)
        self.progress.sample_done(sample.id, self.standings())

    def by_prefill(self, cells: Sequence[Cell], prompt: Prompt) -> dict[Thinning | None, list[Cell]]:
        """Cells that can share a pass over a prompt: all of them, but those that leave tokens out of it."""
        shared: dict[Thinning | None, list[Cell]] = {}
        for cell in cells:
            shared.setdefault(self.variant(cell, prompt).thinning, []).append(cell)
        return dict(sorted(shared.items(), key=lambda item: item[0] is not None))  # the ordinary pass first

    def ask_together(self, sample: Sample, prompt: Prompt, cells: Sequence[Cell], thinning: Thinning | None) -> None:
        """Ask cells by one pass over the prompt; where memory does not allow that, one half and then the other."""
        try:
            if self.first.task.alone:
                self.time(sample, prompt, cells[0])
            else:
                with self.traced(sample, cells):
                    self.answer(sample, prompt, cells, thinning)
            return
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            reason = one_line(error)
        free_memory()
        if len(cells) == 1:
            self.keep(cells[0], out_of_memory(sample, prompt, reason), None)
            return
        self.progress.say(
            f"{sample.id}: {len(cells)} variants at once run out of memory; asking one half and then the other"
        )
        left = [cell for cell in cells if not self.has(cell, sample)]
        middle = (len(left) + 1) // 2
        for half in filter(None, (left[:middle], left[middle:])):
            self.ask_together(sample, prompt, half, thinning)

    def answer(self, sample: Sample, prompt: Prompt, cells: Sequence[Cell], thinning: Thinning | None) -> None:
        """One prefill, one line for every cell; a batch for all of them, or for each wave of those that fit."""
        n_new = len(prompt.question_ids) + sample.max_new_tokens
        first, *others = self.waves(cells, prompt, n_new)
        rows: list[SelectiveAttention] = []
        build_seconds = 0.0

        def build(trace: Trace, layer: int) -> None:
            """Every variant takes the layer over while the prefill goes on with the next one."""
            nonlocal build_seconds
            start = perf_counter()
            if not rows:
                rows.extend(self.row(cell, prompt, trace, n_new) for cell in first)
            for row in rows:
                row.build(layer)
            if others:
                trace.hold(layer)
            build_seconds += perf_counter() - start
            self.progress.advance()

        self.progress.stage(f"{sample.id}: reading {len(prompt)} tokens", len(self.model.shape.attention_layers))
        observations = [what for cell in cells for what in self.variant(cell, prompt).observations]
        trace = prefill(self.model, prompt.context_ids, observations, build, thinning, self.first.sparsity)
        prefill_s = trace.seconds - build_seconds
        self.decode_wave(sample, prompt, first, rows, trace, thinning, prefill_s)
        for wave in others:
            rows.clear()
            rows.extend(self.row(cell, prompt, trace, n_new) for cell in wave)
            for layer in trace.shape.attention_layers:
                for row in rows:
                    row.build(layer)
            self.decode_wave(sample, prompt, wave, rows, trace, thinning, prefill_s)

    def row(self, cell: Cell, prompt: Prompt, trace: Trace, n_new: int) -> SelectiveAttention:
        """The cell's variant on one sample, not built yet."""
        row = self.variant(cell, prompt).row(trace, n_new)
        if cell.settings.accesses:
            row.store.accesses = []
        return row

    def waves(self, cells: Sequence[Cell], prompt: Prompt, n_new: int) -> list[Sequence[Cell]]:
        """Cells that are decoded at once, by `sweep.max_variants` or by what fits into memory."""
        model, element_bytes = self.model, self.model.dtype.itemsize
        variants = [self.variant(cell, prompt) for cell in cells]
        sizes = [variant_bytes(variant, model.shape, n_new, element_bytes) for variant in variants]
        room = room_bytes(model.shape, len(prompt.context_ids), element_bytes, model.device)
        return [cells[where] for where in waves(sizes, room, self.first.settings.max_variants)]

    def decode_wave(
        self, sample: Sample, prompt: Prompt, cells: Sequence[Cell], rows: Sequence[SelectiveAttention],
        trace: Trace, thinning: Thinning | None, prefill_s: float,
    ) -> None:  # fmt: skip
        """Decode rows that were built as one batch; what they say goes into their cells' folders."""
        for row in rows:
            row.complete()
        lesson, feed, probe, beside = self.lesson, prompt.question_ids, None, []
        if lesson is not None:
            is_plain = thinning is None and self.first.sparsity is None
            beside = lesson.beside(trace, is_plain)
            feed, probe = lesson.feed, lesson.task.probe(sample, lesson, rows)
        trace.settle()
        n_steps = len(prompt.question_ids) + sample.max_new_tokens - (not prompt.question_ids)
        self.progress.stage(f"{sample.id}: answering, {len(rows)} at once", n_steps)
        decoded = decode(
            self.model, trace, [*rows, *beside],
            max_new_tokens=0 if lesson else sample.max_new_tokens, stop_ids=self.stops(sample), feed=feed,
            min_new_tokens=sample.min_new_tokens, on_step=lambda step, speaking: self.progress.advance(), watch=probe,
        )  # fmt: skip
        marks = [None] * len(rows) if probe is None else probe.marks()
        answers = decoded.answers[: len(rows)]
        for cell, row, answer, mark in zip(cells, rows, answers, marks, strict=True):
            line = self.line(sample, prompt, cell, row, answer, decoded, prefill_s, mark)
            if row.store.accesses:
                with self.file_beside(cell, "accesses", sample, "npz") as path:
                    accesses.write(path, row.store)
            self.keep(cell, line, row)

    def time(self, sample: Sample, prompt: Prompt, cell: Cell) -> None:
        """The task's own passes, of this cell and of full attention in turn."""
        task = cell.task
        assert isinstance(task, Latency), f"{task.name} runs alone and is no Latency"
        self.progress.stage(f"{sample.id}: {cell.settings.method.name}", task.n_passes)
        timed = Timed(self.variant(cell, prompt), cell.sparsity)
        timing = task.measure(self.model, timed, sample, self.progress.advance)
        if cell.settings.trace:
            with self.file_beside(cell, "trace", sample, "json") as path:
                timing.record.write_chrome_trace(path)
        line = self.line(
            sample, prompt, cell, timing.row, Answer(), timing.decoded, timing.prefill_s, timing.mark
        )  # fmt: skip
        self.keep(cell, line, timing.row)

    @contextmanager
    def traced(self, sample: Sample, cells: Sequence[Cell]) -> Iterator[None]:
        """With `trace=true`, where the time went, as a file in each folder."""
        if not self.first.settings.trace:
            yield
            return
        with recording(self.model.device) as record:
            yield
        for cell in cells:
            with self.file_beside(cell, "trace", sample, "json") as path:
                record.write_chrome_trace(path)

    def lesson_of(self, sample: Sample, prompt: Prompt) -> Lesson | None:
        """The sample's continuation, where the task feeds one."""
        task = self.first.task
        if not task.teaches:
            return None
        assert isinstance(task, Taught), f"{task.name} teaches and is no Taught"
        return Lesson(self.model, task, sample, prompt, self.stops(sample))

    def stops(self, sample: Sample) -> frozenset[int]:
        chat_used = uses_chat(self.model.tokenizer, sample, self.first.settings.model.chat)
        if sample.stop_at_newline and self.newlines is None:  # scans the vocabulary, once
            self.newlines = newline_ids(self.model.tokenizer)
        return stop_ids(self.model.tokenizer, self.model.hf.generation_config, sample, chat_used, self.newlines)

    def line(
        self,
        sample: Sample,
        prompt: Prompt,
        cell: Cell,
        row: SelectiveAttention,
        answer: Answer,
        decoded: Decoded,
        prefill_s: float,
        mark: Mark | None,
    ) -> SampleRow:
        text = answer_text(sample, self.model.tokenizer.decode(answer.ids, skip_special_tokens=True))
        n_steps = len(prompt.question_ids) + len(answer.ids) - 1
        steps = decoded.step_seconds[:n_steps] if mark is None else decoded.step_seconds
        ledger = row.store.ledger.summary(row.budget, cell.shape, row.skipped_layers())
        report, share = row.shortened() | row.report(), row.trace.share()
        return SampleRow(
            id=sample.id,
            prompt_sha256=sample_hash(sample, prompt),
            prompt_tokens=len(prompt),
            original_prompt_tokens=int(sample.fields.get("original_prompt_tokens", len(prompt))),
            generated_tokens=len(answer.ids),
            prediction=text,
            references=list(sample.references),
            score=cell.task.score_now(sample, text) if mark is None else mark.score,
            status="ok",
            error=None,
            prefill_s=prefill_s,
            decode_s=sum(steps),
            tpot_s=sum(steps) / len(steps) if steps else None,
            batch_rows=len(decoded.answers),
            ledger=ledger | {"bytes_resident_device_actual": row.store.allocated_bytes()},
            fields={key: value for key, value in sample.fields.items() if key != "original_prompt_tokens"}
            | ({} if mark is None else mark.fields)
            | ({"metric": cell.task.metric} if cell.task.metric else {})
            | ({"scores_later": True} if cell.task.scores_later else {})
            | ({} if share is None else {"prefill_share": share})
            | ({"method_report": report} if report else {}),
        )

    def keep(self, cell: Cell, line: SampleRow, row: SelectiveAttention | None) -> None:
        self.folders[cell.path].append(line, None if row is None else row.store.ledger.columns())

    @contextmanager
    def file_beside(self, cell: Cell, what: str, sample: Sample, suffix: str) -> Iterator[Path]:
        """A file of one sample in the run's folder, there when it is whole."""
        with self.folders[cell.path].placing() as folder:
            yield folder / f"{what}-{file_stem(sample.id)}.{suffix}"

    def standings(self) -> list[Standing]:
        """Scores so far, for whoever watches."""
        return [standing(cell, self.folders[cell.path].rows) for cell in self.cells]

    def finish(self, cell: Cell) -> None:
        """Summarise a cell's samples; its result is written last."""
        folder, settings = self.folders[cell.path], cell.settings
        folder.sort(self.ids)
        result = summarise(folder.rows, facts(cell, folder.rows))
        title = f"{cell.label}, {settings.budget.label()}, {settings.model.name}"
        with folder.placing() as beside:
            cell.task.artifacts(beside, [row.to_dict() for row in folder.rows], title)
        folder.finish(
            result,
            environment()
            | {
                "started": self.started.isoformat(timespec="seconds"),
                "ended": datetime.now(UTC).isoformat(timespec="seconds"),
            },
        )


def standing(cell: Cell, rows: Sequence[SampleRow]) -> Standing:
    """A cell's score so far."""
    score = combined(rows, cell.task.metric)
    return Standing(cell.settings.method.name, cell.request.label(), len(rows), score, cell.task.scores_later)


def facts(cell: Cell, rows: Sequence[SampleRow]) -> RunFacts:
    """What is known of a run beside its scores."""
    settings, notes = cell.settings, list(cell.task.notes)
    shares = [row.fields["prefill_share"] for row in rows if "prefill_share" in row.fields]
    if shares:
        notes.append(f"the prefill computed {fmean(shares):.3f} of the pairs of query and key, and is approximate")
    others = cell.shape.n_layers - len(cell.shape.attention_layers)
    if others:
        notes.append(f"{others} of {cell.shape.n_layers} layers are no full attention and were left as they are")
    return RunFacts(
        method=settings.method.name,
        method_label=cell.label,
        params=dict(settings.method.params),
        task=settings.task.name,
        task_version=cell.task.version,
        dataset=cell.task.dataset,
        data_source=cell.task.data_source,
        model=settings.model.name,
        compressed_layers=list(cell.shape.attention_layers),
        dtype=settings.dtype,
        device=settings.device,
        seed=settings.seed,
        ratio_exact=None if settings.budget.ratio is None else show(settings.budget.ratio),
        budget=settings.budget.tokens,
        comm_exact=show(settings.budget.comm),
        protocol=settings.scope,
        config_hash=config_hash(cell.config),
        versions=environment()["versions"],
        git_sha=environment()["git_sha"],
        peak_rss_bytes=peak_rss_bytes(),
        notes=notes,
        metric=cell.task.metric,
        prefill=EXACT if settings.prefill is None else settings.prefill.name,
        prefill_params={} if settings.prefill is None else dict(settings.prefill.params),
    )


def out_of_memory(sample: Sample, prompt: Prompt, reason: str) -> SampleRow:
    """The line of a sample that did not fit."""
    return SampleRow(
        id=sample.id,
        prompt_sha256=sample_hash(sample, prompt),
        prompt_tokens=len(prompt),
        original_prompt_tokens=int(sample.fields.get("original_prompt_tokens", len(prompt))),
        generated_tokens=0,
        prediction="",
        references=list(sample.references),
        score=None,
        status="oom",
        error=reason,
        prefill_s=None,
        decode_s=None,
        tpot_s=None,
        batch_rows=1,
        ledger={},
        fields={key: value for key, value in sample.fields.items() if key != "original_prompt_tokens"},
    )


def sample_hash(sample: Sample, prompt: Prompt) -> str:
    """Of what is read and what is fed."""
    return prompt_hash([*prompt.context_ids, *prompt.question_ids, *(sample.forced or ())])


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on whichever device."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)  # torch's allocator on the CPU


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def free_memory() -> None:
    """Give back what the failed attempt holds; its frames are gone once the handler was left."""
    import gc

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
