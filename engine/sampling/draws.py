"""Drawing tokens: one number of a row's own generator per token, looked up among the likeliest tokens.

All numbers of a row are drawn before its first token, on the CPU, so that they depend on its seed alone. A number is a
place on the cumulative probabilities of tokens by falling probability: rows whose logits nearly agree draw the same
token.

A token that is chosen, drawn or not, bears a mark of whether its logits are numbers, which a step's end reads back
with it, so that nobody waits for it. A row's largest logit is NaN where any is, +inf where one is, and -inf where
nothing is left to choose. So many times nothing is added to its token, which becomes NaN then. Checked on the logits
and not on what they choose: an argmax of NaN is a token as any other.

Not here: seeds (`engine/sampling/spec.py`), what happens to a row that chooses nothing (`engine/batch.py`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvbench.engine.sampling.spec import Sampling
from kvbench.kernels.jit import upload
from kvbench.kernels.scratch import finer, finest

N_FEW, N_SORTED = 64, 1024  # likeliest tokens that a CPU sorts first, and then: all that a nucleus has, as a rule


def seeded(*numbers: int) -> torch.Generator:
    """The generator for this seed and whatever else tells one draw from another."""
    import numpy as np  # slow to import, and a refused command draws nothing

    return torch.Generator().manual_seed(int(np.random.SeedSequence(numbers).generate_state(1)[0]))


class Draws:
    """The numbers that a batch of rows draws with."""

    def __init__(self, sampling: Sampling, seeds: Sequence[int], n_new: int, device: torch.device) -> None:
        self.sampling = sampling
        numbers = [
            torch.rand(n_new, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) for seed in seeds
        ]
        self.numbers = torch.stack(numbers).to(device, finest(device))  # (rows, n_new)
        self.rows, self.which = [*range(len(numbers))], torch.arange(len(numbers), device=device)

    def pick(self, logits: Tensor, rows: Sequence[int], t: int) -> Tensor:
        """The token `t` of each of these rows, whose logits are (n, vocabulary): (n,)."""
        if [*rows] != self.rows:
            self.rows, self.which = [*rows], upload([*rows], logits.device)  # nobody waits for it
        return drawn(logits, self.numbers[self.which, t], self.sampling)


def drawn(logits: Tensor, numbers: Tensor, sampling: Sampling) -> Tensor:
    """A token per row of logits (n, vocabulary), at the place that its number in [0, 1) names: (n,)."""
    scaled = logits.float() / sampling.temperature
    size, k = scaled.shape[-1], sampling.top_k
    if k is not None and k < size:
        best = scaled.topk(k)
        shares, ids = best.values.softmax(-1), best.indices
    elif sampling.top_p == 1:
        shares, ids = scaled.softmax(-1), None  # in the order of the vocabulary: there is nothing to cut off
    elif scaled.device.type != "cpu" or size <= N_SORTED:
        shares, ids = scaled.softmax(-1).sort(-1, descending=True)
    else:
        return drawn_from_few(scaled, numbers, sampling.top_p)
    return looked_up(shares, ids, numbers, sampling.top_p)


def drawn_from_few(scaled: Tensor, numbers: Tensor, top_p: float) -> Tensor:
    """Tokens drawn (`drawn`) with as few of them sorted as the nucleus of each row allows."""
    every = scaled.softmax(-1)
    tokens = torch.empty(len(every), dtype=torch.long)
    left = [*range(len(every))]
    for n_sorted in (N_FEW, N_SORTED):
        shares, ids = (every if len(left) == len(every) else every[left]).topk(n_sorted)
        found = looked_up(shares, ids, numbers[left], top_p)
        has_nucleus = (shares.double().sum(-1) >= top_p).tolist()
        for row, token, has in zip(left, found, has_nucleus, strict=True):
            if has:
                tokens[row] = token
        left = [row for row, has in zip(left, has_nucleus, strict=True) if not has]
        if not left:
            return tokens
    tokens[left] = looked_up(*every[left].sort(-1, descending=True), numbers[left], top_p)
    return tokens


def looked_up(shares: Tensor, ids: Tensor | None, numbers: Tensor, top_p: float) -> Tensor:
    """The token at each row's place among its nucleus, of probabilities (n, k) by falling size."""
    until = finer(shares).cumsum(-1)
    if top_p < 1:
        is_in = (until - shares) < top_p  # the token that crosses the border is the last one in
        n_in = is_in.sum(-1, keepdim=True).clamp(min=1)  # none in a row of NaN, whose token nobody takes
    else:
        n_in = torch.full((len(shares), 1), shares.shape[-1], device=shares.device)
    mass = until.gather(-1, n_in - 1)
    place = torch.searchsorted(until, numbers.unsqueeze(-1) * mass, right=True)
    place = torch.minimum(place, n_in - 1)
    return (place if ids is None else ids.gather(-1, place)).squeeze(-1)


def marked(ids: Tensor, logits: Tensor) -> Tensor:
    """The tokens (n,) in the finest numbers, NaN for rows whose logits (n, vocabulary) choose nothing."""
    return torch.add(ids, finer(logits.amax(-1)), alpha=0)


def said(token: float) -> int | None:
    """A token that was marked; None: there is none."""
    return None if token != token else int(token)
