"""Cells: one variant on one task with one model, from the words that ask for it to a run that is checked and ready.

A cell is checked three times, each time with all that is known by then (`check`): by its words and by the model's
header, for all cells before torch is imported, and by the model's files before anything is made.

Not here: what cannot be asked together (`methods/combinations.py`), values of single keys (`evals/settings.py`), what
only prompts tell (`evals/prepare.py`), the loop over a cell's samples (`evals/loop.py`).
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kvbench import checkout
from kvbench.engine.budget import EVERYTHING, NO_FRAME, BudgetRequest, Bytes, Frame
from kvbench.engine.caches.blocks import BlockCacheSpec
from kvbench.engine.checkpoints.header import header_shape, shape_of_config
from kvbench.engine.declared import build, build_params
from kvbench.engine.errors import ConfigError, unknown_name
from kvbench.engine.post_processing import AS_THEY_ARE, Merging, PostProcessing
from kvbench.engine.selection import Reuse
from kvbench.engine.shapes import Checkpoint, ModelShape
from kvbench.engine.terminal import say
from kvbench.evals.every import methods_for
from kvbench.evals.outside import is_target
from kvbench.evals.refusals import CellRefused, leave_out, naming, refuse_nothing_left
from kvbench.evals.settings import (
    ORDERS,
    Choice,
    GivenPostProcessing,
    Settings,
    architecture,
    load_class,
)  # fmt: skip
from kvbench.methods.combinations import COMMAND, MODEL, SHAPE, TABLE, Case, refusals
from kvbench.methods.rules import Quantizer, Rules, planned
from kvbench.methods.traits import Traits
from kvbench.results import RunFolder, run_name
from kvbench.results.names import own_methods
from kvbench.results.schema import METRICS
from kvbench.tasks.base import Task

if TYPE_CHECKING:  # imports torch
    from kvbench.engine.sparse.base import SparsePrefill
    from kvbench.methods.base import SelectiveAttention, Variant

RUNS = Path(checkout.runs())
T = TypeVar("T")
FIRST = Rules.version  # of what makes codes, until its answers change
MOST_COUNT = 10_000  # of anything that a task counts
NO_CACHE = BlockCacheSpec(0, 128, 32, "lfu")  # of a method that has no budget, whatever the others get
UNKNOWN: Any = None


@dataclass(frozen=True)
class Cell:
    """One run. Before it is ready its device may be `auto`, and it has no folder."""

    settings: Settings  # as they were given, but for a method without a budget
    rules: type[Rules]
    params: Any
    task: Task = UNKNOWN  # None: nothing is asked
    shape: ModelShape = UNKNOWN  # None: the model's header does not say it
    config: dict[str, Any] = UNKNOWN  # what identifies the run
    path: Path = UNKNOWN
    sparsity: "SparsePrefill | None" = None  # of the prefill
    quantizer: Quantizer | None = None  # who makes codes of what the method keeps, or has on the host
    post_processing: PostProcessing = AS_THEY_ARE  # what becomes of kept keys and values
    draw: int | None = None  # of a prompt's answers, where several are drawn
    task_params: Any = None

    @property
    def kind(self) -> "type[SelectiveAttention]":
        """The method."""
        return load_class(self.settings.method)

    @property
    def traits(self) -> Traits:
        return self.rules.traits_of(self.params)

    @property
    def request(self) -> BudgetRequest:
        return self.settings.budget

    @cached_property
    def reuse(self) -> Reuse | None:
        """Which layers choose for others, where the model is known."""
        asked = self.settings.reuse
        if asked is None or self.shape is None:
            return None
        return asked.on(self.shape, self.rules.whole_layers(self.params, self.shape))

    @property
    def of_layer(self) -> BudgetRequest:
        """The budget of a layer that chooses."""
        asked, reuse = self.settings.reuse, self.reuse
        return self.request if asked is None or reuse is None else asked.of_anchors(self.request, reuse)

    def case(self, model: Checkpoint | None = None, rung: str | None = None) -> Case:
        """What the table of combinations reads."""
        return Case(
            self.rules, self.params, self.settings, task=self.task, shape=self.shape, quantizer=self.quantizer,
            post_processing=self.post_processing, checkpoint=model, rung=rung, instead=self.instead,
        )  # fmt: skip

    def instead(self) -> str:
        """Methods to use where prompt and answer are to be compressed together."""
        own = f"{self.settings.method.name}_decode"
        return f"method={own}" if own in own_methods() else f"one of {', '.join(methods_for('answer'))}"

    @property
    def label(self) -> str:
        """The variant's name, with all that warns of what it is: the one place that says it (`method_label`)."""
        label = self.rules.label(self.params, self.of_layer)
        if self.shape is not None and self.shape.choosing_layers:  # a submission's may be unknown (evals/submission)
            label += " (the model's choice)"
        asking = None if self.task is None else self.task.asking
        is_asked = self.settings.scope == "full_prompt" and (asking is None or asking.mode != "independent")
        if self.traits.is_question_free and is_asked:  # the question is part of what is compressed
            label += ", whole prompt"
        if self.settings.allocator is not None:
            label = label.replace(self.rules.title, f"{self.rules.title}+{self.settings.allocator.label()}", 1)
        if self.post_processing.changes:
            label += f" ({self.post_processing.label()})"
        if self.quantizer is not None:
            label += f" + {self.quantizer.title(self.rules.traits.drops)}"
        if self.settings.reuse is not None:
            label += f", {self.settings.reuse.label}"
        if self.settings.evicts:
            label += f", in chunks of {self.settings.chunk:,}"
        if self.sparsity is None:
            return label
        return f"{self.sparsity.title} + {label}" if self.rules.traits.has_budget else self.sparsity.title

    def variant(self, s_prompt: int, frame: Frame = NO_FRAME) -> "Variant":
        """The cell's method on prompts of so many tokens; `ConfigError` where the budget is too small for it."""
        with naming(self.settings):
            asked = self.settings
            found = self.kind.variant_for(
                self.params, self.of_layer, self.shape, s_prompt, asked.cache, asked.allocator, frame,
                self.loaded_quantizer, self.post_processing,
            )  # fmt: skip
        return replace(found, reuse=self.reuse, is_checked=is_target(asked.method.target))

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
            *("positions", "dropped", "merging", "prefill_evict", "reuse", "reuse_data_digest"),
        )
        return tuple(sorted((key, repr(value)) for key, value in self.config.items() if key not in own))


class Lookups:
    """Facts on models, each looked up once; a refusal of a model is kept too."""

    def __init__(self) -> None:
        self.found: dict[Any, Any] = {}

    def __call__(self, look: "Callable[[Settings], T]", settings: Settings) -> "T":
        key = (look, settings.model, settings.weights)
        if key not in self.found:
            try:
                self.found[key] = look(settings)
            except ConfigError as error:
                self.found[key] = error
        if isinstance(self.found[key], ConfigError):
            raise self.found[key]
        return self.found[key]


def ask(cells: Sequence[Settings]) -> list[Cell]:
    """Check every cell as far as that goes without torch."""
    look = Lookups()
    asked: list[Cell] = []
    left_out: Counter[str] = Counter()
    for settings in cells:
        try:
            asked.append(ask_one(settings, look))
        except ConfigError as error:
            if settings.skips_refused:
                left_out[str(error)] += 1
            else:
                leave_out(settings, error, lambda one: ask_one(one, look), (x for x in cells if x is not settings))
    for why, n in left_out.items():
        say(f"left out{f', {n} cells' * (n > 1)}: {why}", file=sys.stderr)
    refuse_nothing_left(asked)
    return asked


def ask_one(given: Settings, look: Lookups) -> Cell:
    """Check a cell without torch."""
    cell = cell_of(given)
    kind, params = class_and_params(given.task)
    task: Task = kind(params, cell.settings.data_dir, cell.settings.seed)
    cell = replace(cell, task=task, task_params=params)
    check(cell, COMMAND)
    if (shape := look(early_shape, cell.settings)) is not None:
        cell = replace(cell, shape=shape)
        check(cell, SHAPE)
    return cell


def cell_without_task(
    given: Settings, shape: ModelShape = UNKNOWN, config: dict[str, Any] | None = None, path: Path = UNKNOWN
) -> Cell:
    """A cell that says what its method is called and plans, where nothing is asked of it, or nobody knows the model."""
    cell = replace(cell_of(given), shape=shape, config=config or {}, path=path)
    check(cell, COMMAND)
    return cell


def cell_of(given: Settings) -> Cell:
    """What is asked of a method, with its parameters, before anything is checked but these."""
    rules, params = rules_and_params(given.method)
    traits = rules.traits_of(params)
    settings = given
    if not traits.has_budget or traits.adapts:
        settings = replace(
            given, budget=EVERYTHING, cache=NO_CACHE, allocator=None, compose=None, compose_order=ORDERS[0],
            reuse=given.reuse if traits.changes or traits.adapts else None,
            post_processing=GivenPostProcessing(None, None, Merging()), evicts=given.evicts and traits.has_budget,
        )  # fmt: skip
    if settings.evicts and traits.in_chunks is not None:
        params = replace(params, **traits.in_chunks)
    return Cell(
        settings, rules, params, sparsity=sparsity_of(settings.prefill), quantizer=quantizer_of(settings),
        post_processing=settings.post_processing.over(traits.post_processing),
    )  # fmt: skip


def check(cell: Cell, stage: str, model: Checkpoint | None = None) -> None:
    """Raise `ConfigError` where a cell cannot be met, by all that is known at a stage: its words; the shape of its
    model; the model's files, or once they are loaded its weights."""
    settings, rules, params, shape, task = cell.settings, cell.rules, cell.params, cell.shape, cell.task
    for row, sentence in refusals(TABLE, cell.case(model), stage):
        raise CellRefused(settings, sentence) if row.names_cell else ConfigError(sentence)
    if stage == COMMAND and task is not None and task.metric is not None and task.metric not in METRICS:
        raise unknown_name(f"metric of task={settings.task.name}", task.metric, METRICS)
    if stage == MODEL and model is not None:
        with naming(settings):
            rules.check_model(params, model)
        if settings.reuse is not None:
            settings.reuse.check_model(model)
    if stage != SHAPE:
        return
    window = shape.window, f"the window of model {shape.name!r}"
    with naming(settings):
        rules.check(params, cell.of_layer, shape)
        rules.check_cache(params, settings.cache)
        if cell.quantizer is not None:
            cell.quantizer.rules.check_shape(cell.quantizer.params, shape)
        refuse_sizes("method", params, *window)
        refuse_sizes("cache", settings.cache, *window)
    if cell.sparsity is not None:
        cell.sparsity.check(shape)
        refuse_sizes("prefill", cell.sparsity, *window)
    if task is None:
        return
    task.check(shape)
    refuse_sizes("task", cell.task_params, max(MOST_COUNT, shape.window), "for which nobody waits")
    shortest = task.shortest_prompt()
    # Of bytes a prompt that is shorter still has a larger share.
    if shortest is not None and not isinstance(settings.budget.memory, Bytes):
        with naming(settings):
            planned(rules, params, cell.of_layer, shape, shortest, settings.cache, quantizer=cell.quantizer)


def rules_and_params(choice: Choice) -> tuple[type[Rules], Any]:
    """The rules of the method that is chosen, and its parameters, checked."""
    rules = load_class(choice)
    try:
        return rules, build_params(rules, choice.params, choice.group)
    except ConfigError as error:
        raise ConfigError(f"method={choice.name}: {error}") from None


def class_and_params(choice: Choice) -> tuple[Any, Any]:
    """The class that a group's file names, and its parameters, checked."""
    kind = load_class(choice)
    return kind, build_params(kind, choice.params, choice.group)


def sparsity_of(chosen: Choice | None) -> "SparsePrefill | None":
    """The rule by which the prefill leaves out pairs; None where it computes all."""
    return None if chosen is None else build(load_class(chosen), chosen.params, "prefill")


def quantizer_of(settings: Settings) -> Quantizer | None:
    """The method that makes codes of what is kept."""
    if settings.compose is None:
        return None
    rules: Any
    rules, params = rules_and_params(settings.compose)
    return Quantizer(rules, params, settings.compose_order == "quantise_first")


def refuse_sizes(group: str, params: Any, most: int, of: str) -> None:
    """Raise `ConfigError` where a whole number of a dataclass, or of its lists, is above `most`.

    All are sizes or counts but seeds and tokens' ids. A larger one would have no meaning, and where it is a kernel, a
    page or a list's length no end either.
    """
    for field in fields(params):
        value = getattr(params, field.name)
        if is_dataclass(value) and not isinstance(value, type):
            refuse_sizes(f"{group}.{field.name}".removesuffix(".params"), value, most, of)
        numbers = value if isinstance(value, tuple) else (value,)
        for number in numbers:
            if isinstance(number, int) and number > most and not field.name.endswith(("seed", "_ids")):
                raise ConfigError(f"{group}.{field.name}={number} is out of range; it is at most {most}, {of}")


def early_shape(settings: Settings) -> ModelShape | None:
    """The model's shape, where it can be read without torch."""
    spec = settings.model
    given = architecture(spec)
    if settings.weights == "random" and given is not None:
        return shape_of_config(given, spec.name)
    shape = header_shape(spec.name, spec.id, spec.revision)  # refuses a model that is not there
    if spec.id == "embedded" and given is not None:
        shape = shape_of_config(given, spec.name)
    return None if spec.trust_remote_code else shape


def ready_cells(asked: Sequence[Cell]) -> list[Cell]:
    """Each cell with its folder; the models' files are converted now, where they have to be.

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
        if not one.traits.has_budget or one.traits.adapts:
            once[key] = cell
    refuse_nothing_left(ready)
    return ready


def distinct(cells: Iterable[Cell]) -> list[Cell]:
    """Each cell once, in their order."""
    return list({cell.path: cell for cell in cells}.values())


def ready_cell(asked: Cell, look: Lookups) -> Cell:
    """The cell with what only the model's files tell: these are converted now, where they have to be."""
    from kvbench.evals.models import look_into, name_of, resolve_hardware

    settings = resolve_hardware(asked.settings)
    cell = replace(asked, settings=settings)
    if cell.shape is None:
        cell = shaped(cell, look)
    config = identity(cell, look(name_of, settings))
    path = place(settings, config)
    RunFolder.refuse(path, config, {})
    if not is_finished(path):  # else nothing is asked of the model, and transformers need not be imported
        cell = shaped(cell, look)
        with naming(settings):
            model = look(look_into, settings)
        check(cell, MODEL, model)
    return replace(cell, config=config, path=path)


def shaped(cell: Cell, look: Lookups) -> Cell:
    """The cell with the model's shape as transformers reads its configuration, of which the header may say nothing."""
    from kvbench.evals.models import look_up

    shape = look(look_up, cell.settings)
    if shape != cell.shape:
        cell = replace(cell, shape=shape)
        check(cell, SHAPE)
    return cell


def check_loaded(cells: Iterable[Cell], model: Checkpoint) -> None:
    """Ask again what methods need of a model: some of it, such as how layers turn queries, only weights show."""
    for cell in cells:
        check(cell, MODEL, model)


def identity(cell: Cell, digest: str) -> dict[str, Any]:
    """What identifies a run: its configuration, and the versions of all that its answers depend on."""
    task, sparsity = cell.task, cell.sparsity
    config = cell.settings.resolved() | {
        "model_digest": digest,
        "task_version": task.version,
        "method_version": cell.rules.version,
    }
    if task.data_digest is not None:
        config["data_digest"] = task.data_digest
    if (method_data := cell.rules.data_digest(cell.params)) is not None:
        config["method_data_digest"] = method_data
    if cell.settings.reuse is not None and (reuse_data := cell.settings.reuse.data_digest()) is not None:
        config["reuse_data_digest"] = reuse_data
    if sparsity is not None:
        config["prefill_version"] = sparsity.version
        if (prefill_data := sparsity.data_digest()) is not None:
            config["prefill_data_digest"] = prefill_data
    if cell.quantizer is not None and cell.quantizer.rules.version != FIRST:  # runs of the first one do not say it
        config["compose_version"] = cell.quantizer.rules.version
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
