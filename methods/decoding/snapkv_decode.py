"""SnapKV while decoding, as R-KV's authors compare it: keep what the last queries look at, again every few steps.

Paper     arXiv:2404.14469, 2024; Li, Yuhong; SnapKV: LLM Knows What You are Looking for Before Generation
Symbols   theirs kv_budget, divide_length, window_size, kernel_size = `target`, `interval`, `window`, `kernel`.
Per step  moved: nothing; resident: h_kv * (target + interval) tokens at most, and the last `window` queries.
Differs   - it is R-KV without redundancy, and not the SnapKV of `methods/dropping/snapkv.py`: a group's logits become
            one before the softmax, by their maximum, and the window's columns are cut off before it.
          - max pooling makes plateaus: of equal scores the lower slot stays, where the authors leave it to topk.
          - kvpress' form turns all of the window's queries to the current position, which no query of the model has;
            `method=snapkv_decode_kvpress_schedule` has its schedule alone.
Fails     as R-KV does.
Figures   drop while decoding: #F55B7E, left, -.
"""

from dataclasses import dataclass

from torch import Tensor

from methods.decoding.cutting import CuttingMethod, best_first, in_place, with_last
from methods.decoding.rkv import check_window, least_with_window, order_notes, window_importance
from methods.decoding.schedule import check_schedule


class SnapKVDecode(CuttingMethod):
    title = "SnapKV while decoding"

    @dataclass(frozen=True)
    class Params:
        interval: int
        window: int
        kernel: int
        order: str
        schedule: str
        at_prefill: bool

        def __post_init__(self) -> None:
            check_schedule(self)
            check_window(self)

    params: Params

    @classmethod
    def least(cls, params: Params) -> tuple[int, str]:
        return least_with_window(params)

    @classmethod
    def notes(cls, params: Params) -> list[str]:
        return order_notes(params)

    @classmethod
    def n_queries(cls, params: Params) -> int:
        return params.window

    def order(self, layer: int, keys: Tensor, positions: Tensor) -> Tensor:
        w, soft = self.params.window, self.trace.softmax[layer]
        scores = window_importance(self.queries(layer), keys, soft, w, self.params.kernel)
        best = best_first(scores, self.plan.target - w)
        return with_last(best if self.params.order == "score" else in_place(best), keys.shape[2], w)

    def protected(self, layer: int) -> range:
        return self.latest(self.params.window)
