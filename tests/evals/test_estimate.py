"""The time that is left, against runs whose length is known: made up and recorded."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from kvbench.engine.shapes import ModelShape
from kvbench.evals.screen.estimate import ANSWERING, PART, READING, Bends, Estimate, Load, bends_of

SHAPE = ModelShape("m", n_layers=30, h=9, h_kv=3, d_h=64, window=8192, attention_layers=tuple(range(30)), d_model=576)


@dataclass(frozen=True)
class Machine:
    """What things take there; `bend`: tokens at which attention takes as long as the rest of a layer."""

    token: float = 1e-3
    bend: float = 6000.0
    step: float = 0.06
    step_bend: float = 12000.0
    noise: float = 0.1
    warm_up: float = 0.0  # seconds, before the first sample


Said = tuple[int, float, float]  # samples done, seconds left as foretold, and in truth


def replay(estimate: Estimate, machine: Machine, used: Sequence[float], layers: int = 30, seed: int = 0) -> list[Said]:
    """Ask the samples with a clock of its own: what is said at every layer and step from the first sample's end on."""
    rng, now, said = random.Random(seed), machine.warm_up, []
    estimate.begin(0.0)

    def note() -> None:
        left = estimate.left(now)
        if left is not None:
            said.append((estimate.at, now, left))

    for load, share in zip(estimate.loads, used, strict=True):
        slow = rng.uniform(1 - machine.noise, 1 + machine.noise)
        estimate.stage(READING, layers, now)
        for _ in range(layers):
            now += slow * machine.token * load.n_read * (1 + load.n_read / machine.bend) / layers
            estimate.advance(now)
            note()
        estimate.stage(ANSWERING, load.n_new, now)
        for _ in range(max(1, round(share * load.n_new))):
            now += slow * machine.step * (1 + load.n_read / machine.step_bend)
            estimate.advance(now)
            note()
        estimate.sample_done(now)
        note()
    return [(at, left, now - then) for at, then, left in said]


def errors(said: Sequence[Said], since: int, least: float = 0.03) -> list[float]:
    """How far off it was, relative to the truth, while more than a little of the run was left."""
    whole = max(true for _, _, true in said)
    return [abs(left / true - 1) for at, left, true in said if at >= since and true > least * whole]


def needle_grid() -> list[Load]:
    return [Load(length, 24) for length in range(1000, 8001, 1000) for _ in range(11)]


def longbench(seed: int, shuffled: bool) -> tuple[list[Load], list[float]]:
    """Sixteen datasets of lengths and allowances as LongBench has them, and which share of it the answers take."""
    rng = random.Random(seed)
    means = (18000, 3600, 4600, 9100, 4900, 11200, 8700, 10600, 2100, 5200, 8200, 6300, 11100, 9300, 1200, 4200)
    allowed = (128, 128, 64, 32, 32, 32, 512, 512, 512, 64, 32, 128, 32, 32, 64, 64)
    drawn = []
    for mean, n_new in zip(means, allowed, strict=True):
        usual = rng.uniform(0.5, 1)
        for _ in range(6):
            n_read = int(mean * rng.uniform(0.4, 1.6))
            drawn.append((Load(n_read, n_new), min(1.0, usual * rng.uniform(0.8, 1.25))))
    if shuffled:
        rng.shuffle(drawn)
    return [load for load, _ in drawn], [share for _, share in drawn]


@pytest.mark.parametrize("factor", [0.6, 1.0, 1.5])
@pytest.mark.parametrize("warm_up", [0.0, 2.0])
def test_a_grid_of_needles_is_right_within_a_third_from_the_second_sample_on(factor: float, warm_up: float) -> None:
    """Short prompts come first, those of eight times their length decide, and attention is not as dear as foretold."""
    bends = bends_of(SHAPE)
    machine = Machine(bend=bends.reading * factor, step_bend=bends.step * factor, warm_up=warm_up)
    for seed in range(3):
        said = replay(Estimate(needle_grid(), bends), machine, [0.8] * 88, seed=seed)
        assert max(errors(said, since=2)) < 1 / 3


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_longbench_is_right_within_a_third_from_the_second_sample_on(seed: int, shuffled: bool) -> None:
    loads, used = longbench(seed, shuffled)
    said = replay(Estimate(loads, bends_of(SHAPE)), Machine(bend=9000), used, seed=seed)
    assert max(errors(said, since=2)) < 1 / 3


RECORDED = [  # tokens read, allowance, seconds of reading, steps, seconds of answering: one core of an AMD EPYC
    (839, 16, 1.3, 13, 1.55), (838, 16, 1.37, 9, 0.59), (1837, 16, 4.31, 9, 0.7), (1838, 16, 4.5, 9, 0.63),
    (3837, 16, 12.6, 13, 1.32), (3837, 16, 11.8, 9, 0.86), (7337, 16, 35.84, 14, 1.6), (7337, 16, 35.42, 10, 1.14),
]  # fmt: skip


def test_a_recorded_run_over_a_grid_of_needles_was_foretold_within_a_third() -> None:
    """Full, SnapKV and PQCache on SmolLM2-135M: two prompts each of 839 to 7,337 tokens."""
    estimate, now = Estimate([Load(n_read, n_new) for n_read, n_new, *_ in RECORDED], bends_of(SHAPE)), 0.0
    estimate.begin(now)
    said: list[Said] = []
    for _, n_new, reading, n_steps, answering in RECORDED:
        for kind, seconds, n, total in ((READING, reading, 30, 30), (ANSWERING, answering, n_steps, n_new)):
            estimate.stage(kind, total, now)
            for _ in range(n):
                now += seconds / n
                estimate.advance(now)
                said.append((estimate.at, now, estimate.left(now) or 0))
        estimate.sample_done(now)
        said.append((estimate.at, now, estimate.left(now) or 0))
    since_second = [(at, left, now - then) for at, then, left in said]
    assert max(errors(since_second, since=2)) < 1 / 3


def test_two_passes_over_each_prompt_are_learnt() -> None:
    """As where one variant has a prefill of its own."""
    estimate, now = Estimate([Load(1000, 10)] * 4), 0.0
    estimate.begin(now)
    said: list[tuple[float, float]] = []
    for _ in range(4):
        for _ in range(2):
            for kind, seconds in ((READING, 5.0), (ANSWERING, 2.0)):
                estimate.stage(kind, 10, now)
                for _ in range(10):
                    now += seconds / 10
                    estimate.advance(now)
                    if estimate.at:
                        said.append((now, estimate.left(now) or 0))
        estimate.sample_done(now)
    assert now == pytest.approx(56)
    assert all(left == pytest.approx(56 - at, rel=1 / 3) for at, left in said if at < 52)


def test_samples_without_stages_take_as_long_as_those_before() -> None:
    estimate = Estimate([Load(1, 0)] * 10)
    estimate.begin(100.0)
    for i in range(4):
        estimate.sample_done(102.0 + 2 * i)
    assert estimate.left(108.0) == pytest.approx(12)
    assert estimate.left(109.0) == pytest.approx(11)
    assert estimate.share(108.0) == pytest.approx(0.4)


def test_a_part_that_a_task_times_is_no_reading() -> None:
    """Latency's stages are passes of its own; longer prompts take longer all the same."""
    estimate = Estimate([Load(1000, 0), Load(1000, 0), Load(2000, 0)], Bends(4000, 8000))
    estimate.begin(0.0)
    for at in (10.0, 20.0):
        estimate.stage(PART, 3, at - 10)
        estimate.sample_done(at)
    assert estimate.left(20.0) == pytest.approx(10 * 2 * 1.5 / 1.25)


def test_nothing_is_said_before_anything_was_measured_and_the_bar_moves_all_the_same() -> None:
    estimate = Estimate([Load(1000, 10)] * 2)
    estimate.begin(0.0)
    shares: list[float] = []
    for kind in (READING, ANSWERING):
        estimate.stage(kind, 10, 1.0)
        for _ in range(10):
            estimate.advance(2.0)
            assert estimate.left(2.0) is None
            shares.append(estimate.share(2.0))
    assert shares == sorted({*shares})
    assert shares[-1] == pytest.approx(0.5)
    estimate.advance(2.0)  # a continuation that is fed may be longer than the allowance
    assert estimate.share(2.0) == pytest.approx(0.5)


def test_a_run_that_has_nothing_to_do_is_done() -> None:
    estimate = Estimate([])
    estimate.begin(0.0)
    assert estimate.share(0.0) == 1.0
