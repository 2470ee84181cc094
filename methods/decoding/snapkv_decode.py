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

from torch import Tensor

from kvbench.methods.decoding.rkv import Voting, VotingMethod


class SnapKVDecode(VotingMethod):
    title = "SnapKV while decoding"
    Params = Voting

    def scores(self, layer: int, keys: Tensor) -> Tensor:
        return self.importance(layer, keys)
