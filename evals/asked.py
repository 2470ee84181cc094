"""What is asked for, checked without torch: parameters, a model's header, a task's own numbers.

Everything that can be refused here is refused for all cells before torch is imported, and before anything is converted
or made.

Not here: values of single keys (`evals/settings.py`), what takes the model's files (`evals/cells.py`) or its tokenizer
(`evals/prepare.py`).
"""

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import yaml

from kvbench import checkout
from kvbench.engine import declared
from kvbench.engine.budget import EVERYTHING, Bytes
from kvbench.engine.caches.blocks import BlockCacheSpec
from kvbench.engine.checkpoints.header import header_shape, shape_of_config
from kvbench.engine.declared import build, build_params
from kvbench.engine.errors import ConfigError, unknown_name
from kvbench.engine.post_processing import AS_THEY_ARE, Merging, PostProcessing
from kvbench.engine.shapes import ModelShape
from kvbench.engine.terminal import say
from kvbench.evals.refusals import leave_out, naming, refuse_nothing_left
from kvbench.evals.settings import ORDERS, Choice, GivenPostProcessing, ModelSpec, Settings, load_class, methods_for
from kvbench.methods.rules import Quantizer, Rules
from kvbench.results.names import own_methods
from kvbench.results.schema import METRICS
from kvbench.tasks.base import Task

if TYPE_CHECKING:  # imports torch
    from kvbench.engine.sparse.base import SparsePrefill

RUNS = Path(checkout.runs())
ARCHITECTURES = Path(__file__).resolve().parents[1] / "conf" / "architecture"
T = TypeVar("T")
MOST_COUNT = 10_000  # of anything that a task counts
MOST_ANSWERS = 1_024  # to one prompt; papers draw up to 64, and a line of samples.jsonl is written for each
NO_CACHE = BlockCacheSpec(0, 128, 32, "lfu")  # of a method that has no budget, whatever the others get


@dataclass(frozen=True)
class Asked:
    """A cell as far as it is known without torch."""

    settings: Settings  # as they were given, but for a method without a budget
    rules: type[Rules]
    params: Any
    task: Task
    task_params: Any
    shape: ModelShape | None  # None: the model's header does not say it
    sparsity: "SparsePrefill | None"  # of the prefill
    quantizer: Quantizer | None = None  # who makes codes of what the method keeps, or has on the host
    post_processing: PostProcessing = AS_THEY_ARE  # what becomes of kept keys and values


class AskedMethod(NamedTuple):
    """A cell's method, before a task or a model is looked at."""

    settings: Settings  # as they were given, but for a method without a budget
    rules: type[Rules]
    params: Any
    sparsity: "SparsePrefill | None"
    quantizer: Quantizer | None
    post_processing: PostProcessing


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


def ask(cells: Sequence[Settings]) -> list[Asked]:
    """Check every cell as far as that goes without torch."""
    look = Lookups()
    asked: list[Asked] = []
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


def ask_method(given: Settings) -> AskedMethod:
    """Check a cell's method, and what is asked of it."""
    rules, params = rules_and_params(given.method)
    settings = given
    if not rules.has_budget or rules.adapts(params):
        settings = replace(
            given, budget=EVERYTHING, cache=NO_CACHE, allocator=None, compose=None, compose_order=ORDERS[0],
            post_processing=GivenPostProcessing(None, None, Merging()), evicts=given.evicts and rules.has_budget,
        )  # fmt: skip
    post_processing = post_processing_of(settings, rules, params)
    if settings.evicts:
        refuse_chunks(settings, rules, params)
        params = rules.in_chunks(params)
    elif rules.reads_in_chunks(params):
        raise ConfigError(
            f"method={settings.method.name} with these parameters reads a prompt in chunks; give prefill.evict=true "
            "beside it"
        )
    if settings.allocator is not None:
        with naming(settings):
            rules.check_allocator(params, settings.allocator)
    sparsity, quantizer = sparsity_of(settings, rules), quantizer_of(settings, rules, params)
    return AskedMethod(settings, rules, params, sparsity, quantizer, post_processing)


def ask_one(given: Settings, look: Lookups) -> Asked:
    """Check a cell without torch."""
    settings, rules, params, sparsity, quantizer, post_processing = ask_method(given)
    task_class, task_params = class_and_params(settings.task)
    task: Task = task_class(task_params, settings.data_dir, settings.seed)
    asks = f"task={settings.task.name}"
    refuse_unsaid(task, asks)
    if settings.weights == "random" and not task.is_timed:
        raise ConfigError(f"weights=random answers nothing that {asks} could score; use it with task=latency")
    if task.is_forced and settings.scope != "full_prompt":
        raise ConfigError(
            f"compression_scope={settings.scope} has no meaning for {asks}, whose prompts have no "
            "question; use full_prompt"
        )
    if task.asking is not None:
        with naming(settings):
            is_plain = settings.allocator is settings.compose is settings.budget.memory is None
            is_plain &= not post_processing.changes
            task.asking.check(rules, params, is_plain)
        if not settings.sampling.is_greedy:
            raise ConfigError(
                f"temperature={settings.sampling.temperature:g} draws answers, and {asks} with several turns "
                "is answered greedily; use temperature=0"
            )
        if settings.scope != "full_prompt":
            raise ConfigError(
                f"compression_scope={settings.scope} has no meaning for {asks} with several turns, where "
                "task.mode says what is compressed; leave it away"
            )
    refuse_answers(settings, rules, task)
    if rules.asks_question(params) and (settings.scope != "full_prompt" or task.asking is not None):
        raise ConfigError(
            f"method={settings.method.name} chooses tokens by the question, which is not in the context that is "
            "compressed here; use compression_scope=full_prompt and a task with one question, or method.window=64"
        )
    shape = look(early_shape, settings)
    asked = Asked(settings, rules, params, task, task_params, shape, sparsity, quantizer, post_processing)
    if shape is not None:
        check(asked, shape)
    return asked


def check(asked: Asked, shape: ModelShape) -> None:
    """Raise `ConfigError` where a model of this shape cannot meet what is asked."""
    settings, rules, task = asked.settings, asked.rules, asked.task
    refuse_many(settings, shape)
    check_method(
        AskedMethod(settings, rules, asked.params, asked.sparsity, asked.quantizer, asked.post_processing), shape
    )
    if asked.sparsity is not None:
        if shape.choosing_layers:
            raise ConfigError(
                f"a sparse prefill has no meaning for the model {shape.name!r}, which chooses by itself "
                "what it attends to; leave it away"
            )
        asked.sparsity.check(shape)
        declared.sizes("prefill", asked.sparsity, shape.window, f"the window of model {shape.name!r}")
    task.check(shape)
    declared.sizes("task", asked.task_params, max(MOST_COUNT, shape.window), "for which nobody waits")
    shortest = task.shortest_prompt()
    # Of bytes a prompt that is shorter still has a larger share.
    if shortest is not None and not isinstance(settings.budget.memory, Bytes):
        with naming(settings):
            rules.planned(asked.params, settings.budget, shape, shortest, settings.cache, quantizer=asked.quantizer)


def check_method(asked: AskedMethod, shape: ModelShape) -> None:
    """Raise `ConfigError` where the method cannot do on a model of this shape what is asked of it."""
    settings, rules, params, _, quantizer, post_processing = asked
    refuse_counts(settings, rules)
    if settings.evicts:
        refuse_kinds(settings, shape)
    with naming(settings):
        rules.check_kinds(params, shape, quantizer)
        rules.check(params, settings.budget, shape)
        refuse_heads(settings, shape)
        rules.check_cache(params, settings.cache)
        post_processing.check(shape)
        if quantizer is not None:
            quantizer.rules.check_shape(quantizer.params, shape)
        declared.sizes("method", params, shape.window, f"the window of model {shape.name!r}")
        declared.sizes("cache", settings.cache, shape.window, f"the window of model {shape.name!r}")


def refuse_chunks(settings: Settings, rules: type[Rules], params: Any) -> None:
    """Raise `ConfigError` where a method cannot drop tokens between chunks of a prompt."""
    reason = rules.unreadable(params)
    if not reason and settings.allocator is not None and settings.allocator.name != "uniform":
        reason = f"allocator={settings.allocator.name} gives layers or heads other numbers of tokens"
    if not reason and settings.compose is not None:
        reason = f"compose={settings.compose.name} makes codes of what an exact pass leaves"
    if not reason and (settings.post_processing.positions or settings.post_processing.dropped):
        reason = "positions and dropped change keys and values that an exact pass leaves"
    if reason:
        raise ConfigError(
            f"prefill.evict=true drops tokens between chunks of the prompt, and method={settings.method.name} cannot: "
            f"{reason}"
        )


def refuse_kinds(settings: Settings, shape: ModelShape) -> None:
    """Raise `ConfigError` where a model cannot read a prompt in chunks that lose tokens."""
    what = "has layers that attend to keys and values of another" if shape.readers else ""
    what = "has a state beside attention in its layers" if shape.hybrid_layers else what
    if what:
        raise ConfigError(
            f"prefill.evict=true drops tokens between chunks of the prompt, and the model {shape.name!r} {what}; "
            "leave it out"
        )


def refuse_heads(settings: Settings, shape: ModelShape) -> None:
    """Raise `ConfigError` for a budget that is to be divided among heads where all share one set of tokens."""
    if shape.is_latent and settings.allocator is not None and settings.allocator.of_heads != "uniform":
        raise ConfigError(
            f"allocator={settings.allocator.name} divides tokens among KV heads, and the model {shape.name!r} keeps "
            "one latent per token for all heads; use allocator=uniform or one that divides among layers"
        )


def refuse_unsaid(task: Task, asks: str) -> None:
    """Raise `ConfigError` for a task that does not say what results have to."""
    for word in ("dataset", "data_source"):
        if not isinstance(getattr(task, word, None), str):
            raise ConfigError(f"{asks} has no {word}, which results print; see tasks/base.py")
    if task.metric is not None and task.metric not in METRICS:
        raise unknown_name(f"metric of {asks}", task.metric, METRICS)


def refuse_answers(settings: Settings, rules: type[Rules], task: Task) -> None:
    """Raise `ConfigError` where no single answer is given that could be drawn, or compressed as it grows."""
    asks = f"task={settings.task.name}"
    reads = "takes times" if task.is_timed else "reads a continuation" if task.is_forced else None
    if settings.sampling.identity() and (reads or task.asking is not None):
        key, value = next(iter(settings.sampling.identity().items()))
        raise ConfigError(
            f"{key}={value} means nothing for {asks}, which {reads or 'asks several questions greedily'}; leave it out"
        )
    if rules.of_answers and task.asking is not None:
        raise ConfigError(
            f"method={settings.method.name} compresses a prompt and one answer, and {asks} asks several "
            f"questions in turn; use another method with it"
        )


def refuse_many(settings: Settings, shape: ModelShape) -> None:
    """Raise `ConfigError` for more answers to a prompt than anybody waits for."""
    n = settings.sampling.n_answers
    if n > MOST_ANSWERS:
        token = len(shape.kept_layers) * shape.h_kv * shape.width * (4 if settings.dtype == "float32" else 2)
        raise ConfigError(
            f"n_answers={n} is out of range; it is at most {MOST_ANSWERS}: with model {shape.name!r} each generated "
            f"token of so many answers takes {declared.gigabytes(n * token)} of keys and values"
        )


def refuse_counts(settings: Settings, rules: type[Rules]) -> None:
    """Raise `ConfigError` where `budget_counts` is given for a budget of the prompt alone."""
    counts = settings.budget.counts
    if counts is None or rules.of_answers:
        return
    own = f"{settings.method.name}_decode"
    use = f"method={own}" if own in own_methods() else f"one of {', '.join(methods_for('answer'))}"
    raise ConfigError(
        f"budget_counts={counts} is for methods that compress while they answer, and method={settings.method.name} "
        f"compresses the prompt; use {use}"
    )


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


def sparsity_of(settings: Settings, rules: type[Rules]) -> "SparsePrefill | None":
    """The rule by which the prefill leaves out pairs; None where it computes all."""
    chosen = settings.prefill
    if chosen is None:
        return None
    if rules.prunes_prompt:
        raise ConfigError(
            f"method={settings.method.name} has a prefill of its own, which prefill={chosen.name} cannot make sparse; "
            "use prefill=exact with it"
        )
    return build(load_class(chosen), chosen.params, "prefill")


def quantizer_of(settings: Settings, rules: type[Rules], params: Any) -> Quantizer | None:
    """The method that makes codes of what is kept; `ConfigError` where the two cannot be composed."""
    chosen = settings.compose
    if chosen is None or not rules.has_budget:
        if rules.has_budget and not rules.adapts(params) and settings.compose_order != ORDERS[0]:
            raise ConfigError(
                f"compose_order={settings.compose_order} means nothing without compose; give compose=kivi"
            )
        return None
    quantizer = Quantizer(*rules_and_params(chosen), settings.compose_order == "quantise_first")
    if not quantizer.rules.composes:
        raise ConfigError(f"compose={chosen.name} makes no codes of what another method keeps; use compose=kivi")
    if settings.allocator is not None and settings.allocator.name != "uniform":
        reason = f"allocator={settings.allocator.name} gives layers or heads other numbers of tokens"
    else:
        reason = rules.uncodable(params)
    if reason:
        raise ConfigError(f"method={settings.method.name} cannot be composed with {chosen.name}: {reason}")
    if not rules.drops and quantizer.token_code() is None:
        raise ConfigError(
            f"method={settings.method.name} cannot be composed with {chosen.name}: {quantizer.rules.title} makes no "
            "codes of single tokens, which a step could fetch"
        )
    if quantizer.first and not rules.drops:
        raise ConfigError(
            f"compose_order=quantise_first is for methods that drop tokens, and {rules.title} drops none; leave it out"
        )
    return quantizer


def post_processing_of(settings: Settings, rules: type[Rules], params: Any) -> PostProcessing:
    """What becomes of keys and values that the method keeps; `ConfigError` where that cannot be."""
    if not rules.has_budget:
        return AS_THEY_ARE
    post_processing = settings.post_processing.over(rules.own_post_processing(params))
    if post_processing.changes and (reason := rules.unchangeable(params)):
        raise ConfigError(f"method={settings.method.name} cannot have {post_processing.asked}: {reason}")
    return post_processing


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


def architecture(spec: ModelSpec) -> dict[str, Any] | None:
    """A model's file in conf/architecture."""
    names = (spec.name, spec.name.removesuffix("-instruct"))
    file = next((path for name in names if (path := ARCHITECTURES / f"{name}.yaml").is_file()), None)
    return None if file is None else yaml.safe_load(file.read_text())
