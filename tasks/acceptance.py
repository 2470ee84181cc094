"""Acceptance: how much of a compressed cache's draft full attention would take, from both next-token distributions.

Self-speculative decoding drafts `gamma` tokens with a compressed cache and verifies them with the full one in a single
pass; what is written is full attention's, whatever the draft (Leviathan et al., 2211.17192; Chen et al., 2302.01318).

    alpha            sum over tokens of min(p, q): the chance that a token drawn from the draft's q is accepted by full
                     attention's p, both behind the same temperature, top-k and top-p
    acceptance       mean of alpha over the steps
    expected_length  tokens that a verification yields, the one that it adds included: the mean over all starts t of
                     1 + alpha_t + alpha_t alpha_t+1 + … (gamma products). Steps are correlated, so it is no function of
                     the mean of alpha

At temperature 0 alpha is agreement, and an engine's own counts are there too (vLLM's), over the whole blocks of a feed:

    rate             accepted tokens over drafted ones; those behind a refused one count as drafted, so it falls with
                     gamma, as `acceptance` does not
    greedy_length    1 + accepted tokens a draft
    per_position     the share of drafts that were accepted up to each place

Not here: who decodes (`tasks/forced.py`), the other figures of a step (`tasks/fidelity.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.engine.sampling.spec import Sampling


def chances(logits: Tensor, sampling: Sampling) -> Tensor:
    """The distribution (…, vocabulary) that a token is drawn from, in float32: temperature, then top-k, then top-p.

    Tokens as likely as the k-th stay. The tail that goes has at most 1 - top_p; the likeliest token always stays, and
    of equal ones that with the lowest id is the likeliest.
    """
    logits = logits.float()
    if sampling.is_greedy:
        return torch.zeros_like(logits).scatter(-1, logits.argmax(-1, keepdim=True), 1.0)
    scaled = logits / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < scaled.shape[-1]:
        border = scaled.topk(sampling.top_k).values[..., -1:]
        scaled = scaled.masked_fill(scaled < border, -torch.inf)
    found = scaled.softmax(-1)
    if sampling.top_p == 1:
        return found
    falling, ids = found.sort(dim=-1, descending=True, stable=True)
    from_below = falling.flip(-1).cumsum(-1).flip(-1)
    goes = from_below <= 1 - sampling.top_p
    goes[..., 0] = False
    kept = falling.masked_fill(goes, 0.0)
    return torch.zeros_like(found).scatter(-1, ids, kept / kept.sum(-1, keepdim=True))


def alphas(p: Tensor, q: Tensor) -> Tensor:
    """The sum of min(p, q) of distributions (…, vocabulary); exactly 1 where both are the same."""
    return (1 - (p - q).abs().sum(-1) / 2).clamp(0, 1)


def expected_length(alpha: Tensor, gamma: int) -> float | None:
    """Tokens of a verification of `gamma` drafted ones, from alpha (steps,); None of fewer steps."""
    if len(alpha) < gamma:
        return None
    return 1 + alpha.double().unfold(0, gamma, 1).cumprod(-1).sum(-1).mean().item()


@dataclass(frozen=True)
class Drafts:
    """What an engine counts of greedy drafts of one length."""

    starts: list[int]
    drafted: int
    by_position: list[int]  # drafts that were accepted up to each place

    @property
    def accepted(self) -> int:
        return sum(self.by_position)

    @property
    def rate(self) -> float | None:
        return self.accepted / self.drafted if self.starts else None

    @property
    def length(self) -> float | None:
        return 1 + self.accepted / len(self.starts) if self.starts else None

    @property
    def per_position(self) -> list[float] | None:
        return [n / len(self.starts) for n in self.by_position] if self.starts else None


def drafts(agrees: Sequence[bool], gamma: int) -> Drafts:
    """Drafts one behind the other, each up to the token that its verification adds; an unfinished last one is none."""
    starts, by_position, at = list[int](), [0] * gamma, 0
    while at + gamma <= len(agrees):
        starts.append(at)
        block = [*agrees[at : at + gamma], False]
        n = block.index(False)
        by_position[:n] = [count + 1 for count in by_position[:n]]
        at += n + 1
    return Drafts(starts, gamma * len(starts), by_position)
