"""The loop over samples: one prefill for all cells that ask the same, one batch to decode them, a folder for each.

A cell is one variant on one task with one model. Cells that agree on model, task, data, dtype and seed form a group;
per sample its unfinished cells share one prefill and decode as rows of one batch. What a cell's folder holds is the
same as if the cell had run alone.

Everything that can be wrong with a cell is found before a model is loaded, and what only the prompts can tell before
the first prefill.

Not here: what a folder is (`evals/results.py`), what a sample is (`evals/task.py`), how a row decodes (`engine`).
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import yaml

from engine.budget import BudgetRequest, show
from engine.decode import Answer, Decoded, decode
from engine.errors import ConfigError
from engine.model import digest_of, load, locate, read_shape, resolve_device, resolve_dtype
from engine.prefill import Thinning, Trace, prefill
from engine.shapes import ModelShape
from evals.progress import Progress
from evals.prompt import Prompt, answer_text, encode, newline_ids, stop_ids, uses_chat
from evals.results import (
    Holder,
    RunFacts,
    RunFolder,
    RunResult,
    SampleRow,
    config_hash,
    environment,
    git_sha,
    peak_rss_bytes,
    prompt_hash,
    run_name,
    summarise,
    versions,
)
from evals.settings import Settings, build_params, load_class
from evals.task import Sample, Task
from methods.base import SelectiveAttention

RUNS = Path(__file__).resolve().parents[1] / "runs"


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

    @property
    def request(self) -> BudgetRequest:
        return self.settings.budget

    @property
    def label(self) -> str:
        return self.kind.label(self.params, self.request)

    def plan(self, s_prompt: int) -> Any:
        """The method's integers for a prompt of so many tokens; `ConfigError` where the budget is too small for it."""
        budget = self.kind.budget_for(self.request, s_prompt)
        return self.kind.plan_for(self.params, budget, self.shape)

    def group(self) -> tuple[Any, ...]:
        """Cells with equal groups can share a prefill."""
        own = ("method", "method_version", "ratio", "budget", "comm", "compensate", "cache")
        return tuple(
            sorted((key, repr(value)) for key, value in self.config.items() if key not in own)
        )


def run_cells(cells: Sequence[Settings]) -> list[tuple[Path, RunResult]]:
    """Run cells, or pick up where an earlier process stopped: each cell's folder and result, in their order."""
    ready = prepare(cells)
    results: dict[Path, RunResult] = {}
    groups: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in ready:
        groups.setdefault(cell.group(), []).append(cell)
    for group in groups.values():
        results.update(run_group(group))
    return [(cell.path, results[cell.path]) for cell in ready]


def prepare(cells: Sequence[Settings]) -> list[Cell]:
    """Check every cell, as far as that goes without a model."""
    ready, shapes, seen = [], {}, {}
    for settings in cells:
        kind = load_class(settings.method)
        params = build_params(kind, settings.method.params, "method")
        task_class: Any = load_class(settings.task)
        task_params = build_params(task_class, settings.task.params, "task")
        task = task_class(task_params, settings.data_dir, settings.seed)
        device = resolve_device(settings.device)
        settings = replace(settings, device=device, dtype=resolve_dtype(settings.dtype, device))
        if settings.model not in shapes:
            spec = settings.model
            shapes[spec] = (
                read_shape(
                    spec.name,
                    spec.id,
                    revision=spec.revision,
                    trust_remote_code=spec.trust_remote_code,
                ),
                digest_of(locate(spec.id, spec.revision, spec.trust_remote_code)[0], spec.revision),
            )
        shape, digest = shapes[settings.model]
        kind.check(params, settings.budget, shape)
        kind.check_cache(params, settings.cache)
        task.check(shape)
        config = settings.resolved() | {
            "model_digest": digest,
            "task_version": task.version,
            "method_version": kind.version,
        }
        path = place(settings, config)
        if path in seen:
            raise ConfigError(
                f"two cells of this sweep are the same run ({path.name}); leave one of them out"
            )
        seen[path] = settings
        ready.append(Cell(settings, kind, params, task, shape, config, path))
    return ready


def place(settings: Settings, config: dict[str, Any]) -> Path:
    """The run's folder."""
    if settings.out is not None:
        return settings.out / run_name(config) if settings.is_sweep else settings.out
    return RUNS / run_name(config)


def run_group(cells: Sequence[Cell]) -> dict[Path, RunResult]:
    """Run the cells of one group."""
    with ExitStack() as stack:
        folders: dict[Path, RunFolder] = {}
        for cell in sorted(
            cells, key=lambda cell: cell.path
        ):  # in one order: two processes must not wait for each other
            text = yaml.safe_dump(cell.config, sort_keys=False, allow_unicode=True)
            folder = RunFolder.open(cell.path, cell.config, text, on_wait=waiting(cell.path))
            folders[cell.path] = stack.enter_context(folder)
            for note in folder.notes:
                log(note)
        todo = [cell for cell in cells if folders[cell.path].finished is None]
        if todo:
            Group(todo, folders).run()
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


class Group:
    """Unfinished cells with one model, one task and the same samples."""

    def __init__(self, cells: Sequence[Cell], folders: dict[Path, RunFolder]) -> None:
        self.cells, self.folders = cells, folders
        self.first = cells[0]
        self.started = datetime.now(UTC)

    def run(self) -> None:
        """Ask every sample of every cell that has not answered it yet."""
        first, spec = self.first, self.first.settings.model
        self.model = load(
            spec.name, spec.id, revision=spec.revision, trust_remote_code=spec.trust_remote_code,
            dtype=first.settings.dtype, device=first.settings.device,
        )  # fmt: skip
        samples = first.task.samples(self.model.tokenizer)
        n = (
            len(samples)
            if first.settings.limit is None
            else min(first.settings.limit, len(samples))
        )
        self.newlines: frozenset[int] | None = None
        todo = [i for i in range(n) if self.check_sample(samples[i])]
        with self.model.hooked(), Progress(self.title(), n, n - len(todo)) as self.progress:
            for i in todo:
                self.ask(samples[i])
        for cell in self.cells:
            self.finish(cell)

    def title(self) -> str:
        names = list(dict.fromkeys(cell.settings.method.name for cell in self.cells))
        methods = ",".join(names) if len(names) <= 3 else f"{len(self.cells)} variants"
        return f"{self.first.task.name} {methods}"

    def encode(self, sample: Sample) -> Prompt:
        settings = self.first.settings
        return encode(
            self.model.tokenizer,
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
        sha = prompt_hash([*prompt.context_ids, *prompt.question_ids])
        missing = False
        for cell in self.cells:
            self.folders[cell.path].check_prompt(sample.id, sha)
            cell.plan(len(prompt.context_ids))
            missing |= not self.has(cell, sample)
        return missing

    def has(self, cell: Cell, sample: Sample) -> bool:
        return self.folders[cell.path].has(sample.id)

    def ask(self, sample: Sample) -> None:
        """Ask one sample of all cells at once; where memory does not allow that, one by one."""
        prompt = self.encode(sample)
        todo = [cell for cell in self.cells if not self.has(cell, sample)]
        for thinning, cells in by_prefill(todo, len(prompt.context_ids)).items():
            try:
                self.answer(sample, prompt, cells, thinning)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                reason = one_line(error)
                free_memory()
                if len(cells) == 1:
                    self.keep(cells[0], out_of_memory(sample, prompt, reason), None)
                else:
                    self.progress.say(
                        f"{sample.id}: {len(cells)} variants at once run out of memory; asking them one by one"
                    )
                    for cell in cells:
                        self.ask_alone(sample, prompt, cell, thinning)
        self.progress.sample_done(sample.id, self.scores())

    def ask_alone(
        self, sample: Sample, prompt: Prompt, cell: Cell, thinning: Thinning | None
    ) -> None:
        try:
            self.answer(sample, prompt, [cell], thinning)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            reason = one_line(error)
            free_memory()
            self.keep(cell, out_of_memory(sample, prompt, reason), None)

    def answer(
        self, sample: Sample, prompt: Prompt, cells: Sequence[Cell], thinning: Thinning | None
    ) -> None:
        """One prefill, one batch, one line for every cell."""
        n_new = len(prompt.question_ids) + sample.max_new_tokens
        rows: list[SelectiveAttention] = []
        build_seconds = 0.0

        def build(trace: Trace, layer: int) -> None:
            """Every variant takes the layer over while the prefill goes on with the next one."""
            nonlocal build_seconds
            start = perf_counter()
            if not rows:
                rows.extend(
                    cell.kind(cell.params, cell.request, trace, n_new, cell.settings.cache)
                    for cell in cells
                )
            for row in rows:
                row.build(layer)
            build_seconds += perf_counter() - start
            self.progress.advance()

        self.progress.stage(
            f"{sample.id}: reading {len(prompt)} tokens", len(self.model.shape.full_layers)
        )
        n_prompt = len(prompt.context_ids)
        observations = [
            what
            for cell in cells
            for what in cell.kind.observations(cell.params, cell.plan(n_prompt))
        ]
        trace = prefill(self.model, prompt.context_ids, observations, build, thinning)
        for row in rows:
            row.complete()
        trace.settle()
        prefill_s = trace.seconds - build_seconds
        self.progress.stage(
            f"{sample.id}: answering, {len(rows)} at once", n_new - (not prompt.question_ids)
        )
        decoded = decode(
            self.model, trace, rows,
            max_new_tokens=sample.max_new_tokens, stop_ids=self.stops(sample), feed=prompt.question_ids,
            on_step=lambda step, speaking: self.progress.advance(),
        )  # fmt: skip
        for cell, row, answer in zip(cells, rows, decoded.answers, strict=True):
            self.keep(cell, self.line(sample, prompt, cell, row, answer, decoded, prefill_s), row)

    def stops(self, sample: Sample) -> frozenset[int]:
        chat_used = uses_chat(self.model.tokenizer, sample, self.first.settings.model.chat)
        if sample.stop_at_newline and self.newlines is None:  # scans the vocabulary, once
            self.newlines = newline_ids(self.model.tokenizer)
        return stop_ids(
            self.model.tokenizer, self.model.hf.generation_config, sample, chat_used, self.newlines
        )

    def line(
        self,
        sample: Sample,
        prompt: Prompt,
        cell: Cell,
        row: SelectiveAttention,
        answer: Answer,
        decoded: Decoded,
        prefill_s: float,
    ) -> SampleRow:
        text = answer_text(
            sample, self.model.tokenizer.decode(answer.ids, skip_special_tokens=True)
        )
        n_steps = (
            len(prompt.question_ids) + len(answer.ids) - 1
            if prompt.question_ids
            else len(answer.ids) - 1
        )
        steps = decoded.step_seconds[:n_steps]
        ledger = row.store.ledger.summary(row.budget, cell.shape, row.exempt_layers())
        report = row.report()
        return SampleRow(
            id=sample.id,
            prompt_sha256=prompt_hash([*prompt.context_ids, *prompt.question_ids]),
            prompt_tokens=len(prompt),
            original_prompt_tokens=int(sample.fields.get("original_prompt_tokens", len(prompt))),
            generated_tokens=len(answer.ids),
            prediction=text,
            references=list(sample.references),
            score=cell.task.score(sample, text),
            status="ok",
            error=None,
            prefill_s=prefill_s,
            decode_s=sum(steps),
            tpot_s=sum(steps) / len(steps) if steps else None,
            batch_rows=len(decoded.answers),
            ledger=ledger | {"bytes_resident_device_actual": row.store.allocated_bytes()},
            fields={
                key: value
                for key, value in sample.fields.items()
                if key != "original_prompt_tokens"
            }
            | ({"method_report": report} if report else {}),
        )

    def keep(self, cell: Cell, line: SampleRow, row: SelectiveAttention | None) -> None:
        self.folders[cell.path].append(line, None if row is None else row.store.ledger.columns())

    def scores(self) -> str:
        """Scores so far, for whoever watches."""
        parts = []
        for cell in self.cells[:4]:
            got = [row.score for row in self.folders[cell.path].rows if row.score is not None]
            mean = f"{sum(got) / len(got):.3f}" if got else "out of memory"
            parts.append(f"{cell.settings.method.name} {mean}" if len(self.cells) > 1 else mean)
        return "  ".join(parts) + ("  …" if len(self.cells) > 4 else "")

    def finish(self, cell: Cell) -> None:
        """Summarise a cell's samples; its result is written last."""
        folder, settings = self.folders[cell.path], cell.settings
        result = summarise(folder.rows, facts(cell))
        title = f"{cell.label}, {settings.budget.label()}, {settings.model.name}"
        cell.task.artifacts(folder.path, [row.to_dict() for row in folder.rows], title)
        folder.finish(
            result,
            environment()
            | {
                "started": self.started.isoformat(timespec="seconds"),
                "ended": datetime.now(UTC).isoformat(timespec="seconds"),
            },
        )


def by_prefill(cells: Sequence[Cell], s_prompt: int) -> dict[Thinning | None, list[Cell]]:
    """Cells that can share a pass over a prompt: all of them, but those that leave tokens out of it."""
    shared: dict[Thinning | None, list[Cell]] = {}
    for cell in cells:
        shared.setdefault(cell.kind.thinning(cell.plan(s_prompt)), []).append(cell)
    return shared


def facts(cell: Cell) -> RunFacts:
    """What is known of a run beside its samples."""
    settings, notes = cell.settings, list(cell.task.notes)
    others = cell.shape.n_layers - len(cell.shape.full_layers)
    if others:
        notes.append(
            f"{others} of {cell.shape.n_layers} layers are no full attention and were left as they are"
        )
    return RunFacts(
        method=settings.method.name,
        method_label=cell.label,
        params=dict(settings.method.params),
        task=settings.task.name,
        task_version=cell.task.version,
        dataset=cell.task.dataset,
        data_source=cell.task.data_source,
        model=settings.model.name,
        compressed_layers=list(cell.shape.full_layers),
        dtype=settings.dtype,
        device=settings.device,
        seed=settings.seed,
        ratio_exact=None if settings.budget.ratio is None else show(settings.budget.ratio),
        budget=settings.budget.tokens,
        comm_exact=show(settings.budget.comm),
        protocol=settings.scope,
        config_hash=config_hash(cell.config),
        versions=versions(),
        git_sha=git_sha(),
        peak_rss_bytes=peak_rss_bytes(),
        notes=notes,
    )


def out_of_memory(sample: Sample, prompt: Prompt, reason: str) -> SampleRow:
    """The line of a sample that did not fit."""
    return SampleRow(
        id=sample.id,
        prompt_sha256=prompt_hash([*prompt.context_ids, *prompt.question_ids]),
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
        fields={
            key: value for key, value in sample.fields.items() if key != "original_prompt_tokens"
        },
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on whichever device."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(
        error
    )  # torch's allocator on the CPU


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def free_memory() -> None:
    """Give back what the failed attempt holds; its frames are gone once the handler was left."""
    import gc

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
