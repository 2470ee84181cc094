"""Attention Matching's two least-squares problems: a few keys with biases and values that stand for many.

For reference queries the few keys are to give the same sum of exponentials as all keys, their mass, and the same
attention output. All in float32 for one KV head, whose query heads' queries are rows of one matrix.

Shapes    q (n, d_h), keys and values (s, d_h); idx (t,) positions of the kept keys, biases (t,), new values (t, d_h).

Not here: which queries, how many keys (`methods/compacting/attention_matching.py`).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from engine.softmax import Softmax

POWER_STEPS = 3  # of the power iteration for a step size
GRAM_STEPS = 100  # of projected gradients, from which on the columns' products pay for themselves
DROP_ROUNDS = 3  # in which keys of next to no mass make room for others
RIDGE = 1e-6  # of the second attempt, where plain least squares gives values that 16 bits cannot hold
ALIKE = 1e-6  # of the largest pivot, below which products of columns lose what float32 columns have
LARGEST_GROWTH = 100.0  # by which new values may exceed the old ones


class Target(NamedTuple):
    """What all keys give to the reference queries."""

    exps: Tensor  # (n, s), exponentials of logits less their row's largest
    mass: Tensor  # (n,), their sums

    @property
    def weights(self) -> Tensor:
        return self.exps / self.mass.unsqueeze(1)


class BiasRule(NamedTuple):
    """How the weights exp(bias) of kept keys are fitted: projected gradients behind clamped least squares."""

    lowest: float  # bounds of the weights
    highest: float
    n_steps: int


def target(q: Tensor, keys: Tensor, soft: Softmax) -> Target:
    """No mask: queries are matched against all keys, later ones included.

    Without sinks, which join the kept tokens as they joined all of them: exactly, and never fitted.
    """
    logits = soft.bent(q @ keys.mT)
    exps = logits.sub_(logits.amax(1, keepdim=True)).exp_()
    return Target(exps, exps.sum(1))


def highest_keys(weights: Tensor, t: int, score: str) -> Tensor:
    """The `t` keys with the most attention by weights (n, s), most first; of equal ones the lower position."""
    if score == "rms":
        scores = weights.square().mean(0).sqrt()
    else:
        scores = weights.mean(0) if score == "mean" else weights.amax(0)
    return scores.sort(descending=True, stable=True).indices[:t]


def fit_weights(columns: Tensor, mass: Tensor, rule: BiasRule, start: Tensor) -> Tensor:
    """Weights (t,) within bounds with which columns (n, t) add up to the mass (n,); a power iteration has `start`."""
    weights = least_squares(columns, mass.unsqueeze(1)).squeeze(1).clamp_(rule.lowest, rule.highest)
    if rule.n_steps:
        step, wanted = 1 / squared_norm(columns, start), columns.mT @ mass
        gram = columns.mT @ columns if rule.n_steps >= GRAM_STEPS else None
        for _ in range(rule.n_steps):
            had = columns.mT @ (columns @ weights) if gram is None else gram @ weights
            weights = (weights - step * (had - wanted)).clamp_(rule.lowest, rule.highest)
    return weights


def squared_norm(x: Tensor, start: Tensor) -> Tensor:
    """The largest squared singular value of x (n, t), as a few steps from `start` (t,) have it."""
    direction = start / start.norm()
    for _ in range(POWER_STEPS):
        direction = x.mT @ (x @ direction)
        direction = direction / direction.norm().clamp(min=1e-12)
    return (x @ direction).square().sum().clamp(min=1e-12)


def least_squares(x: Tensor, y: Tensor) -> Tensor:
    """Plain least squares of x (n, t) for the columns of y (n, c): (t, c)."""
    found = solved(x, y)
    return found if bool(found.isfinite().all()) else ridged(x, y, RIDGE)


def solved(x: Tensor, y: Tensor) -> Tensor:
    """As `least_squares`, without a ridge: not finite where columns of x are alike, whatever the library does then."""
    try:
        return torch.linalg.lstsq(x, y, driver="gels").solution
    # Some raise what others answer with infinities.
    except torch.linalg.LinAlgError:  # pyright: ignore[reportPrivateImportUsage]
        return y.new_full((x.shape[1], y.shape[1]), torch.nan)


def ridged(x: Tensor, y: Tensor, penalty: float, is_share: bool = False) -> Tensor:
    """Least squares with this penalty on squared results, in float64: (t, c).

    As a share it is of the largest squared singular value of x.
    """
    wide = x.double()
    gram = wide.mT @ wide
    gram.diagonal().add_(penalty * torch.linalg.eigvalsh(gram)[-1] if is_share else penalty)
    factor = torch.linalg.cholesky_ex(gram).L
    return torch.cholesky_solve(wide.mT @ y.double(), factor).to(x.dtype)


def fit_values(x: Tensor, wanted: Tensor, ridge: float, largest: float) -> tuple[Tensor, bool]:
    """New values (t, d_h) with which weights x (n, t) give the outputs wanted (n, d_h).

    Whether they had to be made again with a ridge, because some were far above `largest`, the old values' largest.
    """
    if ridge:
        return ridged(x, wanted, ridge, is_share=True), False
    found = solved(x, wanted)
    if bool((found.abs().amax() <= LARGEST_GROWTH * largest).logical_and(found.isfinite().all())):
        return found, False
    return ridged(x, wanted, RIDGE, is_share=True), True


class Pursuit(NamedTuple):
    """How orthogonal matching pursuit goes on."""

    n_each: int  # keys that are taken at a time
    interval: int  # of the rounds in which weights are fitted
    drop_below: float  # biases below it make room


class Products:
    """Products of chosen columns with each other and with the mass, in float64, which grow with the choice.

    Each fit of a pursuit is then a Cholesky factor of the products, and no column is orthogonalised again.
    """

    def __init__(self, goal: Target, most: int) -> None:
        exps, self.mass = goal.exps, goal.mass.double()
        self.columns = exps.new_empty(len(exps), most, dtype=torch.float64)
        self.gram = exps.new_empty(most, most, dtype=torch.float64)
        self.wanted = exps.new_empty(most, 1, dtype=torch.float64)
        self.n = 0

    def add(self, columns: Tensor) -> None:
        """Behind those that are there."""
        first, self.n = self.n, self.n + columns.shape[1]
        self.columns[:, first : self.n] = columns
        new, every = self.columns[:, first : self.n], self.columns[:, : self.n]
        self.gram[first : self.n, : self.n] = new.mT @ every
        self.gram[:first, first : self.n] = self.gram[first : self.n, :first].mT
        self.wanted[first : self.n] = (new.mT @ self.mass).unsqueeze(1)

    def keep(self, places: list[int]) -> None:
        """Only these."""
        self.n, of = len(places), torch.tensor(places, device=self.gram.device)
        self.columns[:, : self.n] = self.columns[:, of]
        self.gram[: self.n, : self.n] = self.gram[of][:, of]
        self.wanted[: self.n] = self.wanted[of]

    def rest(self, weights: Tensor) -> Tensor:
        """What weights (n,) leave of the mass, float32."""
        return (self.mass - self.columns[:, : self.n] @ weights.double()).float()

    def solved(self) -> Tensor | None:
        """Least squares, (n, 1) float32; None where columns are too alike for their products to tell them apart."""
        factor, failed = torch.linalg.cholesky_ex(self.gram[: self.n, : self.n])
        pivots = factor.diagonal()
        if bool(failed) or not bool(pivots.amin() > ALIKE * pivots.amax()):
            return None
        return torch.cholesky_solve(self.wanted[: self.n], factor).float()


def pursue(goal: Target, t: int, how: Pursuit, rule: BiasRule) -> tuple[Tensor, Tensor]:
    """Keys that best explain what is left of the mass, one after the other: positions and weights, `t` at most."""
    exps, mass = goal
    chosen, products = list[int](), Products(goal, t)

    def fit() -> Tensor:
        found = None if rule.n_steps else products.solved()
        if found is None:
            return fit_weights(exps[:, chosen], mass, rule, mass)
        return found.squeeze(1).clamp_(rule.lowest, rule.highest)

    weights, rest = mass.new_empty(0), mass
    open_keys = torch.ones(exps.shape[1], dtype=torch.bool, device=mass.device)
    for n_drops in range(DROP_ROUNDS + 1):
        n_round = 0
        while len(chosen) < t and bool(open_keys.any()):
            match = (exps.mT @ rest).masked_fill_(~open_keys, -torch.inf)
            n_new = min(how.n_each, t - len(chosen), int(open_keys.sum()))
            new = match.sort(descending=True, stable=True).indices[:n_new]
            open_keys[new] = False
            chosen += new.tolist()
            products.add(exps[:, new])
            if n_round % how.interval == 0:
                weights = fit()
            else:
                weights = torch.cat([weights, weights.new_full((n_new,), rule.lowest)])
            rest = products.rest(weights)
            n_round += 1
        weights = fit()
        weak = weights.log() < how.drop_below
        if n_drops == DROP_ROUNDS or not bool(weak.any()):
            break
        places = [i for i, is_weak in enumerate(weak.tolist()) if not is_weak]
        chosen = [chosen[i] for i in places]
        products.keep(places)
        weights = fit()
        rest = products.rest(weights)
    return torch.tensor(chosen, device=mass.device), weights
