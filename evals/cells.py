"""Cells: one variant on one task with one model, ready to run: its device, its digest, its folder.

Not here: what is asked for, and whether it can be met (`evals/asked.py`), the loop over a cell's samples
(`evals/loop.py`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvbench.engine.budget import NO_FRAME, BudgetRequest, Frame
from kvbench.engine.errors import ConfigError
from kvbench.engine.post_processing import AS_THEY_ARE, PostProcessing
from kvbench.engine.shapes import Checkpoint, ModelShape
from kvbench.engine.sparse.base import SparsePrefill
from kvbench.evals.asked import RUNS, Asked, AskedMethod, Lookups, ask_method, check
from kvbench.evals.models import look_into, look_up, name_of, resolve_hardware
from kvbench.evals.outside import is_target
from kvbench.evals.refusals import leave_out, naming, refuse_nothing_left
from kvbench.evals.settings import Settings, load_class
from kvbench.methods.base import SelectiveAttention, Variant
from kvbench.methods.rules import Quantizer, Rules
from kvbench.results import RunFolder, run_name
from kvbench.tasks.base import Task

FIRST = Rules.version  # of what makes codes, until its answers change


@dataclass(frozen=True)
class Cell:
    """One run, checked and ready."""

    settings: Settings  # dtype and device resolved
    rules: type[Rules]
    params: Any
    task: Task
    shape: ModelShape
    config: dict[str, Any]  # what identifies the run
    path: Path
    sparsity: SparsePrefill | None = None  # of the prefill
    quantizer: Quantizer | None = None  # of a composition: who makes codes
    post_processing: PostProcessing = AS_THEY_ARE  # what becomes of kept keys and values
    draw: int | None = None  # of a prompt's answers, where several are drawn

    @property
    def kind(self) -> type[SelectiveAttention]:
        """The method."""
        return load_class(self.settings.method)

    @property
    def request(self) -> BudgetRequest:
        return self.settings.budget

    @property
    def asked(self) -> AskedMethod:
        return AskedMethod(self.settings, self.rules, self.params, self.sparsity, self.quantizer, self.post_processing)

    @property
    def label(self) -> str:
        """The variant's name, with all that warns of what it is: the one place that says it (`method_label`)."""
        label = self.rules.label(self.params, self.request)
        if self.shape is not None and self.shape.choosing_layers:  # a submission's may be unknown (evals/submission)
            label += " (the model's choice)"
        asking = None if self.task is None else self.task.asking
        is_asked = self.settings.scope == "full_prompt" and (asking is None or asking.mode != "independent")
        if self.rules.is_question_free and is_asked:  # the question is part of what is compressed
            label += ", whole prompt"
        if self.settings.allocator is not None:
            label = label.replace(self.rules.title, f"{self.rules.title}+{self.settings.allocator.label()}", 1)
        if self.post_processing.changes:
            label += f" ({self.post_processing.label()})"
        if self.quantizer is not None:
            label += f" + {self.quantizer.title(self.rules.drops)}"
        if self.settings.evicts:
            label += f", in chunks of {self.settings.chunk:,}"
        if self.sparsity is None:
            return label
        return f"{self.sparsity.title} + {label}" if self.rules.has_budget else self.sparsity.title

    def variant(self, s_prompt: int, frame: Frame = NO_FRAME) -> Variant:
        """The cell's method on prompts of so many tokens; `ConfigError` where the budget is too small for it."""
        with naming(self.settings):
            asked = self.settings
            found = self.kind.variant_for(
                self.params, self.request, self.shape, s_prompt, asked.cache, asked.allocator, frame, self.loaded_quantizer,
                self.post_processing,
            )  # fmt: skip
        return replace(found, is_checked=True) if is_target(asked.method.target) else found

    def draws(self) -> "list[Cell]":
        """The cell once for each answer to a prompt."""
        return [replace(self, draw=draw) for draw in self.settings.sampling.draws()]

    @property
    def loaded_quantizer(self) -> Quantizer | None:
        """The method that makes codes, and no longer its rules alone."""
        if self.settings.compose is None or self.quantizer is None:
            return None
        return self.quantizer._replace(rules=load_class(self.settings.compose))

    def group(self) -> tuple[Any, ...]:
        """Cells with equal groups can share a prefill."""
        own = (
            *("method", "method_version", "method_data_digest", "ratio", "budget", "comm", "compensate", "cache"),
            *("memory", "compose", "compose_version", "compose_order", "allocator", "budget_counts"),
            *("positions", "dropped", "merging", "prefill_evict"),
        )
        return tuple(sorted((key, repr(value)) for key, value in self.config.items() if key not in own))


def ready_cells(asked: Sequence[Asked]) -> list[Cell]:
    """A cell for each that is asked for; the models' files are converted now, where they have to be.

    Cells of a method without a budget that differ in nothing else are one cell, which stands in the place of each.
    """
    look = Lookups()
    ready: list[Cell] = []
    once: dict[str, Cell] = {}  # of methods without a budget, by all that tells them apart
    places: set[Path] = set()
    for one in asked:
        key = f"{one.settings.resolved()}"
        if key in once:
            ready.append(once[key])
            continue
        try:
            cell = ready_cell(one, look)
        except ConfigError as error:
            leave_out(one.settings, error, lambda x: ready_cell(x, look), (x for x in asked if x is not one))
            continue
        if cell.path in places:
            raise ConfigError(f"two cells of this sweep are the same run ({cell.path.name}); leave one of them out")
        places.add(cell.path)
        ready.append(cell)
        if not one.rules.has_budget or one.rules.adapts(one.params):
            once[key] = cell
    refuse_nothing_left(ready)
    return ready


def distinct(cells: Iterable[Cell]) -> list[Cell]:
    """Each cell once, in their order."""
    return list({cell.path: cell for cell in cells}.values())


def ready_cell(asked: Asked, look: Lookups) -> Cell:
    """The cell with what only the model's files tell: these are converted now, where they have to be."""
    settings = resolve_hardware(asked.settings)
    shape = asked.shape or checked_shape(asked, settings, look)
    config = identity(settings, asked, look(name_of, settings))
    path = place(settings, config)
    RunFolder.refuse(path, config, {})
    if not is_finished(path):  # else nothing is asked of the model, and transformers need not be imported
        shape = checked_shape(asked, settings, look)
        with naming(settings):
            checkpoint = look(look_into, settings)
            asked.rules.check_model(asked.params, checkpoint)
            asked.post_processing.check_model(checkpoint)
    return Cell(
        settings, asked.rules, asked.params, asked.task, shape, config, path, asked.sparsity, asked.quantizer,
        asked.post_processing,
    )  # fmt: skip


def checked_shape(asked: Asked, settings: Settings, look: Lookups) -> ModelShape:
    """The model's shape as transformers reads its configuration, of which the header may have said nothing."""
    shape = look(look_up, settings)
    if shape != asked.shape:
        check(asked, shape)
    return shape


def cell_without_task(
    given: Settings, shape: ModelShape | None = None, config: dict[str, Any] | None = None, path: Path | None = None
) -> Cell:
    """A cell that says what its method is called and plans, where nothing is asked of it, or nobody knows the model."""
    settings, rules, params, sparsity, quantizer, post_processing = ask_method(given)
    nothing: Any = None
    return Cell(
        settings,
        rules,
        params,
        nothing,
        shape or nothing,
        config or {},
        path or nothing,
        sparsity,
        quantizer,
        post_processing,
    )


def check_loaded(cells: Iterable[Cell], model: Checkpoint) -> None:
    """Ask again what methods need of a model: some of it, such as how layers turn queries, only weights show."""
    for cell in cells:
        with naming(cell.settings):
            cell.rules.check_model(cell.params, model)
            cell.post_processing.check_model(model)


def identity(settings: Settings, asked: Asked, digest: str) -> dict[str, Any]:
    """What identifies a run: its configuration, and the versions of all that its answers depend on."""
    task, sparsity = asked.task, asked.sparsity
    config = settings.resolved() | {
        "model_digest": digest,
        "task_version": task.version,
        "method_version": asked.rules.version,
    }
    if task.data_digest is not None:
        config["data_digest"] = task.data_digest
    if (method_data := asked.rules.data_digest(asked.params)) is not None:
        config["method_data_digest"] = method_data
    if sparsity is not None:
        config["prefill_version"] = sparsity.version
        if (prefill_data := sparsity.data_digest()) is not None:
            config["prefill_data_digest"] = prefill_data
    if asked.quantizer is not None and asked.quantizer.rules.version != FIRST:  # runs of the first one do not say it
        config["compose_version"] = asked.quantizer.rules.version
    return config


def is_finished(path: Path) -> bool:
    """Whether a run has a result, which may turn out damaged."""
    return (path / "result.json").is_file()


def place(settings: Settings, config: dict[str, Any]) -> Path:
    """The run's folder."""
    if settings.out is not None:
        return settings.out / run_name(config) if settings.is_sweep else settings.out
    return RUNS / run_name(config)


def grouped(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Cells that can share a prefill, together."""
    groups: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in cells:
        groups.setdefault(cell.group(), []).append(cell)
    return list(groups.values())
