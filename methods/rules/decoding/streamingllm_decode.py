"""What decode-time StreamingLLM may be asked for, and what it makes of a budget: arithmetic, without torch.

Not here: the method (`methods/decoding/streamingllm_decode.py`).
"""

from dataclasses import dataclass

from engine.checks import tokens
from methods.rules.decoding.schedule import DecodingRules, check_schedule, schedule_notes


class StreamingLLMDecodeRules(DecodingRules):
    title = "StreamingLLM while decoding"

    @dataclass(frozen=True)
    class Params:
        interval: int
        n_sink: int
        schedule: str
        at_prefill: bool

        def __post_init__(self) -> None:
            check_schedule(self)
            tokens("method.n_sink", self.n_sink)

    @classmethod
    def least(cls, params: Params) -> tuple[int, str]:
        return params.n_sink + 1, f"method.n_sink={params.n_sink} first tokens stay, and at least one behind them"

    @classmethod
    def notes(cls, params: Params) -> list[str]:
        return schedule_notes(params)
