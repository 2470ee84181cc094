"""One prompt by hand, as a notebook wants it: load a model, read a prompt once, let variants answer, look at a layer.

    from kvbench.evals.notebook import load_model, question, read, variant

    model = load_model("smollm2-135m")
    asked = question(model, "needle", lengths=[1500], depths=[50])
    reading = read(model, asked.ids, [variant("oracle", ratio=0.1), variant("snapkv", ratio=0.1, window=16)])
    for answer in reading.answer(n_new=12, stop_ids=asked.stop_ids, layers=[14]):
        print(answer.label, answer.text, answer.ledger["bytes_moved_kv_per_step"])
        answer.looks[14][0].attended  # which tokens each head attended to at the first step

Names and values are those of the command line; what is refused there is refused here, by the same sentences. The
prefill, the methods and the books are the ones that runs use.

Not here: scores, folders of results, many samples (`run.py`).
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvbench.engine.budget import BudgetRequest
from kvbench.engine.declared import build_params, word
from kvbench.engine.decode import decode
from kvbench.engine.errors import ConfigError
from kvbench.engine.model import Model
from kvbench.engine.passes.second_pass import run_second_passes
from kvbench.engine.passes.trace import Trace
from kvbench.engine.prefill import prefill
from kvbench.evals.cells import Cell, cell_without_task, check
from kvbench.evals.lines import books_of
from kvbench.evals.models import load_model as load
from kvbench.evals.models import resolve_hardware
from kvbench.evals.settings import from_words, load_class
from kvbench.methods.base import SelectiveAttention, Variant
from kvbench.methods.combinations import MODEL, SHAPE
from kvbench.tasks.base import Sample
from kvbench.tasks.ending import Ending
from kvbench.tasks.fidelity import exact_attention
from kvbench.tasks.prompt import encode, uses_chat


def load_model(name: str = "smollm2-135m", **keys: Any) -> Model:
    """A model by its name in conf/model, hub name, folder or GGUF file; keys such as `dtype="float32"`."""
    return load(resolve_hardware(from_words([f"model={name}", *words(keys)])))


@dataclass(frozen=True)
class Wanted:
    """A method with its parameters, its budget and what else is asked of it, before there is a prompt."""

    cell: Cell

    @property
    def params(self) -> Any:
        return self.cell.params

    @property
    def request(self) -> BudgetRequest:
        return self.cell.request

    @property
    def label(self) -> str:
        """The cell's label as tables print it."""
        return self.cell.label

    def on(self, model: Model, s_prompt: int) -> Variant:
        """The method on prompts of so many tokens; `ConfigError` where the model or the budget does not suit it."""
        cell = replace(self.cell, shape=model.shape)
        check(cell, SHAPE)
        check(cell, MODEL, model.checkpoint)
        return cell.variant(s_prompt)


OF_RUNS = (  # keys of the command line that are no parameters of a method
    *("ratio", "budget", "budget_counts", "memory", "comm", "compensate"),
    *("allocator", "reuse", "compose", "compose_order", "positions", "dropped", "merging", "cache"),
)


def variant(method: str, **keys: Any) -> Wanted:
    """A method by its name in conf/method, or a file of your own.

    The keys of `OF_RUNS` are those of the command line: the budget, who divides it among layers and heads, who makes
    codes of what is kept, what becomes of positions and of dropped values. What has a point there is a dict's entry:
    `variant("knorm", allocator="global", **{"allocator.force": True})`. Every other key is a parameter of the method.
    """
    given = {key if key.partition(".")[0] in OF_RUNS else f"method.{key}": value for key, value in keys.items()}
    return Wanted(cell_without_task(from_words([f"method={method}", *words(given)])))


@dataclass(frozen=True)
class Question:
    """A task's sample as tokens, and the tokens that end an answer."""

    sample: Sample
    ids: Sequence[int]
    stop_ids: frozenset[int]


def question(model: Model, task: str, number: int = 0, **params: Any) -> Question:
    """A sample of a task, by default its first; keys are the task's own, such as `lengths=[1500]`."""
    settings = from_words([f"task={task}", *words({f"task.{key}": value for key, value in params.items()})])
    kind: Any = load_class(settings.task)
    made = kind(build_params(kind, settings.task.params, "task"), settings.data_dir, settings.seed)
    made.check(model.shape)
    sample = made.samples(model.tokenizer)[number]
    ids = sample.ids
    if ids is None:
        ids = encode(model.tokenizer, sample, chat="auto", system_prompt="", scope="full_prompt").context_ids
    chat = uses_chat(model.tokenizer, sample, "auto")
    return Question(sample, ids, Ending(model.tokenizer, model.hf.generation_config).stop_ids(sample, chat))


@dataclass(frozen=True)
class Look:
    """A layer at one step: the tokens so far, the current one last."""

    step: int  # 1 for the first token that is fed after the prompt
    attended: Tensor  # (h, n) bool
    weights: Tensor  # (h, n) float32: what exact attention of the same query gives every token; sums to 1

    @property
    def mass(self) -> float:
        """Share of the exact weights that lies on attended tokens, mean over heads."""
        return float((self.weights * self.attended).sum(-1).mean())


@dataclass(frozen=True)
class Answered:
    """What one variant said, and what it cost."""

    label: str
    ids: list[int]
    text: str
    ledger: dict[str, Any]  # the keys of runs/README.md
    looks: dict[int, list[Look]]  # by layer, step by step


@dataclass
class Reading:
    """A prompt that was read once, for variants to answer from; it can be asked again."""

    model: Model
    trace: Trace
    wanted: list[Wanted]
    variants: list[Variant]

    def answer(self, n_new: int = 16, stop_ids: Iterable[int] = (), layers: Collection[int] = ()) -> list[Answered]:
        """Let every variant answer with up to `n_new` tokens, all in one batch; look at `layers` on the way."""
        shape = self.trace.shape
        for layer in layers:
            if layer not in shape.attention_layers:
                raise ConfigError(
                    f"layer {layer} cannot be looked at; the compressed layers are {list(shape.attention_layers)}"
                )
        with torch.inference_mode():
            rows = [one.row(self.trace, n_new) for one in self.variants]
            for layer in shape.attention_layers:
                for row in rows:
                    row.build(layer)
                self.trace.hold(layer)
            for row in rows:
                row.complete()
            self.trace.settle()
        watch = _Looking(self.trace, rows, layers)
        with self.model.hooked():
            done = decode(self.model, self.trace, rows, max_new_tokens=n_new, stop_ids=stop_ids, watch=watch)
        return [
            Answered(
                wanted.label,
                answer.ids,
                self.model.tokenizer.decode(answer.ids, skip_special_tokens=True),
                books_of(row),
                looks,
            )
            for wanted, row, answer, looks in zip(self.wanted, rows, done.answers, watch.looks, strict=True)
        ]


def read(model: Model, prompt: str | Sequence[int], wanted: Iterable[Wanted]) -> Reading:
    """Read a text or its tokens once, and observe on the way what these variants need."""
    wanted = list(wanted)
    if not wanted:
        raise ConfigError("no variant is to read the prompt; give one or more, such as variant('oracle', ratio=0.1)")
    ids = model.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
    variants = [one.on(model, len(ids)) for one in wanted]
    apart = [one.label for one, variant in zip(wanted, variants, strict=True) if variant.pruning is not None]
    if apart and len(variants) > 1:
        raise ConfigError(f"{apart[0]} has a prefill of its own, which no other variant can share; read for it alone")
    observations = [what for one in variants for what in one.observations]
    with model.hooked():
        trace = prefill(model, ids, observations, pruning=variants[0].pruning)
    run_second_passes(model, trace, [what for one in variants for what in one.second_passes])
    return Reading(model, trace, wanted, variants)


class _Looking:
    """Notes what each row attended to in some layers, and the exact weights of its queries."""

    def __init__(self, trace: Trace, rows: Sequence[SelectiveAttention], layers: Collection[int]) -> None:
        self.trace, self.rows = trace, rows
        self.looks: list[dict[int, list[Look]]] = [{layer: [] for layer in layers} for _ in rows]
        self.fed: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # K and V of the tokens fed so far

    def attended(self, layer: int, order: Sequence[int], q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        for place, row in enumerate(order):
            looks = self.looks[row].get(layer)
            if looks is None:
                continue
            one = slice(place, place + 1)
            keys, values = k[one], v[one]
            if (row, layer) in self.fed:
                keys, values = (torch.cat(pair, 2) for pair in zip(self.fed[row, layer], (keys, values), strict=True))
            self.fed[row, layer] = keys, values
            trace = self.trace
            logits, _ = exact_attention(
                q[one], trace.keys(layer), trace.values(layer), keys, values, trace.softmax[layer]
            )
            seen = self.rows[row].store.attended(layer)
            weights = self.over_all(layer, trace.softmax[layer].weights(logits[0], (-1,)).cpu())
            looks.append(Look(len(looks) + 1, seen, weights))

    def over_all(self, layer: int, weights: Tensor) -> Tensor:
        """Weights (h, n) over all tokens; where some left the prefill below this layer, they have none."""
        reached = self.trace.positions.get(layer)
        if reached is None:
            return weights
        n_fed = weights.shape[1] - len(reached)
        spread = weights.new_zeros(len(weights), self.trace.s_prompt + n_fed)
        spread[:, reached.cpu()] = weights[:, : len(reached)]
        spread[:, self.trace.s_prompt :] = weights[:, len(reached) :]
        return spread

    def predicted(self, order: Sequence[int], logits: Tensor) -> None:
        """Note nothing of what comes next."""


def words(keys: dict[str, Any]) -> list[str]:
    """Python's values as words of the command line."""
    return [f"{key}={word(value)}" for key, value in keys.items()]
