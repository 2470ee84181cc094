"""What Expected Attention may be asked for, and what it makes of a budget: arithmetic, without torch.

Not here: the method (`methods/dropping/expected_attention.py`).
"""

import hashlib
import json
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from engine.budget import Budget, BudgetRequest
from engine.checks import each_one_of, share, tokens, whole_number
from engine.errors import ConfigError
from engine.shapes import Checkpoint, ModelShape
from methods.rules.base import Rules
from methods.rules.dropping.allocators import Allocator

TENSORS = ("query_mean", "query_cov")  # of a file of statistics: (layers, h, d_h) and (layers, h, d_h, d_h)
LONGEST_HEADER = 1 << 20  # bytes
MAKE = "python -m methods.dropping.expected_attention MODEL TEXTS FILE makes one"


class ExpectedAttentionRules(Rules):
    title = "Expected Attention"
    drops = True
    comparable = "heads"
    is_scorer = True

    @dataclass(frozen=True)
    class Params:
        n_future: int
        n_sink: int
        eps: float
        alpha: Fraction
        covariance: bool
        value_norm: bool
        stats: str
        stats_file: Path | None
        rotary: str

        def __post_init__(self) -> None:
            each_one_of("method", self, stats=("prompt", "file"), rotary=("model", "none"))
            whole_number("method.n_future", self.n_future, 1)
            tokens("method.n_sink", self.n_sink)
            share("method.alpha", self.alpha)
            if not 0 <= self.eps < float("inf"):
                raise ConfigError(f"method.eps={self.eps} is out of range; it is added to probabilities, and 0 or more")
            if self.stats == "prompt" and self.stats_file is not None:
                raise ConfigError(
                    f"method.stats_file={self.stats_file} has no effect with method.stats=prompt; leave it out or set "
                    "method.stats=file"
                )
            if self.stats == "file" and self.stats_file is None:
                raise ConfigError(
                    f"method.stats=file needs a file of query statistics; add method.stats_file=…, {MAKE}"
                )

    @dataclass(frozen=True)
    class Plan:
        """What a layer keeps of the prompt."""

        cap: int  # tokens per KV head, the sinks included
        n_sink: int

    @classmethod
    def check(cls, params: Params, request: BudgetRequest, shape: ModelShape) -> None:
        if params.stats_file is None:
            return
        wanted = [len(shape.attention_layers), shape.h, shape.d_h]
        header = header_of(params.stats_file)
        for name, sizes in zip(TENSORS, (wanted, [*wanted, shape.d_h]), strict=True):
            found = header[name].get("shape") if isinstance(header.get(name), dict) else None
            if found != sizes:
                raise ConfigError(
                    f"method.stats_file={params.stats_file} has {name} of shape {found}, and {shape.name} has layers, "
                    f"query heads and dimensions {wanted}; use statistics of this model: {MAKE}"
                )

    @classmethod
    def check_model(cls, params: Params, model: Checkpoint) -> None:
        if params.rotary == "model" and not model.n_rotary:
            raise ConfigError(
                f"the model {model.shape.name!r} has no rotary positions of the known kind, by which "
                "method.rotary=model could turn its queries; use method.rotary=none"
            )
        if params.stats_file is None:
            return
        made_of = (header_of(params.stats_file).get("__metadata__") or {}).get("model_digest")
        if made_of not in model.digests:
            raise ConfigError(
                f"method.stats_file={params.stats_file} was made with the model {made_of} and this is "
                f"{model.digests[0]}; use statistics of this model: {MAKE}"
            )

    @classmethod
    def data_digest(cls, params: Params) -> str | None:
        if params.stats_file is None:
            return None
        with opened(params.stats_file) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:12]

    @classmethod
    def own_allocator(cls, params: Params) -> Allocator:
        return Allocator("head_protect", params.alpha)

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Plan:
        cap = budget.tokens
        return ExpectedAttentionRules.Plan(cap, params.n_sink if params.n_sink < cap else cap // 4)


def header_of(path: Path) -> dict[str, Any]:
    """What a safetensors file says of its tensors, and its `__metadata__`."""
    with opened(path) as file:
        n_bytes = int.from_bytes(file.read(8), "little")
        text = file.read(n_bytes) if n_bytes <= LONGEST_HEADER else b""
    try:
        header = json.loads(text)
    except ValueError:
        header = None
    if not isinstance(header, dict):
        raise ConfigError(f"method.stats_file={path} is no safetensors file of query statistics; {MAKE}")
    return header


def opened(path: Path) -> Any:
    """The file, to be read."""
    try:
        return path.expanduser().open("rb")
    except OSError as error:
        raise ConfigError(
            f"method.stats_file={path} cannot be read: {error.strerror}; give a file of query statistics, {MAKE}"
        ) from None
