"""How long a group of samples will take, said before the first one: from a short pass and a few steps, timed now.

What they cost is laid on all samples by the arithmetic of `evals/screen/estimate.py`, which the first samples correct
later. Steps are timed with as many rows of full attention as there are variants, or with a few and laid on more of
them; what methods do besides is not in it.

Not here: the time that is left while samples are asked (`evals/screen/progress.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvbench.engine.decode import decode
from kvbench.engine.model import Model
from kvbench.engine.passes.trace import Trace
from kvbench.engine.prefill import prefill
from kvbench.evals.screen.estimate import Bends, Estimate, Load
from kvbench.evals.screen.progress import duration
from kvbench.methods.full import full_attention

PROBE = 256  # tokens; reading them takes 0.5 s of the embedded model on two cores
WARM_UP = 16  # tokens of a pass whose time does not count: it waits for compilers and allocators
N_STEPS = 3  # the first of them does not count
MOST_ROWS = 8
LEAST_PROBES = 40  # shorter runs are over before it is worth while to time anything


@dataclass(frozen=True)
class Expected:
    seconds: float
    basis: str  # what was timed

    def __str__(self) -> str:
        return f"about {duration(self.seconds)} on this machine ({self.basis})"


def is_worth_while(loads: Sequence[Load]) -> bool:
    """Whether so many samples take long enough to be foretold."""
    return len(loads) > 1 and sum(load.n_read for load in loads) >= LEAST_PROBES * PROBE


def words(n_left: int, n: int, limit: int | None) -> str:
    """How many samples there are, and how others are asked."""
    left = f"{n_left} sample{'s' * (n_left != 1)}" if n_left == n else f"{n_left} of {n} samples left"
    return f"{left} ({'limit=N asks fewer' if limit is None else f'limit={limit}'})"


def expect(model: Model, ids: Sequence[int], loads: Sequence[Load], bends: Bends, n_rows: int) -> Expected:
    """What the samples will take, from the first tokens of a prompt."""
    estimate, basis = timed(model, ids, loads, bends, n_rows)
    return Expected(sum(map(estimate.seconds, loads)), basis)


def timed(model: Model, ids: Sequence[int], loads: Sequence[Load], bends: Bends, n_rows: int) -> tuple[Estimate, str]:
    """An estimate that knows a short pass and a few steps, and the words for them."""
    n, few = min(PROBE, len(ids)), min(n_rows, MOST_ROWS)
    with model.hooked():
        prefill(model, ids[:WARM_UP])
        trace = prefill(model, ids[:n])
        step = step_of(model, trace, few)
        if n_rows > few:  # a further row costs what it does among few
            step += (n_rows - few) * max(0.0, step - step_of(model, trace, 1)) / (few - 1)
        trace.settle()
    estimate, probe = Estimate(loads, bends), Load(n, 0)
    estimate.reading.add(*estimate.reading_parts(probe), trace.seconds)
    estimate.step.add(*estimate.step_parts(probe), step)
    return estimate, f"{n} tokens were read in {trace.seconds:.2g} s just now, a step takes {step:.2g} s"


def step_of(model: Model, trace: Trace, n_rows: int) -> float:
    """Seconds of a step of so many rows of full attention."""
    rows = [full_attention(model.shape, trace.s_prompt).row(trace, N_STEPS + 1) for _ in range(n_rows)]
    for row in rows:
        for layer in model.shape.attention_layers:
            row.build(layer)
        row.complete()
    return min(decode(model, trace, rows, max_new_tokens=N_STEPS + 1).step_seconds[1:])
