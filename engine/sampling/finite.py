"""What is said where logits are no numbers.

Not here: how that is seen (`engine/sampling/draws.py`, `engine/prefill.py`), what is written of it (`evals/lines.py`).
"""

REMEDY = "its weights may be damaged, or too large for the dtype; check the checkpoint, or use dtype=float32"


def why_lost(n_said: int, are: str = "generated") -> str:
    """Why an answer ended after so many tokens."""
    return f"after {n_said} {are} tokens the logits are NaN or infinite, so that no token can be chosen; {REMEDY}"
