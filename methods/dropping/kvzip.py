"""KVzip (Kim et al., 2025): keep what the model looks at while it repeats the context, whatever will be asked.

Once the context is read, the model is asked to repeat it, chunk by chunk, and is fed each chunk as if it answered. What
a token gets at most from any of these queries is its score, for every KV head. One order over all layers and heads
decides. The context is compressed before there is a question, and serves any number of them.

Paper     arXiv:2505.23416, 2025; Kim, Jang-Hyun; KVzip: Query-Agnostic KV Cache Compression with Context
          Reconstruction
Symbols   paper or code s0, n, R_i, chunk size, r = `frame.n_prefix`, context tokens, ids of a `Pass`, `chunk`, the
          budget's ratio.
Budget    `n_free` context tokens per head, mean over all heads and layers, and in every head what the chat template and
          the system line put around the context. A head may keep nothing else. A task with `full_prompt` has its
          question in the context, which is not the published use; the label says so.
Per step  moved: nothing; resident: the counts of all heads, 4 * d_h bytes a token, and 4 * (h_kv + 1) bytes of offsets.
          The second pass is part of the time to the first token and stands in `probe_s`. Until it ends the full cache
          is on the device.
Differs   - exactly as many tokens are kept as the budget has; `match_published` keeps what is strictly above the
          authors' threshold, one token fewer at least and a plateau of equal scores at most.
          - prefix and template count as kept tokens; the authors have them on top of the ratio.
          - softmax in float32; the authors' is in the model's dtype, where many scores become equal.
          - their `pair-uniform` is `allocator=uniform`, up to the rounding of counts. Whole heads (`head`) are
            DuoAttention's division here; `above_threshold` gives the authors' rule for them as well.
          - the paper's words of the request differ from its code's, which are used here.
Fails     where trivial tokens fill the budget: list marks and line ends get weights near 1 when repeated. A prefill of
          the same length is paid about twice.
Figures   drop for any question: #CA3300, circle, -.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from annotated_types import Ge
from torch import Tensor

from kvbench.engine.budget import Budget, BudgetRequest, Frame
from kvbench.engine.declared import Index
from kvbench.engine.errors import ConfigError
from kvbench.engine.passes.repetition import Repetition
from kvbench.engine.passes.second_pass import SecondPass
from kvbench.engine.shapes import ModelShape
from kvbench.methods.allocator import Allocator
from kvbench.methods.dropping.allocators import Counts
from kvbench.methods.scoring import ScoringMethod

LEAST_CHUNK = 16  # tokens; of fewer the request to repeat them is the larger part
REQUEST_TOKENS = 32  # more than any tokenizer makes of the words that ask for a repetition


def above_threshold(scores: Tensor, n: int) -> Tensor:
    """The authors' selection: which scores of any shape are strictly above the n-th highest; all for n of all."""
    if n >= scores.numel():
        return torch.ones_like(scores, dtype=torch.bool)
    return scores > scores.flatten().sort(descending=True).values[max(n - 1, 0)]


class KVzip(ScoringMethod):
    title = "KVzip"
    allocator = Allocator("global")
    no_growth = "scores tokens by how the context is repeated, which a feed is not asked to be"
    comparable = "layers"
    is_question_free = True

    @dataclass(frozen=True)
    class Params:
        chunk: Annotated[int, Ge(LEAST_CHUNK)]
        overlap: Index
        match_published: bool
        first_ids: tuple[Index, ...] | None
        next_ids: tuple[Index, ...] | None

        def __post_init__(self) -> None:
            if (self.first_ids is None) != (self.next_ids is None):
                raise ConfigError(
                    "method.first_ids and method.next_ids are one request each, for the first chunk and for the "
                    "others; give both or neither"
                )

    @dataclass(frozen=True)
    class Plan:
        """What is kept of the prompt whatever its scores, and how much more."""

        frame: Frame
        n_free: int  # tokens of the context per head, mean over heads and layers

    params: Params
    plan: Plan

    @classmethod
    def check(cls, params: Params, request: BudgetRequest, shape: ModelShape) -> None:
        super().check(params, request, shape)
        others = shape.n_own
        if others:
            raise ConfigError(
                f"{others} of {shape.n_layers} layers of {shape.name} are no full attention, or have a state beside "
                "it, and KVzip reads the context again behind the whole cache of all layers; use a model of full "
                "attention alone, or another method"
            )

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Plan:
        frame = budget.frame
        n_always = frame.n_prefix + frame.n_suffix
        if budget.attends_all:
            return KVzip.Plan(frame, budget.tokens - n_always)
        if budget.tokens <= n_always:
            raise ConfigError(
                f"a budget of {budget.tokens} tokens for a prompt of {budget.s_prompt} leaves nothing beside the "
                f"{n_always} tokens of its template and system line, which KVzip always keeps; raise ratio or budget"
            )
        requests = [len(ids) for ids in (params.first_ids, params.next_ids) if ids is not None]
        n_read = min(params.chunk, budget.s_prompt - n_always) + params.overlap + len(frame.postfix_ids)
        n_read += max(requests, default=REQUEST_TOKENS)
        if budget.s_prompt + n_read > shape.window:
            raise ConfigError(
                f"a repetition of method.chunk={params.chunk} tokens behind a prompt of {budget.s_prompt} needs up to "
                f"{budget.s_prompt + n_read} positions, more than the {shape.window} of model {shape.name!r}; use a "
                "smaller method.chunk or shorter prompts"
            )
        return KVzip.Plan(frame, budget.tokens - n_always)

    @classmethod
    def second_passes(cls, params: Params, plan: Plan) -> tuple[SecondPass, ...]:
        return (Repetition(params.chunk, params.overlap, plan.frame, params.first_ids, params.next_ids),)

    def ends(self) -> tuple[int, int]:
        return self.plan.frame.n_prefix, self.plan.frame.n_suffix

    def n_free(self) -> int:
        return self.plan.n_free

    def scorer(self) -> Hashable:
        return self.second_passes(self.params, self.plan)

    def scores(self, layer: int) -> Tensor:
        (what,) = self.second_passes(self.params, self.plan)
        return self.trace.of_second_pass(what, layer)

    def counts(self) -> Sequence[Counts]:
        if not self.params.match_published or self.variant.allocator.of_layers != "global":
            return super().counts()
        trace = self.trace
        scores = torch.stack(trace.gathered(self.scores(layer)[0] for layer in trace.shape.attention_layers))
        n_heads = scores.shape[0] * scores.shape[1]
        return above_threshold(scores, n_heads * self.plan.n_free).sum(-1).tolist()

    def report(self) -> dict[str, Any]:
        """How much heads and layers keep of the prompt."""
        kept = [self.store[layer].kept_counts() for layer in self.trace.shape.attention_layers]
        return super().report() | {"kept_layers": [sum(layer) / len(layer) for layer in kept]}
