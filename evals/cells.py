"""Cells: one variant on one task with one model, checked as far as that goes without weights.

Not here: values of single keys (`evals/settings.py`), the loop over a cell's samples (`evals/loop.py`).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine import checks
from engine.budget import BudgetRequest
from engine.checkpoints.digests import changed_at, first_digest_of
from engine.checkpoints.load import locate
from engine.errors import ConfigError
from engine.shapes import ModelShape
from engine.sparse import VerticalSlash
from evals.models import look_up, resolve_hardware
from evals.results import run_name
from evals.settings import Choice, Settings, load_class
from evals.tasks.base import Task
from evals.typed import build, build_params
from methods.base import SelectiveAttention, Variant
from methods.full import Full

RUNS = Path(__file__).resolve().parents[1] / "runs"
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
    """Name the method and its budget in what is refused."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"method={settings.method.name} {settings.budget.label()}: {error}") from None


def prepare(cells: Sequence[Settings]) -> list[Cell]:
    """Check every cell, as far as that goes without weights."""
    ready: list[Cell] = []
    models: dict[Any, tuple[ModelShape, str, str | None]] = {}  # shape and digests, looked up once
    places: set[Path] = set()
    for settings in cells:
        method, params = class_and_params(settings.method)
        task_class, task_params = class_and_params(settings.task)
        task: Task = task_class(task_params, settings.data_dir, settings.seed)
        settings = resolve_hardware(settings)
        if settings.weights == "random" and not task.is_timed:
            raise ConfigError(
                f"weights=random answers nothing that task={task.name} could score; use it with task=latency"
            )
        model = (settings.model, settings.weights)
        if model not in models:
            models[model] = *look_up(settings), first_digest(settings)
        shape, digest, first = models[model]
        with naming(settings):
            method.check(params, settings.budget, shape)
            method.check_cache(params, settings.cache)
        check_task(task, task_params, settings, shape)
        sparsity = sparsity_of(settings, method)
        check_sizes(settings, params, sparsity, shape)
        config = as_begun(settings, identity(settings, method, task, sparsity, digest), first)
        path = place(settings, config)
        if path in places:
            raise ConfigError(f"two cells of this sweep are the same run ({path.name}); leave one of them out")
        places.add(path)
        ready.append(Cell(settings, method, params, task, shape, config, path, sparsity))
    return ready


def class_and_params(choice: Choice) -> tuple[Any, Any]:
    """The class that a group's file names, and its parameters, checked."""
    kind = load_class(choice)
    return kind, build_params(kind, choice.params, choice.group)


def check_task(task: Task, params: Any, settings: Settings, shape: ModelShape) -> None:
    """Raise `ConfigError` where the task cannot be had, or not under these settings."""
    task.check(shape)
    checks.sizes("task", params, max(MOST_COUNT, shape.window), "for which nobody waits")
    if task.is_forced and settings.scope != "full_prompt":
        raise ConfigError(
            f"compression_scope={settings.scope} has no meaning for task={task.name}, whose prompts have no "
            "question; use full_prompt"
        )


def check_sizes(settings: Settings, params: Any, sparsity: VerticalSlash | None, shape: ModelShape) -> None:
    """Raise `ConfigError` for a size that is longer than the model's longest sequence."""
    window = f"the window of model {shape.name!r}"
    checks.sizes("method", params, shape.window, window)
    checks.sizes("cache", settings.cache, shape.window, window)
    if sparsity is not None:
        checks.sizes("prefill", sparsity, shape.window, window)


def identity(
    settings: Settings, method: type[SelectiveAttention], task: Task, sparsity: VerticalSlash | None, digest: str
) -> dict[str, Any]:
    """What identifies a run: its configuration, and the versions of all that its answers depend on."""
    config = settings.resolved() | {
        "model_digest": digest,
        "task_version": task.version,
        "method_version": method.version,
    }
    if task.data_digest is not None:
        config["data_digest"] = task.data_digest
    if sparsity is not None:
        config["prefill_version"] = sparsity.version
    return config


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


def first_digest(settings: Settings) -> str | None:
    """What earlier runs called a local checkpoint: a digest by its files' ends. None for a model of another kind."""
    spec = settings.model
    if settings.weights == "random":
        return None
    where, _ = locate(spec.id, spec.revision, spec.trust_remote_code)
    return first_digest_of(where) if Path(where).exists() else None


def as_begun(settings: Settings, config: dict[str, Any], first: str | None) -> dict[str, Any]:
    """`config`; with the digest of earlier runs where such a run was begun, and the checkpoint not written to since.

    The ends of its files cannot tell whether a checkpoint was edited in between.
    """
    earlier = config | {"model_digest": first}
    recorded = place(settings, earlier) / "config.yaml"
    if first is None or not recorded.is_file() or first.encode() not in recorded.read_bytes():
        return config
    spec = settings.model
    where, _ = locate(spec.id, spec.revision, spec.trust_remote_code)
    return earlier if changed_at(where) < recorded.stat().st_mtime else config


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
