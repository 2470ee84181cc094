"""KVzap (Jégou and Jeblick, 2026): a small gate foretells from the attention's input what KVzip would say of a token.

One gate for each layer, linear or with a hidden layer, was trained on the logarithms of KVzip's scores, weighed by what
values add. So the order is KVzip's, as well as the gate knows it, and no second pass is paid.

Paper     arXiv:2601.07891, 2026; Jégou, Simon; KVzap: Fast, Adaptive, and Faithful KV Cache Pruning
Symbols   paper A, b, W; tau = weights of the file, `window`; `threshold` of method=dms.
Budget    as many tokens as the budget has, the window within it, mean over a layer's heads: a fifth of a head's part is
          its own best tokens, the rest the layer's (kvpress' registry, `kvzap_layer`); `allocator=NAME` divides it in
          another way. The gate's weights are a constant of the model.
Per step  moved: nothing; resident: the counts of all heads, 4 * d_h bytes a token, and offsets. The gate computes
          h_kv * D products for each token and layer of the prompt, or D * hidden.
Differs   - the paper drops what is below a threshold, in prompt and answer, whatever the number: method=kvzap_dms.
          - float32 whatever the model's dtype. The prefill is exact; the paper's may be sparse.
          - a gate is a file that names its model, and is never drawn instead (`drawn` is for models of no meaning).
Fails     where the gate was trained on other texts than are asked for; it sees a token's past only as its layer does.
Figures   drop for any question: #9388AE, right, -.
"""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Annotated, Any

from torch import Tensor

from kvbench.engine.budget import Budget, BudgetRequest
from kvbench.engine.declared import Filled, Tokens
from kvbench.engine.observe import Observation
from kvbench.engine.shapes import Checkpoint, ModelShape
from kvbench.methods.allocator import Allocator, Alpha
from kvbench.methods.dropping.snapkv import fit_window
from kvbench.methods.gates.files import AUTO, DRAWN, check_model, check_shapes, digest_of, read
from kvbench.methods.gates.networks import GateScores
from kvbench.methods.scoring import ScoringMethod
from kvbench.methods.traits import Traits


class Gated(ScoringMethod):
    """A dropping method that keeps what a gate says."""

    reads_inputs = True
    judges = "input"
    no_growth = "does not hold what its gate said of the context's tokens, against which a feed's would be ranked"
    takes = ()  # no sweep over all methods has a gate for its model
    comparable = "layers"
    is_question_free = True
    no_latents = "has a number of its own for each head: here all share what they have"
    gate_kind: str

    @classmethod
    def check(cls, params: Any, request: BudgetRequest, shape: ModelShape) -> None:
        super().check(params, request, shape)
        if params.gate not in (DRAWN, AUTO):
            check_shapes(read(params.gate, cls.gate_kind), cls.gate_kind, shape)

    @classmethod
    def check_model(cls, params: Any, model: Checkpoint) -> None:
        check_model(params.gate, cls.gate_kind, model)

    @classmethod
    def data_digest(cls, params: Any) -> str | None:
        return digest_of(params.gate)

    @classmethod
    def gate_of(cls, params: Any) -> GateScores:
        return GateScores(cls.gate_kind, params.gate, digest_of(params.gate))

    @classmethod
    def observations(cls, params: Any, plan: Any) -> tuple[Observation, ...]:
        return (cls.gate_of(params),)

    @classmethod
    def label(cls, params: Any, request: BudgetRequest) -> str:
        return super().label(params, request).replace(cls.title, f"{cls.title} (learned)")

    def scorer(self) -> Hashable:
        return self.gate_of(self.params)

    def scores(self, layer: int) -> Tensor:
        n_first, n_last = self.ends()
        return self.trace.observed(self.gate_of(self.params), layer)[..., n_first : self.trace.s_prompt - n_last]

    def scores_of(self, layer: int, keys: Tensor, inputs: Tensor | None) -> Tensor:
        assert inputs is not None, "a gate reads the attention's input"
        return self.gate_of(self.params).of(inputs.transpose(0, 1), layer, self.trace)[0].mT

    def report(self) -> dict[str, Any]:
        """The report, with the gate that was used."""
        return super().report() | {"gate": self.gate_of(self.params).named(self.trace)}


class KVzap(Gated):
    title = "KVzap"
    gate_kind = "kvzap"

    @dataclass(frozen=True)
    class Params:
        gate: Annotated[str, Filled("a file, a hub name or auto")]
        window: Tokens
        alpha: Alpha

    @dataclass(frozen=True)
    class Plan:
        window: int  # the prompt's last tokens, which stay

    params: Params
    plan: Plan

    @classmethod
    def traits_of(cls, params: Params) -> Traits:
        division = Allocator("head_protect", alpha=params.alpha) if params.alpha < 1 else Allocator("uniform")
        return replace(super().traits_of(params), allocator=division)

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Plan:
        return KVzap.Plan(fit_window(budget.tokens, params.window) if params.window else 0)
