"""What TriAttention may be asked for, and what it makes of a budget: arithmetic, without torch.

Not here: the method (`methods/decoding/triattention.py`).
"""

from dataclasses import dataclass
from pathlib import Path

from engine.budget import BudgetRequest
from engine.checks import each_one_of, whole_number
from engine.errors import ConfigError
from engine.shapes import Checkpoint, ModelShape
from methods.calibration.files import check_calibration, check_file, digest_of_file
from methods.rules.decoding.schedule import DecodingRules, Schedule

CHOICES = {
    "mode": ("per_head", "global", "per_layer_head"),
    "aggregate": ("mean", "max"),
    "reduce": ("max", "mean"),
    "trigger": ("slack", "gated"),
    "calibrate": ("missing", "never"),
}


def unpaired(shape: ModelShape) -> ConfigError:
    """What is said of a model whose heads are not whole pairs of front and back channels."""
    return ConfigError(
        f"{shape.name} does not rotate all {shape.d_h} dimensions of a head in pairs of a front and a back half, which "
        "TriAttention's statistics need; use another method with it"
    )


class TriAttentionRules(DecodingRules):
    title = "TriAttention"

    @dataclass(frozen=True)
    class Params:
        interval: int
        mode: str
        normalize: bool
        aggregate: str
        reduce: str
        n_offsets: int
        trigger: str
        count_prompt: bool
        protect_prompt: bool
        calibrate: str
        calibration_file: Path | None

        def __post_init__(self) -> None:
            whole_number("method.interval", self.interval, 1)
            whole_number("method.n_offsets", self.n_offsets, 1)
            each_one_of("method", self, **CHOICES)
            if self.reduce == "mean" and self.mode != "per_layer_head":
                raise ConfigError(
                    f"method.reduce=mean with method.mode={self.mode} is not allowed; use "
                    "method.mode=per_layer_head with it"
                )

    @classmethod
    def check(cls, params: Params, request: BudgetRequest, shape: ModelShape) -> None:
        super().check(params, request, shape)
        check_file(params.calibration_file, "queries", shape)

    @classmethod
    def check_model(cls, params: Params, model: Checkpoint) -> None:
        if model.n_rotary != model.shape.d_h and not model.is_drawn:
            raise unpaired(model.shape)
        check_calibration(params.calibration_file, "queries", params.calibrate == "missing", model)

    @classmethod
    def data_digest(cls, params: Params) -> str | None:
        return digest_of_file(params.calibration_file)

    @classmethod
    def protects_prompt(cls, params: Params) -> bool:
        return params.protect_prompt

    @classmethod
    def schedule(cls, params: Params, target: int) -> Schedule:
        return Schedule(target, params.interval, params.trigger, at_prefill=False, count_prompt=params.count_prompt)

    @classmethod
    def notes(cls, params: Params) -> list[str]:
        mode = [] if params.mode == "per_head" else [params.mode.replace("_", " ")]
        return [*mode, "prompt protected"] if params.protect_prompt else mode
