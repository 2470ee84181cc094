"""StreamingLLM while decoding: the first tokens of the prompt and the latest of all, cut every few steps.

Paper     arXiv:2309.17453, 2023; Xiao, Guangxuan; Efficient Streaming Language Models with Attention Sinks
Symbols   R-KV's baseline first_tokens, kv_budget = `n_sink`, `target`; it has no window of its own.
Per step  moved: nothing; resident: h_kv * (target + interval) tokens at most, all heads and layers alike; no metadata.
Differs   with `interval=1` it is the rolling form of `methods/dropping/streamingllm.py`.
          Tokens are told by their positions. kvpress' form orders equal scores as topk likes, and loses its sinks.
Fails     on everything that an answer said before the window and needs again.
Figures   drop while decoding: #AD56D8, bar, --
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.engine.declared import Tokens
from kvbench.methods.decoding.cutting import CuttingMethod, with_last
from kvbench.methods.decoding.schedule import WhenToCut


class StreamingLLMDecode(CuttingMethod):
    title = "StreamingLLM while decoding"

    @dataclass(frozen=True)
    class Params(WhenToCut):
        n_sink: Tokens

    params: Params

    @classmethod
    def least(cls, params: Params) -> tuple[int, str]:
        return params.n_sink + 1, f"method.n_sink={params.n_sink} first tokens stay, and at least one behind them"

    def order(self, layer: int, keys: Tensor, positions: Tensor) -> Tensor:
        # Slots are in the order of positions: the prompt's are, and a cut leaves them so.
        sinks = torch.arange(self.params.n_sink, device=keys.device).expand(1, keys.shape[1], -1)
        return with_last(sinks, keys.shape[2], self.plan.target - self.params.n_sink)

    def protected(self, layer: int) -> list[int]:
        latest = self.latest(self.plan.target - self.params.n_sink)
        return sorted({*range(min(self.params.n_sink, self.n_seen())), *latest})
