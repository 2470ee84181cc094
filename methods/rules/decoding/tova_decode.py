"""What decode-time TOVA may be asked for, and what it makes of a budget: arithmetic, without torch.

Not here: the method (`methods/decoding/tova_decode.py`).
"""

from dataclasses import dataclass

from methods.rules.decoding.schedule import DecodingRules, check_schedule, schedule_notes


class TOVADecodeRules(DecodingRules):
    title = "TOVA while decoding"

    @dataclass(frozen=True)
    class Params:
        interval: int
        schedule: str
        at_prefill: bool

        def __post_init__(self) -> None:
            check_schedule(self)

    @classmethod
    def notes(cls, params: Params) -> list[str]:
        return schedule_notes(params)
