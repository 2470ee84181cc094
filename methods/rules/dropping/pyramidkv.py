"""What PyramidKV may be asked for, and what it makes of a budget: arithmetic, without torch.

Not here: the method (`methods/dropping/pyramidkv.py`).
"""

from dataclasses import dataclass

from engine.budget import Budget
from engine.errors import ConfigError
from engine.shapes import ModelShape
from methods.rules.base import Rules
from methods.rules.dropping.snapkv import SnapKVRules, fit_window


def pyramid(s: int, cap: int, w: int, beta: int, n_layers: int) -> list[int]:
    """Most in the first layer, fewest in the last: PyramidKV's integers for a prompt of `s`, floors included.

    `cap` is the nominal mean, with the `w` protected tokens that every layer keeps.
    """
    if s < cap:
        return [max(0, s - w)] * n_layers
    mean = cap - w
    if s < 2 * mean or n_layers == 1:
        return [mean] * n_layers
    last = mean // beta
    first = 2 * mean - last
    if first >= s - w:  # too short for this slope: the first layer keeps all, the last the balance
        first = s - w
        last = 2 * mean - first
    step = (first - last) // (n_layers - 1)
    return [first - rank * step for rank in range(n_layers)]


def schedule(s: int, cap: int, window: int, beta: int, n_layers: int) -> "PyramidKVRules.Plan":
    """The schedule for one `cap`, its window shrunk where `cap` leaves no room for it."""
    w = fit_window(cap, window)
    return PyramidKVRules.Plan(cap, w, tuple(pyramid(s, cap, w, beta, n_layers)))


def fit_schedule(s: int, n_tokens: int, window: int, beta: int, n_layers: int) -> "PyramidKVRules.Plan":
    """The schedule with the largest `cap` that keeps at most `n_tokens` per layer in the mean.

    Found after at most about n_layers / 2 tries; a cap of 1 keeps one token everywhere and always fits.
    """
    tries = (schedule(s, cap, window, beta, n_layers) for cap in range(n_tokens, 0, -1))
    return next(plan for plan in tries if plan.total <= n_tokens * n_layers)


class PyramidKVRules(Rules):
    title = "PyramidKV"
    drops = True

    @dataclass(frozen=True)
    class Params(SnapKVRules.Params):
        beta: int
        match_published: bool

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.beta < 1:
                raise ConfigError(
                    f"method.beta={self.beta} is out of range; use 1 for equal layers, more for a steeper pyramid"
                )

    @dataclass(frozen=True)
    class Plan:
        """What the layers keep of the prompt."""

        cap: int  # nominal mean of tokens per KV head over the layers, the window included
        window: int  # the prompt's last tokens, kept by every layer
        counts: tuple[int, ...]  # tokens before the window, per compressed layer from the first

        @property
        def total(self) -> int:
            """Tokens per KV head, all layers together."""
            return sum(self.counts) + self.window * len(self.counts)

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Plan:
        s, n_layers = budget.s_prompt, len(shape.attention_layers)
        if budget.attends_all:
            w = fit_window(s, params.window)
            return PyramidKVRules.Plan(s, w, (s - w,) * n_layers)
        make = schedule if params.match_published else fit_schedule
        return make(s, budget.tokens, params.window, params.beta, n_layers)

    @classmethod
    def uncodable(cls, params: Params) -> str:
        return super().uncodable(params) or "PyramidKV keeps other numbers of tokens in each layer"
