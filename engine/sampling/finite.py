"""Whether logits are numbers: a mark in the tokens that a step's end reads back anyway, so that nobody waits for it.

A row's largest logit is NaN where any is, +inf where one is, and -inf where nothing is left to choose. So many times
nothing is added to its token, which becomes NaN then. Checked on the logits and not on what they choose: an argmax of
NaN is a token as any other.

Not here: what happens to such a row (`engine/decode.py`), what is written of it (`evals/lines.py`).
"""

import torch
from torch import Tensor

REMEDY = "its weights may be damaged, or too large for the dtype; check the checkpoint, or use dtype=float32"


def marked(ids: Tensor, logits: Tensor) -> Tensor:
    """The tokens (n,) as float64, NaN for rows whose logits (n, vocabulary) choose nothing."""
    return torch.add(ids, logits.amax(-1).double(), alpha=0)


def said(token: float) -> int | None:
    """A token that was marked; None: there is none."""
    return None if token != token else int(token)


def why_lost(n_said: int) -> str:
    """Why an answer ended behind so many tokens."""
    return f"after {n_said} generated tokens the logits are NaN or infinite, so that no token can be chosen; {REMEDY}"
