"""DuoAttention (Xiao et al., 2024): some heads keep everything, the others sinks and a window.

Heads are told apart once per model: "retrieval" heads need the whole prompt, "streaming" heads look at its first and
latest tokens alone. What a prompt says changes nothing.

Paper     arXiv:2410.10819, 2024; Xiao, Guangxuan; DuoAttention: Efficient Long-Context LLM Inference with Retrieval
          and Streaming Heads
Symbols   paper retrieval and streaming heads = `full` and the others of `Plan`; alpha = a table's `scores`; sink and
          recent size = `n_sink`, `recent`; the share of streaming heads = `sparsity`.
Per step  moved: nothing; resident: F full heads of s + t tokens and the others' sinks and recent tokens, which stay
          as many while the answer grows, 4 * d_h bytes each, and 4 * (h_kv + 1) bytes of offsets per layer.
Budget    F is the largest number of full heads whose mean over all heads is within the budget; tokens that are left
          over widen the streaming heads' windows. Layers differ, so only the mean over layers is within.
          `sparsity` fixes the share of streaming heads instead, as published, whatever the budget: their windows are
          as large after a short prompt too, and streaming heads grow until theirs are full.
Differs   - the prompt is read in one exact pass, as in the authors' evaluation with a chunk as long as the prompt.
          - equal numbers in a table are ordered by layer and head; the authors add noise to them, and kvpress leaves
            the order to the sort. In one of the authors' tables 110 of 256 heads are exactly 1.
          - without a table of trained gates one is made of KVzip's scores (`kvbench calibrate heads`), which
            its authors recommend.
          - `evict: prompt` is kvpress' form: generated tokens stay in every head.
Fails     where a streaming head holds what is asked for; where a table was made on text of another kind.
Figures   drop by place or chance: #C26CEE, down, -.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Le
from torch import Tensor

from kvbench.engine.budget import Budget, BudgetRequest
from kvbench.engine.declared import Is, Tokens, Window
from kvbench.engine.errors import ConfigError
from kvbench.engine.placement import Placement, Ragged, Rolls, Whole
from kvbench.engine.shapes import Checkpoint, ModelShape
from kvbench.methods.base import SelectiveAttention
from kvbench.methods.traits import Traits

TABLES = Path(__file__).resolve().parents[2] / "conf" / "heads"
MAKE = "kvbench calibrate heads model=… makes one"


@dataclass(frozen=True)
class HeadTable:
    """How much each KV head needs the whole prompt."""

    path: Path
    scores: tuple[tuple[float, ...], ...]  # per layer, per KV head, 0 to 1
    facts: Mapping[str, str]  # of the file's first lines

    def check(self, shape: ModelShape) -> None:
        """Raise `ConfigError` where it is no table of a model of this shape."""
        found, wanted = (len(self.scores), len(self.scores[0])), (shape.n_layers, shape.h_kv)
        if found != wanted:
            raise ConfigError(
                f"method.heads={self.path} has {found[0]} layers of {found[1]} KV heads, and {shape.name} has "
                f"{wanted[0]} of {wanted[1]}; give a table of this model, {MAKE}"
            )

    def check_model(self, model: Checkpoint) -> None:
        """Raise `ConfigError` where it says that it was made of another model."""
        made_of = self.facts.get("model_digest")
        if made_of is not None and made_of not in model.digests:
            raise ConfigError(
                f"method.heads={self.path} was made of {self.facts.get('model', 'a model')} with the digest {made_of}, "
                f"and {model.shape.name} has {model.digests[0]}; give a table of this model, {MAKE}"
            )


@cache
def read_table(path: Path) -> HeadTable:
    """A table from its file, clipped to 0 and 1 as the authors do."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"method.heads={path} cannot be read: {error}; {MAKE}") from None
    said = [line.lstrip("# ").partition(":") for line in lines if line.startswith("#")]
    rows = [line.split() for line in lines if line.strip() and not line.startswith("#")]
    try:
        scores = tuple(tuple(min(1.0, max(0.0, float(word))) for word in row) for row in rows)
    except ValueError as error:
        raise ConfigError(f"method.heads={path} is no table of numbers: {error}; {MAKE}") from None
    if not scores or len({len(row) for row in scores}) != 1 or any(x != x for row in scores for x in row):
        raise ConfigError(f"method.heads={path} has no equal rows of numbers, one for each layer; {MAKE}")
    return HeadTable(path, scores, {key.strip(): value.strip() for key, _, value in said})


def ranked(scores: Sequence[Sequence[float]]) -> list[tuple[int, int]]:
    """Layer and head of all heads, those that need the prompt most first; ties to the lower layer and head."""
    places = [(layer, head) for layer, row in enumerate(scores) for head in range(len(row))]
    return sorted(places, key=lambda at: -scores[at[0]][at[1]])


def half_up(x: Fraction) -> int:
    return int(x + Fraction(1, 2))


class DuoAttention(SelectiveAttention):
    title = "DuoAttention"
    uneven = "DuoAttention keeps other numbers of tokens in each head"
    no_growth = "divides heads before it reads, so that its budget follows from them"
    no_latents = "divides heads into those that keep all and those that stream: here they share all they have"
    drops = True
    version = 2  # 2: published windows are as large after a short prompt as after a long one

    @dataclass(frozen=True)
    class Params:
        heads: str
        n_sink: Tokens
        n_recent: Window
        sparsity: Annotated[Fraction, Ge(0), Le(1), Is("the share of streaming heads, 0 to 1")] | None
        evict: Literal["always", "prompt"]

        def table(self, shape: ModelShape) -> HeadTable:
            """The table for a model of this name and shape."""
            if self.heads == "drawn":
                draws = Random(0)
                rows = (tuple(draws.random() for _ in range(shape.h_kv)) for _ in range(shape.n_layers))
                return HeadTable(Path("drawn"), tuple(rows), {})
            if self.heads != "auto":
                return read_table(Path(self.heads).expanduser())
            path = TABLES / f"{shape.name}.tsv"
            if not path.is_file():
                raise ConfigError(f"there is no table of heads for {shape.name}; give method.heads=FILE, {MAKE}")
            return read_table(path)

    @dataclass(frozen=True)
    class Plan:
        """Which heads keep the whole prompt, and what the others keep of it."""

        full: frozenset[tuple[int, int]]  # layer and KV head
        n_sink: int
        recent: Mapping[tuple[int, int], int]  # of streaming heads: the latest tokens that each holds
        table: HeadTable

    params: Params
    plan: Plan

    @classmethod
    def check(cls, params: Params, request: BudgetRequest, shape: ModelShape) -> None:
        params.table(shape).check(shape)

    @classmethod
    def check_model(cls, params: Params, model: Checkpoint) -> None:
        params.table(model.shape).check_model(model)

    @classmethod
    def data_digest(cls, params: Params) -> str | None:
        files = sorted(TABLES.glob("*.tsv")) if params.heads == "auto" else [Path(params.heads).expanduser()]
        found = [path.read_bytes() for path in files if path.is_file()]
        return hashlib.sha256(b"\0".join(found)).hexdigest()[:12]

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Plan:
        table = params.table(shape)
        table.check(shape)
        layers, s = shape.attention_layers, budget.s_prompt
        order = [(layers[i], head) for i, head in ranked([table.scores[layer] for layer in layers])]
        if params.sparsity is not None:
            n_full = half_up((1 - params.sparsity) * len(order))
            n_sink, n_recent, left = params.n_sink, params.n_recent, 0
        else:
            n_sink, n_recent = min(params.n_sink, s), min(params.n_recent, max(0, s - params.n_sink))
            n_full, n_sink, n_recent, left = divide(budget.tokens, s, n_sink, n_recent, len(order))
        streaming = sorted(order[n_full:])
        each, more = divmod(left, len(streaming)) if streaming else (0, 0)
        widened = {at: n_recent + each + (i < more) for i, at in enumerate(streaming)}
        return DuoAttention.Plan(frozenset(order[:n_full]), n_sink, widened, table)

    @classmethod
    def traits_of(cls, params: Params) -> Traits:
        rolls = "DuoAttention's heads roll while it decodes; use method.evict=prompt with it"
        return replace(super().traits_of(params), evicts=rolls if params.evict == "always" else "")

    def arrange(self, layer: int) -> Placement:
        s, heads = self.trace.s_prompt, range(self.trace.shape.h_kv)
        windows = [self.plan.recent.get((layer, head), -1) for head in heads]
        if max(windows) < 0:
            return Whole()
        recent = [self.n_recent(n) for n in windows]
        kept = [self.kept(layer, n) for n in recent]
        if self.params.evict == "prompt":
            return Ragged(kept)
        room = [max(0, self.plan.n_sink + n - s) for n in windows]
        return Ragged(kept, Rolls(recent, room, max(0, self.plan.n_sink - s)))

    def n_recent(self, window: int) -> int:
        """How many of the prompt's latest tokens a head with such a window keeps; below 0, as it is: all."""
        return min(window, max(0, self.trace.s_prompt - self.plan.n_sink))

    def kept(self, layer: int, n_recent: int) -> Tensor:
        """Positions that a head keeps of the prompt: all, or its latest tokens, oldest first, then sinks."""
        s = self.trace.s_prompt
        places = range(s) if n_recent < 0 else [*range(s - n_recent, s), *range(min(self.plan.n_sink, s))]
        return torch.tensor(places, device=self.trace.device_of(layer))

    def protected(self, layer: int) -> Sequence[int]:
        n, s = self.store[layer].n_seen, self.trace.s_prompt
        n_recent = min((self.plan.recent.get((layer, head), s) for head in range(self.trace.shape.h_kv)), default=s)
        end = s if self.params.evict == "prompt" else n - 1
        return [*range(min(self.plan.n_sink, n)), *range(max(self.plan.n_sink, end - n_recent), n)]

    def report(self) -> dict[str, Any]:
        """How many heads keep everything, and what the others keep of the prompt."""
        recent = [self.n_recent(n) for n in self.plan.recent.values()]
        n_sink = min(self.plan.n_sink, self.trace.s_prompt)
        sizes = {"n_sink": n_sink, "n_recent": [min(recent), max(recent)]} if recent else {}
        return {"full_heads": len(self.plan.full), "heads": self.plan.table.path.name} | sizes


def divide(n_tokens: int, s: int, n_sink: int, n_recent: int, n_heads: int) -> tuple[int, int, int, int]:
    """Full heads, sinks, recent tokens, and tokens left over, of a budget of `n_tokens` per head in the mean.

    Where not even streaming heads fit, the recent tokens shrink first, then the sinks.
    """
    if n_tokens >= s:
        return n_heads, n_sink, n_recent, 0
    n_recent = min(n_recent, max(1, n_tokens - n_sink))
    n_sink = min(n_sink, n_tokens - n_recent)
    streaming = n_sink + n_recent
    n_full = (n_tokens - streaming) * n_heads // (s - streaming)
    return n_full, n_sink, n_recent, (n_tokens - streaming) * n_heads - n_full * (s - streaming)
