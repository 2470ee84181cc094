"""Attention Matching's two least-squares problems: a few keys with biases and values that stand for many.

For reference queries the few keys are to give the same sum of exponentials as all keys, their mass, and the same
attention output. All in float32 for one KV head, whose query heads' queries are rows of one matrix.

Shapes    q (n, d_h), keys and values (s, d_h); idx (t,) positions of the kept keys, biases (t,), new values (t, d_h).

Not here: which queries, how many keys (`methods/compacting/attention_matching.py`).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.engine.softmax import Softmax
from kvbench.kernels.scratch import finer

POWER_STEPS = 3  # of the power iteration for a step size
BLOCK = 192  # keys at a time, whose numbers a cache holds; products of 1,000 take half the time that all at once do
FEW = 64  # keys at a time that meet all queries: of 2,000 and 4,428 queries in 17 ms, all at once in 28
MOST_CHANGES = 12  # of a solution, each of which at least halves what is left
SETTLED = 1e-4  # of a solution, which the last change may be; the next would be smaller by what this one shrank
MOST_POWERS = 100  # of products, for their largest eigenvalue; positive ones took up to 15
DROP_ROUNDS = 3  # in which keys of next to no mass make room for others
RIDGE = 1e-6  # of the second attempt, where plain least squares gives values that 16 bits cannot hold
ALIKE = 1e-6  # of the largest pivot, below which products of columns lose what float32 columns have
LARGEST_GROWTH = 100.0  # by which new values may exceed the old ones


class Target(NamedTuple):
    """Attention of the reference queries over all keys, which a fit approaches."""

    exps: Tensor  # (n, s), exponentials of logits less their row's largest; a key's lie together, since keys are chosen
    mass: Tensor  # (n,), their sums

    def outputs(self, values: Tensor) -> Tensor:
        """Attention output (n, d_h) over all values (s, d_h)."""
        return (self.exps @ values).div_(self.mass.unsqueeze(1))


class BiasRule(NamedTuple):
    """How the weights exp(bias) of kept keys are fitted: clamped least squares, then projected gradients."""

    lowest: float  # bounds of the weights
    highest: float
    n_steps: int


def target(q: Tensor, keys: Tensor, softmax: Softmax) -> Target:
    """The target of a match: without a mask, so that queries see all keys, later ones included.

    Without sinks, which join the kept tokens as they joined all of them: exactly, and never fitted.
    """
    scaled, turned = q.new_empty(len(keys), len(q)), (q * softmax.scale).mT
    for start in range(0, len(keys), FEW):
        torch.mm(keys[start : start + FEW], turned, out=scaled[start : start + FEW])
    logits = softmax.capped(scaled)  # (s, n)
    exps = logits.sub_(logits.amax(0)).exp_()
    return Target(exps.mT, exps.sum(0))


def highest_keys(goal: Target, t: int, score: str) -> Tensor:
    """The `t` keys with the most attention, most first; of equal ones the lower position."""
    scores = torch.cat([scores_of(some / goal.mass, score) for some in goal.exps.mT.split(BLOCK)])
    return scores.sort(descending=True, stable=True).indices[:t]


def scores_of(weights: Tensor, score: str) -> Tensor:
    """How much attention some keys get, by their weights (keys, n)."""
    if score == "rms":
        return weights.square_().mean(1).sqrt_()
    return weights.mean(1) if score == "mean" else weights.amax(1)


def weights_of(columns: Tensor, bias: Tensor) -> Tensor:
    """Attention weights (n, t) of keys with these columns of exponentials and biases (t,).

    A query that had less attention for any of them than float32 can say gets none: it is left out of a fit.
    """
    x = columns * bias.exp()
    return x.div_(x.sum(1, keepdim=True).clamp_(min=torch.finfo(x.dtype).tiny))


def fit_weights(columns: Tensor, mass: Tensor, rule: BiasRule, start: Tensor) -> Tensor:
    """Weights (t,) within bounds with which columns (n, t) add up to the mass (n,); a power iteration has `start`."""
    system = System(columns)
    weights = least_squares(system, mass.unsqueeze(1)).squeeze(1).clamp_(rule.lowest, rule.highest)
    if rule.n_steps:
        step, wanted = 1 / squared_norm(system.gram, start), columns.mT @ mass
        for _ in range(rule.n_steps):
            weights = (weights - step * (system.gram @ weights - wanted)).clamp_(rule.lowest, rule.highest)
    return weights


def squared_norm(gram: Tensor, start: Tensor) -> Tensor:
    """The largest squared singular value of columns with these products (t, t), after a few steps from `start` (t,)."""
    direction = start / start.norm()
    for _ in range(POWER_STEPS):
        direction = gram @ direction
        direction = direction / direction.norm().clamp(min=1e-12)
    return (direction @ gram @ direction).clamp(min=1e-12)


def products(x: Tensor) -> Tensor:
    """Products of all columns of x (n, t) with each other, (t, t): those above the diagonal, mirrored."""
    t = x.shape[1]
    gram = x.new_empty(t, t)
    for start in range(0, t, BLOCK):
        end = min(start + BLOCK, t)
        gram[start:end, start:] = x[:, start:end].mT @ x[:, start:]
        gram[end:, start:end] = gram[start:end, end:].mT
    return gram


class System:
    """Least squares of columns x (n, t) by their products, which are taken once for all that is asked of the columns.

    A Cholesky factor of products in float32 loses half of the digits, so each solution is solved again for what it
    leaves until it hardly changes. Then it is about as close as one by a QR decomposition, which takes twice as long:
    on 42 systems of a prompt 0.6 times as far from the exact one in the median, and at most 3e-5 of its length.
    """

    def __init__(self, x: Tensor) -> None:
        self.x, self.gram = x, products(x)

    def solved(self, y: Tensor, penalty: float = 0.0) -> Tensor | None:
        """Solution (t, c) for columns of y (n, c), with a penalty on squared results; None where it does not settle."""
        x, gram = self.x, self.gram
        if penalty:
            gram = gram.clone()
            gram.diagonal().add_(penalty)
        factor, failed = torch.linalg.cholesky_ex(gram)
        if bool(failed):
            return None
        found = torch.cholesky_solve(x.mT @ y, factor)
        before = float(found.norm())
        for _ in range(MOST_CHANGES):
            change = torch.cholesky_solve((x.mT @ (y - x @ found)).sub_(found, alpha=penalty), factor)
            found, size = found.add_(change), float(change.norm())
            if size <= SETTLED * float(found.norm()):
                return found
            if not size < before / 2:
                return None
            before = size
        return None

    def share(self, penalty: float) -> float:
        """A penalty that is given as a share of the largest squared singular value of the columns.

        No product of weights is negative, so that powers of the products, of which rows are the start, lead there.
        """
        direction, before = self.gram.sum(1), 0.0
        for _ in range(MOST_POWERS):
            direction = self.gram @ (direction / direction.norm())
            largest = float(direction.norm())
            if abs(largest - before) <= 1e-6 * largest:
                return penalty * largest
            before = largest
        return penalty * float(torch.linalg.eigvalsh(finer(self.gram))[-1])


def least_squares(system: System, y: Tensor) -> Tensor:
    """Plain least squares for the columns of y (n, c): (t, c)."""
    found = plain(system, y)
    return found if bool(found.isfinite().all()) else ridged(system, y, RIDGE)


def plain(system: System, y: Tensor) -> Tensor:
    """`least_squares` without a ridge: not finite where columns are alike, whatever the library does then."""
    found = system.solved(y)
    if found is not None:
        return found
    try:
        return torch.linalg.lstsq(system.x, y, driver="gels").solution
    # Some raise what others answer with infinities.
    except torch.linalg.LinAlgError:  # pyright: ignore[reportPrivateImportUsage]
        return y.new_full((system.x.shape[1], y.shape[1]), torch.nan)


def ridged(system: System, y: Tensor, penalty: float) -> Tensor:
    """Least squares with this penalty on squared results: (t, c). In float64 where float32 does not settle."""
    found = system.solved(y, penalty)
    if found is not None:
        return found
    wide = finer(system.x)
    gram = wide.mT @ wide
    gram.diagonal().add_(penalty)
    factor = torch.linalg.cholesky_ex(gram).L
    return torch.cholesky_solve(wide.mT @ finer(y), factor).to(y.dtype)


def fit_values(x: Tensor, wanted: Tensor, ridge: float, largest: float) -> tuple[Tensor, bool]:
    """New values (t, d_h) with which weights x (n, t) give the outputs wanted (n, d_h).

    Whether they had to be made again with a ridge, because some were far above `largest`, the old values' largest.
    """
    system = System(x)
    if ridge:
        return ridged(system, wanted, system.share(ridge)), False
    found = plain(system, wanted)
    if bool((found.abs().amax() <= LARGEST_GROWTH * largest).logical_and(found.isfinite().all())):
        return found, False
    return ridged(system, wanted, system.share(RIDGE)), True


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
        exps, self.mass = goal.exps, finer(goal.mass)
        self.columns = exps.new_empty(len(exps), most, dtype=self.mass.dtype)
        self.gram = exps.new_empty(most, most, dtype=self.mass.dtype)
        self.wanted = exps.new_empty(most, 1, dtype=self.mass.dtype)
        self.n = 0

    def add(self, columns: Tensor) -> None:
        """Append columns to those that are there."""
        first, self.n = self.n, self.n + columns.shape[1]
        self.columns[:, first : self.n] = columns
        new, every = self.columns[:, first : self.n], self.columns[:, : self.n]
        self.gram[first : self.n, : self.n] = new.mT @ every
        self.gram[:first, first : self.n] = self.gram[first : self.n, :first].mT
        self.wanted[first : self.n] = (new.mT @ self.mass).unsqueeze(1)

    def keep(self, places: list[int]) -> None:
        """Keep only the columns at these places."""
        self.n, of = len(places), torch.tensor(places, device=self.gram.device)
        self.columns[:, : self.n] = self.columns[:, of]
        self.gram[: self.n, : self.n] = self.gram[of][:, of]
        self.wanted[: self.n] = self.wanted[of]

    def rest(self, weights: Tensor) -> Tensor:
        """The mass that weights (n,) leave over, float32."""
        return (self.mass - self.columns[:, : self.n] @ finer(weights)).float()

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
