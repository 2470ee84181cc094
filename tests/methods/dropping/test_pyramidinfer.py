from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvbench.engine.budget import Budget, resolve
from kvbench.engine.decode import decode
from kvbench.engine.errors import ConfigError
from kvbench.engine.observe import MeanWeights
from kvbench.engine.passes.trace import Trace
from kvbench.engine.prefill import prefill
from kvbench.engine.shapes import ModelShape
from kvbench.engine.softmax import Softmax
from kvbench.kernels.column_sums import column_sums
from kvbench.methods.dropping.pyramidinfer import (
    Course,
    Generated,
    PyramidInfer,
    fit_course,
    n_of_block,
    rising_weights,
)
from kvbench.methods.full import Full
from kvbench.tests.tiny import prompt, tiny
from kvbench.tests.vectors import Check, built, differs, first, request, row_for

PARAMS = PyramidInfer.Params(None, None, None, None, 4, 1, 1.2, False)
PUBLISHED = PyramidInfer.Params("cosine", Fraction(9, 10), Fraction(1, 5), 64, 4, 1, 1.2, False)
ROOT = Path(__file__).parents[2] / "golden" / "pyramidinfer"
GOLDEN = sorted(ROOT.glob("prefill_*.npz"))
BLOCKS = sorted(ROOT.glob("decode_block_*.npz"))


def run_vectors(path: Path) -> list[Check]:
    """Who goes on after each layer, by the attention rows that the authors' code computed there."""
    with np.load(path) as file:
        x = {name: file[name] for name in file.files}
    schedule = {"cosine": "cosine", "linear": "constant", "constant": "constant"}
    course = PyramidInfer.Plan(
        s=int(x["input_len"]),
        n_layers=int(x["num_layers"]),
        tail=1 + int(x["recent_length"]),
        min_context=int(x["min_context_length"]),
        sinks=int(x["sink_len"]),
        interval=int(x["interval"]),
        distance_weight=float(x["distance_weight"]),
        schedule=schedule[str(x["strategy"])],
        decay=float(x["prefill_decay_ratio"]),
    )
    problem = first(
        differs("tokens per layer", course.lengths(), x["kept_per_layer"]),
        differs("cached per layer", course.lengths(), x["kv_len_per_layer"]),
    )
    rising = rising_weights(course.tail, course.distance_weight)
    for layer in range(course.n_layers - 1):
        positions = x[f"positions_L{layer}"]
        rows = torch.from_numpy(x[f"attn_recent_L{layer}"]).mean(0)  # (1 + rec, n)
        going_on = np.arange(len(positions))
        if course.n_going_on(layer, len(positions)) < len(positions) - course.tail:
            going_on = Course(course).survivors(layer, rising @ rows / course.tail).numpy()
        problem = problem or differs(
            f"positions of layer {layer + 1}", positions[going_on], x[f"positions_L{layer + 1}"]
        )
    return [(path.stem, problem)]


def run_block_vectors(path: Path) -> list[Check]:
    """Which generated tokens stay at each step, by the attention rows of an independent reference."""
    with np.load(path) as file:
        x = {name: file[name] for name in file.files}
    tail, layer, n_layers = 1 + int(x["recent_length"]), int(x["layer"]), int(x["num_layers"])
    block, share = int(x["exceed_length"]), float(x["gen_compress_ratio"])
    n_stay = n_of_block(block, share, float(x["gen_decay_ratio"]), layer, n_layers)
    problem = differs("topk", n_stay, x["topk"])
    rows, base = torch.from_numpy(x["recent_rows_after_prefill"]), int(x["prompt_cached"])
    said = Generated(rows, base, block, n_stay, float(x["distance_weight"]))
    positions = np.arange(int(x["prompt_cached"]))
    for t, row in enumerate(x["decode_attn_rows"]):
        positions = np.append(positions, int(x["prompt_cached"]) + t)
        said.take(torch.from_numpy(row[np.isfinite(row)]), tail)
        stay = said.stay(tail)
        if stay is not None:
            positions = positions[stay.numpy()]
        expected = x["cached_positions_after_step"][t]
        problem = problem or first(
            differs(f"compressed at step {t}", stay is not None, x["compressed_at_step"][t]),
            differs(f"cached after step {t}", positions, expected[expected >= 0]),
        )
    return [(path.stem, problem)]


@pytest.mark.parametrize("path", BLOCKS, ids=lambda path: path.stem)
def test_generated_tokens_are_compressed_as_in_reference_vectors(path: Path) -> None:
    assert [problem for _, problem in run_block_vectors(path)] == [None]


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_pyramidinfer_agrees_with_reference_vectors(path: Path) -> None:
    assert [problem for _, problem in run_vectors(path)] == [None]


def read(kind: str, s: int, course: PyramidInfer.Plan | None, seed: int = 0) -> Trace:
    model = tiny(kind)
    with model.hooked():
        return prefill(model, prompt(s, seed), pruning=PyramidInfer.pruning(course))


def course_for(s: int, share: float, n_layers: int, **changes: Any) -> PyramidInfer.Plan:
    return fit_course(replace(PARAMS, **changes), s, int(s * share), n_layers)


@pytest.mark.parametrize("kind", ["llama", "llama-yarn", "qwen2", "qwen3", "mistral", "glm", "opt"])
def test_tokens_that_left_are_as_if_they_had_never_been_there(kind: str) -> None:
    """In every layer: K of survivors only, at their positions, from a pass that is written out here by hand."""
    model = tiny(kind)
    course = course_for(120, 0.6, model.shape.n_layers)
    trace = read(kind, 120, course)
    ids = torch.tensor([prompt(120)])
    lengths = course.lengths()
    assert lengths[-1] < 120
    for layer in range(model.shape.n_layers):
        assert trace.keys(layer).shape[2] == trace.values(layer).shape[2] == lengths[layer]
    # A second pass whose attention hides, from each layer on, every token that left before it: the same K of survivors.
    hidden = Hiding(trace, 120)
    with model.hooked():
        logits = model.forward(ids, 0, model.new_cache(), hidden)[0]
    assert trace.logits is not None
    torch.testing.assert_close(trace.logits, logits, rtol=1e-4, atol=1e-4)
    for layer, (k, v) in hidden.seen.items():
        kept = trace.positions.get(layer, torch.arange(120))
        torch.testing.assert_close(trace.keys(layer), k[:, :, kept], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(trace.values(layer), v[:, :, kept], rtol=1e-4, atol=1e-4)


class Hiding:
    """All tokens stay in the pass, and those that had left are hidden as keys."""

    def __init__(self, trace: Trace, s: int) -> None:
        self.trace, self.s = trace, s
        self.seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax: Softmax, window: Any
    ) -> torch.Tensor:
        self.seen[layer] = (k, v)
        visible = torch.zeros(self.s, dtype=torch.bool)
        visible[self.trace.positions.get(layer, torch.arange(self.s))] = True
        mask = torch.ones(self.s, self.s, dtype=torch.bool).tril() & visible
        mask |= torch.eye(self.s, dtype=torch.bool)  # whoever left still needs a row
        g = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(g, 1), v.repeat_interleave(g, 1)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=softmax.scale)


def test_votes_are_the_mean_over_heads_of_weighted_attention() -> None:
    draw = torch.Generator().manual_seed(3)
    q, k = (torch.randn(1, heads, 90, 16, generator=draw) for heads in (6, 2))
    course = course_for(90, 0.5, 6, schedule="constant")
    logits = q.double() @ k.double().repeat_interleave(3, 1).mT * 0.25
    future = torch.ones(90, 90, dtype=torch.bool).triu(1)
    rows = logits.masked_fill(future, -torch.inf).softmax(-1).mean(1)[0, -course.tail :]
    rising = torch.linspace(1, 1.2, course.tail, dtype=torch.float64).unsqueeze(1)
    votes = (rows * rising).mean(0)
    votes[:4] = torch.inf
    best = votes[: 90 - course.tail].topk(course.n_going_on(0, 90)).indices.sort().values
    ours = Course(course).going_on(0, q, k, Softmax(0.25))
    assert ours is not None
    assert ours.tolist() == [*best.tolist(), *range(90 - course.tail, 90)]


def test_weighted_sums_of_the_last_rows_do_not_depend_on_the_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draw = torch.Generator().manual_seed(5)
    q, k = (torch.randn(1, heads, 64, 8, generator=draw) for heads in (4, 2))
    weights = torch.rand(30, generator=draw)
    whole = column_sums(q[:, :, -30:], k, 0.3, weights)
    monkeypatch.setattr("kvbench.kernels.column_sums.COLUMN_BLOCK_BYTES", 4 * 2 * 64 * 7)  # blocks of 7 rows
    torch.testing.assert_close(column_sums(q[:, :, -30:], k, 0.3, weights), whole)
    assert whole.sum(-1).allclose(weights.sum().double(), rtol=1e-5)


@pytest.mark.parametrize("ratio", ["0.75", "0.5", "0.4", "0.3", "0.2", "0.1"])
@pytest.mark.parametrize(("s", "n_layers"), [(2000, 30), (8000, 32)])
def test_the_mean_over_layers_meets_the_budget(ratio: str, s: int, n_layers: int) -> None:
    tokens = int(Fraction(ratio) * s)
    lengths = fit_course(PARAMS, s, tokens, n_layers).lengths()
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == s
    mean = sum(lengths) / n_layers
    assert 0.99 * tokens - 1 <= mean <= tokens, "whole numbers of tokens cost less than a hundredth"


def test_the_published_setting_keeps_three_quarters() -> None:
    """Figures of the method's page: 0.766 of the tokens at 32 layers and 8,000 tokens, 0.38 in the last layer."""
    lengths = fit_course(PUBLISHED, 8000, 1, 32).lengths()
    assert sum(lengths) / (8000 * 32) == pytest.approx(0.766, abs=0.001)
    assert lengths[31] / 8000 == pytest.approx(0.38, abs=0.005)
    assert lengths[:2] == [8000, 8000]


@pytest.mark.parametrize(("recent", "floor"), [("0.2", 0.470), ("0.1", 0.399), ("0.05", 0.366)])
def test_the_cosine_has_a_floor(recent: str, floor: float) -> None:
    params = replace(PUBLISHED, decay=Fraction(0), recent_ratio=Fraction(recent))
    lengths = fit_course(params, 8000, 1, 32).lengths()
    assert sum(lengths) / (8000 * 32) == pytest.approx(floor, abs=0.002)


def test_small_budgets_take_one_share_for_all_layers() -> None:
    assert fit_course(PARAMS, 4000, 2800, 32).schedule == "cosine"
    assert fit_course(PARAMS, 4000, 800, 32).schedule == "constant"


def test_equal_courses_share_a_prefill_and_others_do_not() -> None:
    shape = ModelShape("m", 30, 9, 3, 64, 8192, tuple(range(30)))
    courses = [
        PyramidInfer.pruning(PyramidInfer.plan_for(PARAMS, budget(ratio, 4000), shape))
        for ratio in ("0.5", "0.5", "0.4", "1")
    ]
    assert courses[0] == courses[1] != courses[2]
    assert hash(courses[0]) == hash(courses[1])
    assert courses[3] is None, "with the whole budget nobody leaves"


def budget(ratio: str, s: int) -> Budget:
    return resolve(request(ratio), s, drops=True)


def test_a_course_that_lets_all_go_on_answers_as_full_attention() -> None:
    model = tiny("llama")
    all_go_on = PyramidInfer.Plan(100, 3, 10, 64, 4, 1, 1.2, "constant", 1.0)
    trace = read("llama", 100, all_go_on)
    assert trace.positions == {}
    row = row_for(PyramidInfer, PARAMS, request(tokens=80), trace, 12)
    row.plan = all_go_on
    rows = [built(row), built(row_for(Full, Full.Params(), request("1"), trace, 12))]
    with model.hooked():
        ours, full = decode(model, trace, rows, max_new_tokens=12).answers
    assert ours.ids == full.ids


def test_generated_tokens_are_thinned_in_blocks_and_the_books_know() -> None:
    """Against a second account of the same rows: sizes, positions and the ledger at every step and layer."""
    model, s, n_new = tiny("llama"), 90, 60
    params = replace(PARAMS, compress_generated=True, recent_ratio=Fraction(1, 20))
    course = fit_course(params, s, 60, model.shape.n_layers)
    observations = PyramidInfer.observations(params, course)
    with model.hooked():
        trace = prefill(model, prompt(s), observations, pruning=Course(course))
    row = built(row_for(PyramidInfer, params, request(tokens=60), trace, n_new))
    expected = {layer: course.lengths()[layer] for layer in range(3)}
    base = dict(expected)

    def look(step: int, speaking: int) -> None:
        for layer, stay in enumerate(n_of_block(16, 0.9, 0.1, layer, 3) for layer in range(3)):
            attended = row.store.attended(layer)
            expected[layer] += 1
            entry = row.store.ledger.entries[-3 + layer]
            assert (entry.layer, entry.attended) == (layer, int(attended.sum()))
            assert int(attended[0].sum()) == expected[layer]
            assert attended[:, -course.tail :].all()
            positions = row.store[layer].positions()[0, 0]
            assert (positions.diff() > 0).all()
            if expected[layer] - (course.tail - 1) - base[layer] >= 16:
                expected[layer] -= 16 - stay
                base[layer] = expected[layer] - (course.tail - 1)
            assert len(positions) == expected[layer]

    with model.hooked():
        decode(model, trace, [row], max_new_tokens=n_new, on_step=look)
    assert row.store[0].n_seen - expected[0] > 2 * 2


def test_rows_of_the_last_queries_are_means_over_heads() -> None:
    draw = torch.Generator().manual_seed(7)
    q, k = (torch.randn(1, heads, 40, 8, generator=draw) for heads in (6, 2))
    logits = q.double() @ k.double().repeat_interleave(3, 1).mT * 0.5
    future = torch.ones(40, 40, dtype=torch.bool).triu(1)
    expected = logits.masked_fill(future, -torch.inf).softmax(-1).mean(1)[0, -9:]
    rows = MeanWeights(9).observe(q, k, Softmax(0.5)).double()
    torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-6)


def test_short_answers_are_not_watched() -> None:
    trace = read("llama", 90, fit_course(PARAMS, 90, 60, 3))
    params = replace(PARAMS, compress_generated=True)
    assert not row_for(PyramidInfer, params, request(tokens=60), trace, 16).wants_weights
    assert row_for(PyramidInfer, params, request(tokens=60), trace, 60).wants_weights


def test_a_budget_below_the_first_layer_is_refused_with_what_works() -> None:
    with pytest.raises(ConfigError, match=r"3 layers.*use ratio=0\.\d+ or more") as error:
        fit_course(PARAMS, 1000, 200, 3)
    ratio = float(str(error.value).split("ratio=")[1].split()[0])
    assert fit_course(PARAMS, 1000, int(1000 * ratio), 3)


def test_models_with_other_layers_are_refused() -> None:
    shape = ModelShape("mixed", 4, 4, 2, 16, 512, (1, 3))
    states = replace(shape, attention_layers=(0, 1, 2, 3), hybrid_layers=(2, 3))
    with pytest.raises(ConfigError, match="2 layers of model 'mixed' without full attention"):
        PyramidInfer.check(PARAMS, request("0.5"), shape)
    with pytest.raises(ConfigError, match=r"2 layers of model 'mixed' .* a state beside it"):
        PyramidInfer.check(PARAMS, request("0.5"), states)


def test_small_ratios_are_starred() -> None:
    assert PyramidInfer.label(PARAMS, request("0.5")) == "PyramidInfer"
    assert PyramidInfer.label(PARAMS, request("0.2", comm="1/64")) == "PyramidInfer* (C)"
    assert PyramidInfer.label(PUBLISHED, request("0.2")) == "PyramidInfer"
