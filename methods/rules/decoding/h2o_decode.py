"""What decode-time H2O may be asked for, and what it makes of a budget: arithmetic, without torch.

Not here: the method (`methods/decoding/h2o_decode.py`).
"""

from dataclasses import dataclass

from methods.rules.decoding.schedule import DecodingRules, check_schedule, schedule_notes


class H2ODecodeRules(DecodingRules):
    title = "H2O while decoding"

    @dataclass(frozen=True)
    class Params:
        interval: int
        schedule: str
        at_prefill: bool

        def __post_init__(self) -> None:
            check_schedule(self)

    @classmethod
    def least(cls, params: Params) -> tuple[int, str]:
        return 2, "half of it is for heavy hitters and half for recent tokens"

    @classmethod
    def notes(cls, params: Params) -> list[str]:
        return schedule_notes(params)
