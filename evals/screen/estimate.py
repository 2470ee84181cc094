"""How long a run will still take, from what its samples have taken so far.

A sample reads its prompt, then answers. Reading s tokens costs `a * s + b * s * s` seconds; answering, so many steps of
`c + d * s` each. Where attention begins to outweigh the rest is foretold from the model's shape, so that one sample is
enough for a first estimate; samples of other lengths correct it. How many of the tokens that it may generate an answer
uses is learnt as well, apart for each allowance, because a summary's answers say little of a choice's.

Within a sample, the layers read and the steps made take the place of what was foretold, the more the further it is.

Not here: the clock and the bar (`evals/screen/progress.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvbench.engine.shapes import ModelShape

USED = 0.75  # of its allowance, an answer before any was seen: of several variants the longest counts
STEP_TOKENS = 60  # tokens that are read in the time of a step, before either was seen
SPREAD = 0.04  # how far a sample's time strays from its cost, relative to how far the foretold bend may be off; squares
FADING = 0.93  # what a sample counts for when the next one has ended
READING, ANSWERING, PART = KINDS = ("reading", "answering", "part")
WARM_UP = 0.25  # what the first sample counts for when there are others: it waits for compilers and allocators


@dataclass(frozen=True)
class Load:
    """A sample that waits: tokens to read, and tokens that may follow."""

    n_read: int
    n_new: int


@dataclass(frozen=True)
class Bends:
    """Tokens in the prompt at which attention takes as long as all else."""

    reading: float = 8000.0
    step: float = 16000.0


def bends_of(shape: ModelShape) -> Bends:
    """Lengths at which costs bend, by arithmetic and by bytes: about 12 d² weights a layer; attention at half speed."""
    if not shape.d_model:
        return Bends()
    weights = 12 * shape.d_model**2
    return Bends(weights / (2 * shape.h * shape.d_h), weights / (shape.h_kv * shape.width))


class Line:
    """Seconds as an even and a growing part, each with a rate of its own once samples tell the two apart."""

    def __init__(self) -> None:
        self.points: list[tuple[float, float, float]] = []  # even part, growing part, seconds
        self.rates: tuple[float, float] | None = None

    def add(self, even: float, growing: float, seconds: float) -> None:
        """Learn what a sample took."""
        if seconds > 0:
            self.points.append((even, growing, seconds))
            self.rates = self.fitted()

    def fitted(self) -> tuple[float, float]:
        """Least squares of the relative errors; `SPREAD` draws the two rates to each other."""
        n = len(self.points)
        weights = [FADING ** (n - 1 - i) * (WARM_UP if i == 0 and n > 1 else 1) for i in range(n)]
        pairs = [*zip(weights, self.points, strict=True)]
        rate = sum(w * y / (e + g) for w, (e, g, y) in pairs) / sum(weights)
        aa = bb = SPREAD
        ab, a1, b1 = -SPREAD, 0.0, 0.0
        for w, (e, g, y) in pairs:
            a, b = rate * e / y, rate * g / y
            aa, ab, bb, a1, b1 = aa + w * a * a, ab + w * a * b, bb + w * b * b, a1 + w * a, b1 + w * b
        determinant = aa * bb - ab * ab
        u, v = (bb * a1 - ab * b1) / determinant, (aa * b1 - ab * a1) / determinant
        if u < 0:
            u, v = 0.0, b1 / bb
        elif v < 0:
            u, v = a1 / aa, 0.0
        return rate * u, rate * v

    def __call__(self, even: float, growing: float) -> float:
        assert self.rates is not None, "nothing was measured"
        return self.rates[0] * even + self.rates[1] * growing


@dataclass
class Present:
    """The sample that is asked now."""

    begun: float
    since: float  # when its stage began
    kind: str = READING
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))  # in stages that have ended
    units: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))  # made in all of its stages
    total: int = 0  # units of this stage; 0: it has not begun
    done: int = 0  # of them
    moved: float = 0.0  # when the last one was made
    n_reads: int = 0  # passes over the prompt that have ended
    is_learnt: bool = False  # how long reading took

    def spent(self, kind: str, now: float) -> float:
        return self.seconds[kind] + (now - self.since if kind == self.kind else 0.0)


class Estimate:
    """Estimates the seconds of the samples that wait, in their order; every call says what time it is."""

    def __init__(self, loads: Sequence[Load], bends: Bends | None = None) -> None:
        self.loads, self.bends = loads, bends or Bends()
        self.at = 0  # which of them is asked now
        self.reading, self.step = Line(), Line()
        self.used: dict[int, list[float]] = {}  # shares of an allowance that answers took, by allowance
        self.n_reads = 1  # passes over a prompt: variants with a prefill of their own take another
        self.later: float | None = None  # seconds of the samples after the present one, until something is learnt

    def begin(self, now: float) -> None:
        self.started = now
        self.present = Present(now, now)

    def stage(self, kind: str, total: int, now: float) -> None:
        """The present sample begins to read, to answer, or a part of which nothing is known."""
        present = self.present
        self.leave_stage(now)
        present.kind, present.total, present.done, present.moved = kind, total, 0, now

    def advance(self, now: float) -> None:
        """A layer was read, or a step made."""
        self.present.done += 1
        self.present.units[self.present.kind] += 1
        self.present.moved = now

    def leave_stage(self, now: float) -> None:
        present = self.present
        present.seconds[present.kind] += now - present.since
        present.since = now
        if present.kind == READING and present.total:
            present.n_reads += 1
            if present.n_reads == self.n_reads and self.at:
                self.learn_reading()

    def learn_reading(self) -> None:
        if self.at < len(self.loads) and not self.present.is_learnt:
            self.reading.add(*self.reading_parts(self.loads[self.at]), self.present.seconds[READING])
            self.present.is_learnt, self.later = True, None

    def sample_done(self, now: float) -> None:
        """The present sample has ended, and the next one begins."""
        present = self.present
        self.leave_stage(now)
        if self.at < len(self.loads) and present.n_reads:
            load, n_steps = self.loads[self.at], present.units[ANSWERING]
            self.n_reads = present.n_reads
            self.learn_reading()
            if n_steps:
                self.step.add(*self.step_parts(load), present.seconds[ANSWERING] / n_steps)
            if load.n_new:
                self.used.setdefault(load.n_new, []).append(n_steps / load.n_new)
        self.at, self.present, self.later = self.at + 1, Present(now, now), None

    def left(self, now: float) -> float | None:
        """Seconds until the last sample ends; None before the first one has."""
        if self.at == 0:
            return None
        if self.at >= len(self.loads):
            return 0.0
        if self.reading.rates is None:  # no stages are told: as the samples before, by what they were foretold to cost
            costs = [self.cost(load) for load in self.loads]
            rate = (self.present.begun - self.started) / sum(costs[: self.at])
            return max(rate * sum(costs[self.at :]) - (now - self.present.begun), 0.0)
        if self.later is None:
            self.later = sum(map(self.seconds, self.loads[self.at + 1 :]))
        return self.later + self.rest(self.loads[self.at], now)

    def share(self, now: float) -> float:
        """Which part of the work is done, 0 to 1."""
        left, elapsed = self.left(now), now - self.started
        if left is not None:
            return elapsed / (elapsed + left) if elapsed + left > 0 else 1.0
        if not self.loads:
            return 1.0
        first, present = self.loads[0], self.present
        made = 0.0
        if present.total:
            part = min(1.0, present.done / present.total)  # a fed continuation may be longer
            reading, answering = self.cost(Load(first.n_read, 0)), self.cost(first)
            made = part * reading if present.kind == READING else reading + part * (answering - reading)
        return made / sum(map(self.cost, self.loads))

    # --- what a sample takes ---

    def reading_parts(self, load: Load) -> tuple[float, float]:
        return load.n_read, load.n_read**2 / self.bends.reading

    def step_parts(self, load: Load) -> tuple[float, float]:
        return 1.0, load.n_read / self.bends.step

    def cost(self, load: Load) -> float:
        """A sample's cost in tokens read, before anything was measured."""
        return sum(self.reading_parts(load)) + USED * load.n_new * STEP_TOKENS * sum(self.step_parts(load))

    def n_steps(self, load: Load) -> float:
        """How many steps the answer is likely to take."""
        everyone = [share for shares in self.used.values() for share in shares]
        usual = (sum(everyone) + 2 * USED) / (len(everyone) + 2)
        alike = self.used.get(load.n_new, [])
        return load.n_new * (sum(alike) + usual) / (len(alike) + 1)

    def seconds(self, load: Load) -> float:
        """Seconds of a whole sample."""
        answering = self.n_steps(load) * self.step(*self.step_parts(load)) if self.step.rates else 0.0
        return self.reading(*self.reading_parts(load)) + answering

    def rest(self, load: Load, now: float) -> float:
        """Seconds left of the present sample: foretold, and as it went so far, which counts more and more."""
        present = self.present
        is_reading, n = present.kind == READING, present.units[ANSWERING]
        part = present.done / present.total if is_reading and present.total else 0.0
        read = min(1.0, (present.n_reads + part) / max(self.n_reads, present.n_reads + is_reading))
        spent, foretold = present.spent(READING, now), self.reading(*self.reading_parts(load))
        reading = (1 - read) * ((1 - read) * foretold + spent) if read else max(foretold - spent, 0.0)
        if not self.step.rates:
            return reading
        steps, foretold = self.n_steps(load), self.step(*self.step_parts(load))
        part = min(1.0, n / steps) if steps else 1.0
        step = (1 - part) * foretold + part * present.spent(ANSWERING, present.moved) / n if n else foretold
        ahead = max(steps - n, min(1 + n / 10, load.n_new - n), 0.0)  # it may be longer than most
        waited = 0.0 if is_reading else min(now - present.moved, step)
        return reading + max(ahead * step - waited, 0.0)
