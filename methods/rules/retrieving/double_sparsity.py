"""What Double Sparsity may be asked for, and what it makes of a budget: arithmetic, without torch.

Not here: the method (`methods/retrieving/double_sparsity.py`).
"""

from dataclasses import dataclass
from fractions import Fraction
from math import floor
from pathlib import Path

from engine.books.footprint import Footprint, held
from engine.budget import Budget, BudgetRequest, show
from engine.checks import each_one_of, whole_numbers
from engine.errors import ConfigError
from engine.shapes import Checkpoint, ModelShape
from methods.calibration.files import check_calibration, check_file, digest_of_file
from methods.rules.base import Rules

CHOICES = {
    "comm_mode": ("native", "matched"),
    "channel": ("q", "k", "qk"),
    "calibration": ("paper", "as_released"),
    "granularity": ("auto", "query_head", "kv_head"),
    "generated": ("stay", "compete"),
    "calibrate": ("missing", "never"),
}
WHOLE_BITS = 16  # of a label that is not quantised
SCALE_BITS = 32  # of a quantised vector of labels: its lowest value and its scale
LEAST_OF_HEADS = Fraction(1, 32)  # of `comm`, below which a group shares its labels unless it is told not to


class DoubleSparsityRules(Rules):
    title = "Double Sparsity"
    drops = False
    skips = True

    @dataclass(frozen=True)
    class Params:
        comm_mode: str
        group_factor: int
        label_bits: int
        channel: str
        calibration: str
        granularity: str
        generated: str
        heavy: int | None
        full_layers: int
        calibrate: str
        calibration_file: Path | None

        def __post_init__(self) -> None:
            each_one_of("method", self, **CHOICES)
            whole_numbers("method", self, group_factor=1, label_bits=1, heavy=1, full_layers=0)
            if self.label_bits > WHOLE_BITS:
                raise ConfigError(
                    f"method.label_bits={self.label_bits} is out of range; a label has 1 to {WHOLE_BITS} bits"
                )
            if self.heavy is not None and self.generated != "compete":
                raise ConfigError(
                    f"method.heavy={self.heavy} counts generated tokens too; use it with method.generated=compete, or "
                    "budget=N for a number of the prompt's"
                )
            if self.calibration == "as_released" and self.channel != "qk":
                raise ConfigError(
                    f"method.calibration=as_released is the authors' score of method.channel=qk; method.channel="
                    f"{self.channel} has only calibration=paper"
                )

    @dataclass(frozen=True)
    class Plan:
        k: int  # tokens of the prompt that are selected
        n_labels: int  # of a query head or a group; at most, where the heads of a group share what they read
        per_head: bool  # every query head selects for itself, by channels of its own
        n_read: int | None  # most channels that the heads of a group may read between them; None: no limit

    @classmethod
    def check(cls, params: Params, request: BudgetRequest, shape: ModelShape) -> None:
        super().check(params, request, shape)
        check_file(params.calibration_file, "channels", shape)
        if params.channel == "k" and params.granularity == "query_head" and shape.g > 1:
            raise ConfigError(
                f"method.channel=k orders channels for the {shape.h_kv} KV heads of {shape.name}, not for its "
                f"{shape.h} query heads; use method.granularity=kv_head or method.channel=q"
            )
        if request.ratio != 1:
            labels_for(params, request.comm, shape)

    @classmethod
    def check_model(cls, params: Params, model: Checkpoint) -> None:
        check_calibration(params.calibration_file, "channels", params.calibrate == "missing", model)

    @classmethod
    def data_digest(cls, params: Params) -> str | None:
        return digest_of_file(params.calibration_file)

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Plan:
        if budget.attends_all:
            return DoubleSparsityRules.Plan(budget.tokens, shape.d_h, True, None)
        return DoubleSparsityRules.Plan(budget.tokens, *labels_for(params, budget.comm, shape))

    @classmethod
    def label(cls, params: Params, request: BudgetRequest) -> str:
        notes = ["native"] if params.comm_mode == "native" else []
        notes += [] if params.label_bits == WHOLE_BITS else [f"{params.label_bits} bits"]
        notes += [] if params.channel == "q" else [params.channel]
        return f"{cls.title} ({', '.join(notes)})" if notes else cls.title

    @classmethod
    def footprint(cls, params: Params, plan: Plan, budget: Budget, shape: ModelShape) -> Footprint:
        overhead = 0 if params.label_bits == WHOLE_BITS else SCALE_BITS
        if plan.per_head and params.label_bits == WHOLE_BITS:  # a group stores each channel once
            most = min(shape.g * plan.n_labels, shape.d_h) if plan.n_read is None else min(plan.n_read, shape.d_h)
            bits = shape.h_kv * most * WHOLE_BITS
        else:
            bits = (shape.h if plan.per_head else shape.h_kv) * (plan.n_labels * params.label_bits + overhead)
        fetched = plan.k * (shape.g if plan.per_head else 1)
        return held(budget, shape, 0, -(-bits * budget.s_prompt // 8), fetched, cls.n_whole(params, shape))


def labels_for(params: DoubleSparsityRules.Params, comm: Fraction, shape: ModelShape) -> tuple[int, bool, int | None]:
    """Labels of a head, whether query heads have their own, and how many channels a group may read."""
    if params.comm_mode == "native":
        return native_labels(params, comm, shape)
    heads = params.granularity
    if heads == "auto":
        fits = params.channel != "k" and comm >= LEAST_OF_HEADS and comm >= least_comm(params, shape, 1, True)
        heads = "query_head" if fits or shape.g == 1 else "kv_head"
    per_head = heads == "query_head"
    least = least_comm(params, shape, 1, per_head)
    if comm < least:
        whose = f"each of the {shape.g} query heads of a group" if per_head and shape.g > 1 else "a KV head"
        other = ", or method.granularity=kv_head" if per_head and shape.g > 1 else ""
        of_bits = "" if params.label_bits == WHOLE_BITS else f" of {params.label_bits} bits with its scale"
        raise ConfigError(
            f"comm={show(comm)} pays for no label{of_bits} for {whose} of {shape.d_h} dimensions; "
            f"use comm={show(least)} or more{other}"
        )
    bits = comm * 16 * shape.d_h
    if params.label_bits == WHOLE_BITS:
        n = min(floor(bits / WHOLE_BITS), shape.d_h)
        return n, per_head, n if per_head else None
    n_vectors = shape.g if per_head else 1  # of a KV head: quantised vectors are not shared
    return min(floor((bits / n_vectors - SCALE_BITS) / params.label_bits), shape.d_h), per_head, None


def native_labels(
    params: DoubleSparsityRules.Params, comm: Fraction, shape: ModelShape
) -> tuple[int, bool, int | None]:
    """The published number of labels, which `comm` has to pay for once; what a group reads beyond it is counted."""
    if shape.d_h % params.group_factor:
        raise ConfigError(
            f"method.group_factor={params.group_factor} does not divide the {shape.d_h} dimensions of {shape.name}; "
            "use a power of 2"
        )
    n = shape.d_h // params.group_factor
    least = least_comm(params, shape, n, False)
    if comm < least:
        raise ConfigError(
            f"comm={show(comm)} does not pay for the {n} labels of method.group_factor={params.group_factor}; use "
            f"comm={show(least)} or more, or method.comm_mode=matched"
        )
    shares = params.granularity == "kv_head" or (params.granularity == "auto" and params.channel == "k")
    return n, not shares, None


def least_comm(params: DoubleSparsityRules.Params, shape: ModelShape, n: int, per_head: bool) -> Fraction:
    """The smallest share of the keys that `n` labels cost, where query heads may all read channels of their own."""
    overhead = 0 if params.label_bits == WHOLE_BITS else SCALE_BITS
    return Fraction(n * params.label_bits + overhead, 16 * shape.d_h) * (shape.g if per_head else 1)
