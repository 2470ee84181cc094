"""How many rounds of k-means fit into a layer's prefill: PQCache's adaptive bound, from times measured once.

Clustering s vectors with T rounds takes a1 + b1 * s * T seconds (Eq. 1), a layer's prefill a2 + b2 * s + g2 * s^2
(Eq. 2); where both take as long, T is the bound (Eq. 3). The authors' code has a line in s for three rounds and one
for each further round instead of Eq. 1. Coefficients are least squares of measured times.

A profile per machine, model, quantiser and number of threads lies in the user's cache folder. Times of clustering are
measured when a profile is made; times of layers are those of the first prompts that differ in length. Until there are
`N_LENGTHS` of them, a layer gets as many rounds as fit into the time that the layer below it took.

A profile measured while the machine was busy is best deleted; the next run measures anew.

Not here: clustering itself (`kernels/pq_fit.py`), and who asks (`methods/retrieving/pqcache.py`).
"""

import json
import logging
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from statistics import median
from tempfile import NamedTemporaryFile
from time import perf_counter
from typing import Any, NamedTuple

import torch

from kvbench.engine.books.stopwatch import between, now
from kvbench.engine.checkpoints.digests import cache_home
from kvbench.engine.shapes import ModelShape
from kvbench.kernels.pq_fit import pq_fit

logger = logging.getLogger(__name__)

LOWEST, HIGHEST = 3, 300  # as the authors clip
LENGTHS, ROUNDS = (1024, 2048, 4096, 8192), (3, 9)  # of the times that are measured
N_LENGTHS = 3  # prompts that Eq. 2 needs; each at least a tenth longer or shorter than the others


class Line(NamedTuple):
    intercept: float
    slope: float

    def at(self, x: float) -> float:
        return self.intercept + self.slope * x


class Parabola(NamedTuple):
    constant: float
    linear: float
    square: float

    def at(self, x: float) -> float:
        return self.constant + self.linear * x + self.square * x * x


def fit_line(x: Sequence[float], seconds: Sequence[float]) -> Line:
    """Least squares on (1, x); Eq. 1 where x is s * T."""
    return Line(*least_squares([[1.0] * len(x), x], seconds))


def fit_parabola(s: Sequence[float], seconds: Sequence[float]) -> Parabola:
    """Least squares on (1, s, s^2): Eq. 2."""
    return Parabola(*least_squares([[1.0] * len(s), s, [float(x) * x for x in s]], seconds))


def least_squares(columns: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Coefficients; columns are scaled to one another first, since s^2 is a hundred million times as large as 1."""
    import numpy as np  # slow to import, and a refused command measures nothing

    scales = [float(max(map(abs, column))) or 1.0 for column in columns]
    matrix = np.stack([np.asarray(column, float) / scale for column, scale in zip(columns, scales, strict=True)], 1)
    solution = np.linalg.lstsq(matrix, np.asarray(seconds, float), rcond=None)[0]
    return [float(value / scale) for value, scale in zip(solution, scales, strict=True)]


def rounds_by_line(s: int, layer_s: float, clustering: Line) -> float:
    """Eq. 3, unclipped; `clustering` is seconds over s * T."""
    return (layer_s - clustering.intercept) / (clustering.slope * s)


def rounds_by_two_lines(s: int, layer_s: float, three: Line, each: Line) -> float:
    """The authors' form, unclipped; seconds of three rounds and of each further one, both over s."""
    return (layer_s - three.at(s)) / each.at(s) + 3


def clipped(rounds: float, lowest: int = LOWEST, highest: int = HIGHEST) -> int:
    """Rounds without their fraction, and within bounds."""
    return int(min(max(rounds, lowest), highest))


# Measured times.


@dataclass
class Profile:
    """Times of one machine, model and quantiser; `path` is where they are kept."""

    path: Path
    clustering: list[tuple[int, int, float]]  # vectors, rounds, seconds
    layers: list[tuple[int, float]] = field(default_factory=list)  # vectors, seconds of a layer

    @property
    def is_complete(self) -> bool:
        return len(self.layers) >= N_LENGTHS

    def rounds(self, s: int, layer_s: float | None, two_lines: bool) -> int:
        """The bound for s vectors; `layer_s` is what the layer below took, used until the profile is complete."""
        if self.is_complete:
            layer_s = fit_parabola(*zip(*self.layers, strict=True)).at(s)
        if layer_s is None:
            return LOWEST
        tiny = 1e-12  # noise must not make a slope negative
        if two_lines:
            few, many = (
                {n: seconds for n, rounds, seconds in self.clustering if rounds == wanted} for wanted in ROUNDS
            )
            lengths = sorted(few)
            three = fit_line(lengths, [few[n] for n in lengths])
            more = ROUNDS[1] - ROUNDS[0]
            each = fit_line(lengths, [(many[n] - few[n]) / more for n in lengths])
            return clipped(rounds_by_two_lines(s, layer_s, three, each) if each.at(s) > tiny else HIGHEST)
        line = fit_line([n * rounds for n, rounds, _ in self.clustering], [t for *_, t in self.clustering])
        line = Line(line.intercept, max(line.slope, tiny))
        return clipped(rounds_by_line(s, layer_s, line))

    def add_layer(self, s: int, seconds: float) -> None:
        """Take in the time of a layer, unless there are enough or one of about this length; keep the profile."""
        if self.is_complete or any(abs(s - other) < 0.1 * other for other, _ in self.layers):
            return
        self.layers.append((s, seconds))
        self.save()

    def save(self) -> None:
        """Write the file as a whole or not at all; where it cannot be kept, times are taken again next time."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with NamedTemporaryFile("w", dir=self.path.parent, suffix=".tmp", delete=False) as file:
                json.dump({"clustering": self.clustering, "layers": self.layers}, file)
            Path(file.name).replace(self.path)
        except OSError as error:
            logger.warning("times of clustering are not kept for the next run: %s", error)


def profile_of(shape: ModelShape, device: torch.device, m: int, b: int, n_threads: int) -> Profile:
    """The profile in the cache folder, or a new one with times of clustering."""
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    machine = (
        *(platform.node(), platform.machine(), where, os.cpu_count(), torch.__version__),
        *(shape.name, shape.h_kv, shape.d_h, m, b, n_threads, torch.get_num_threads()),
    )
    key = sha256(json.dumps(machine).encode()).hexdigest()[:16]
    path = cache_home() / "profiles" / f"pqcache-{key}.json"
    if (kept := read_profile(path)) is not None:
        return kept
    profile = Profile(path, clustering_times(shape.h_kv * m, shape.d_h // m, 1 << b))
    profile.save()
    return profile


def read_profile(path: Path) -> Profile | None:
    """The profile that is kept; None where there is none, or none that can be read."""
    try:
        kept = json.loads(path.read_text())
        clustering = [(int(n), int(rounds), float(t)) for n, rounds, t in kept["clustering"]]
        return Profile(path, clustering, [(int(n), float(t)) for n, t in kept["layers"]])
    except (OSError, ValueError, OverflowError, RecursionError, LookupError, TypeError):
        return None  # the times are taken again


def clustering_times(p: int, d_m: int, c: int) -> list[tuple[int, int, float]]:
    """Seconds to cluster random vectors, the better of two tries."""
    draw = torch.Generator().manual_seed(0)
    times = []
    for n in (n for n in LENGTHS if n > c):
        points = torch.randn(p, n, d_m, generator=draw)
        first = torch.randperm(n, generator=draw)[:c]
        for n_rounds in ROUNDS:
            tries = [
                seconds_of(lambda: pq_fit(points, first, n_rounds, tol=0.0))  # noqa: B023
                for _ in range(2)
            ]
            times.append((n, n_rounds, min(tries)))
    return times


def seconds_of(work: Callable[[], Any]) -> float:
    start = perf_counter()
    work()
    return perf_counter() - start


class Clock:
    """How long the layers of a pass take: from the end of one layer's building to the start of the next one's.

    What other methods build in between counts as the layer's own.
    """

    def __init__(self) -> None:
        self.left: Any = None  # when the last layer was built
        self.device: torch.device | None = None  # where
        self.layer: int | None = None
        self.gaps: list[tuple[Any, Any]] = []

    def enter(self, layer: int, device: torch.device) -> None:
        """A variant begins to build the layer; only the first one ends a gap. From one GPU to another there is none."""
        if layer != self.layer:
            if self.device == device:
                self.gaps.append((self.left, now(device)))
            self.layer, self.device = layer, device

    def leave(self) -> None:
        assert self.device is not None, "no layer was entered"
        self.left = now(self.device)

    def latest(self) -> float | None:
        """Seconds of the layer below, where they are known without waiting."""
        if not self.gaps or not isinstance(self.left, float):
            return None
        return between(*self.gaps[-1])

    def middle(self) -> float | None:
        """Median seconds of a layer; waits for a GPU."""
        if not self.gaps:
            return None
        for _, stop in self.gaps:
            if not isinstance(stop, float):
                stop.synchronize()
        return median(between(start, stop) for start, stop in self.gaps)
