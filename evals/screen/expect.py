"""How long samples take, said before the first one is asked: from a short pass and a few steps that are timed now.

    seconds = (tokens read * seconds of one + steps * seconds of one) * (1 + tokens read / 6 d)

The last factor is attention's: a layer multiplies a token with about 12 d² weights, and with d numbers for each token
of the prompt, at half the speed. Steps are timed with as many rows of full attention as there are variants, or with a
few and laid on more of them; what methods do besides is not in it.

Not here: the time that is left while samples are asked (`evals/screen/progress.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvbench.engine.decode import decode
from kvbench.engine.model import Model
from kvbench.engine.passes.trace import Trace
from kvbench.engine.prefill import prefill
from kvbench.evals.prepare import Load
from kvbench.evals.screen.progress import duration
from kvbench.methods.full import full_attention

PROBE = 256  # tokens; reading them takes 0.5 s of the embedded model on two cores
WARM_UP = 16  # tokens of a pass whose time does not count: it waits for compilers and allocators
N_STEPS = 3  # the first of them does not count
MOST_ROWS = 8
LEAST_PROBES = 40  # shorter runs are over before it is worth while to time anything


@dataclass(frozen=True)
class Pace:
    """What a model takes; where nothing was timed, in the time of a token that is read."""

    d_model: int
    token: float = 1.0  # read in a short prompt
    step: float = 60.0  # of all variants
    n_timed: int = 0  # tokens

    def work(self, load: Load) -> tuple[float, float]:
        """What it takes to read a sample's prompt, and to answer."""
        by_length = 1 + load.n_read / (6 * (self.d_model or 1024))
        return self.token * load.n_read * by_length, self.step * load.n_steps * by_length

    def words(self, loads: Sequence[Load]) -> str:
        seconds = sum(sum(self.work(load)) for load in loads)
        return (
            f"about {duration(seconds)} on this machine ({self.n_timed} tokens were read in "
            f"{self.n_timed * self.token:.2g} s just now, a step takes {self.step:.2g} s)"
        )


def is_worth_while(loads: Sequence[Load]) -> bool:
    """Whether so many samples take long enough to be timed before."""
    return len(loads) > 1 and sum(load.n_read for load in loads) >= LEAST_PROBES * PROBE


def how_many(n_left: int, n: int) -> str:
    return f"{n_left} sample{'s' * (n_left != 1)}" if n_left == n else f"{n_left} of {n} samples left"


def timed(model: Model, ids: Sequence[int], n_rows: int) -> Pace:
    """What the model takes now to read the first tokens of a prompt, and for steps of so many variants."""
    n, few = min(PROBE, len(ids)), min(n_rows, MOST_ROWS)
    with model.hooked():
        prefill(model, ids[:WARM_UP])
        trace = prefill(model, ids[:n])
        step = step_of(model, trace, few)
        if n_rows > few:  # a further row costs what it does among few
            step += (n_rows - few) * max(0.0, step - step_of(model, trace, 1)) / (few - 1)
        trace.settle()
    return Pace(model.shape.d_model, trace.seconds / n, step, n)


def step_of(model: Model, trace: Trace, n_rows: int) -> float:
    """Seconds of a step of so many rows of full attention."""
    rows = [full_attention(model.shape, trace.s_prompt).row(trace, N_STEPS + 1) for _ in range(n_rows)]
    for row in rows:
        for layer in model.shape.attention_layers:
            row.build(layer)
        row.complete()
    return min(decode(model, trace, rows, max_new_tokens=N_STEPS + 1).step_seconds[1:])
