"""What decode-time SnapKV may be asked for, and what it makes of a budget: arithmetic, without torch.

Not here: the method (`methods/decoding/snapkv_decode.py`).
"""

from dataclasses import dataclass

from methods.rules.decoding.rkv import check_window, least_with_window, order_notes
from methods.rules.decoding.schedule import DecodingRules, check_schedule


class SnapKVDecodeRules(DecodingRules):
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

    @classmethod
    def least(cls, params: Params) -> tuple[int, str]:
        return least_with_window(params)

    @classmethod
    def notes(cls, params: Params) -> list[str]:
        return order_notes(params)
