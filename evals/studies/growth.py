"""Which methods hold a budget that grows with a conversation, and why others do not: `python -m
kvbench.evals.studies.growth`.

From what methods say of themselves (`Traits.grows`, `Traits.no_growth`); docs/turns.md says what it means.

Not here: how a row grows (`methods/base.py`, `engine/batch.py`).
"""

import sys

from kvbench.engine.terminal import say
from kvbench.evals.studies.hardware import method_of
from kvbench.results.names import own_methods
from kvbench.results.sheet import Sheet, markdown

KINDS = ("holds more of what is still there", "fetches more", "grows without a budget", "refused")


def growth(name: str) -> tuple[int, str]:
    """Which of KINDS a method with its default settings is, and why it is refused."""
    rules, params = method_of(name)
    traits = rules.traits_of(params)
    if traits.of_answers:
        return 3, "compresses its own answer, and takes no questions in turn"
    if traits.adapts:
        return 3, "keeps what each context asks for, without a budget that could grow"
    if not traits.has_budget:
        return 2, ""
    if traits.grows:
        return (0 if traits.drops else 1), ""
    assert traits.no_growth, f"{name} says nothing of why its budget cannot grow"
    return 3, traits.no_growth


def table() -> str:
    """Methods that grow first, then the others with their reasons."""
    found = sorted((*growth(name), name) for name in own_methods())
    rows = [[name, KINDS[kind] + (f": {why}" if why else "")] for kind, why, name in found]
    return markdown(Sheet(["method", "budget over a conversation"], rows, n_keys=2))


if __name__ == "__main__":
    say(table())
    sys.exit(0)
