import json
import struct
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from kvbench.engine.errors import ConfigError
from kvbench.engine.observe import QueryStatistics, moments
from kvbench.engine.passes.trace import Trace
from kvbench.engine.prefill import prefill
from kvbench.engine.softmax import Softmax
from kvbench.methods.base import shortened
from kvbench.methods.dropping import expected_attention
from kvbench.methods.dropping.expected_attention import (
    ExpectedAttention,
    average_rotation,
    expected_logits,
    expected_scores,
    main,
    pooled,
    turned_statistics,
)  # fmt: skip
from kvbench.methods.scorers import keep_top
from kvbench.tests.tiny import prompt, tiny
from kvbench.tests.tiny_run import run, save_tiny
from kvbench.tests.vectors import Check, differs, first, load, request, row_of, trace_of

PARAMS = ExpectedAttention.Params(512, 4, 0.01, Fraction(1, 5), True, True, "prompt", None, "model")
GOLDEN = sorted((Path(__file__).parents[2] / "golden" / "expected_attention").glob("*.npz"))
NEEDLE = ["task=needle", "task.source=embedded", "task.lengths=[300]", "task.depths=[50]"]
CPU = torch.device("cpu")


def rotation(base: float) -> Callable[[Tensor, int | Tensor], Tensor]:
    """Plain rotary embedding: tokens (n, heads, s, d_h) moved by so many positions."""

    def turn(x: Tensor, by: int | Tensor) -> Tensor:
        half = x.shape[-1] // 2
        where = torch.as_tensor(by).reshape(1, -1) if isinstance(by, int) else by
        angles = where.double().unsqueeze(-1) * base ** (-torch.arange(half).double() / half)
        cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
        a, b = x.double().split(half, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)

    return turn


def run_vectors(path: Path) -> list[Check]:
    """Statistics of queries to come, scores and kept tokens of the authors' code."""
    meta, x = load(path)
    with TemporaryDirectory() as folder:
        return [(path.stem, check_case(meta, x, Path(folder) / "statistics"))]


def check_case(meta: dict[str, Any], x: dict[str, np.ndarray], file: Path) -> str | None:
    params = ExpectedAttention.Params(
        meta["n_future_positions"], meta["n_sink"], meta["epsilon"], Fraction(1),
        meta["use_covariance"], meta["use_vnorm"],
        "file" if meta["use_stats"] else "prompt", file if meta["use_stats"] else None, "model",
    )  # fmt: skip
    if meta["use_stats"]:
        write_statistics(file, torch.from_numpy(x["stat_mu"])[None], torch.from_numpy(x["stat_cov"])[None])
    q, k, v = (torch.from_numpy(x[name]) for name in ("q_pre", "k", "v"))
    row = expected_row(q, k, v, params, meta)
    mean, covariance = turned_statistics(row.statistics(0), row.rotation(0))
    scores = row.scores(0)
    n_sink = row.plan.n_sink
    with_sinks = torch.cat([scores.max().add(1).expand(1, meta["Hk"], n_sink), scores], -1)
    return first(
        differs("mu", mean[None], x["mu"], 1e-5),
        differs("cov", covariance[None], x["cov"], 1e-5) if "cov" in x else None,
        differs("score", with_sinks / torch.from_numpy(x["score"]), np.ones_like(x["score"]), 1e-4),
        differs("kept tokens", keep_top(with_sinks, meta["n_kept"]), x["kept_idx"]),
        differs("kept by the row", row.store[0].positions(), x["kept_idx"]),
        check_heads(row, x["ada_keep"], Fraction(str(meta["alpha_safeguard"]))) if "ada_keep" in x else None,
    )


def check_heads(alike: ExpectedAttention, keep: np.ndarray, alpha: Fraction) -> str | None:
    """The same scores, and a budget that heads share."""
    params = replace(alike.params, alpha=alpha)
    row = row_of(ExpectedAttention, params, alike.trace, request(tokens=alike.budget.tokens))
    return differs("kept by heads that share", row.store[0].attended()[:: row.trace.shape.g], keep)


def expected_row(
    q_pre: Tensor, k: Tensor, v: Tensor, params: ExpectedAttention.Params, meta: dict[str, Any]
) -> ExpectedAttention:
    """One variant on a prompt whose queries are given before rotary embedding."""
    trace = trace_of(k, v, q_pre.shape[1])
    turn = rotation(meta["theta"])
    trace.turn = {0: turn}
    for what in ExpectedAttention.observations(params, ExpectedAttention.Plan(meta["n_kept"], params.n_sink)):
        trace.observe(0, what, turn(q_pre, torch.arange(q_pre.shape[2])[None]), k, trace.softmax[0])
    return row_of(ExpectedAttention, params, trace, request(tokens=meta["n_kept"]))


def write_statistics(file: Path, mean: Tensor, covariance: Tensor, digest: str = "vectors") -> None:
    tensors = {"query_mean": mean.contiguous(), "query_cov": covariance.contiguous()}
    save_file(tensors, file, {"model_digest": digest})


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_expected_attention_agrees_with_reference_vectors(path: Path) -> None:
    assert [problem for _, problem in run_vectors(path)] == [None]


# --- the observation ---


def statistics_of(queries: Tensor) -> Tensor:
    """Of (h, n, d_h), in float64."""
    queries = queries.double()
    mean = queries.mean(1, keepdim=True)
    return torch.cat([mean, (queries - mean).mT @ (queries - mean) / queries.shape[1]], 1).float()


@pytest.mark.parametrize("block", [1, 7, 50, 100])
def test_moments_are_those_of_all_tokens_whatever_the_block(block: int) -> None:
    draw = torch.Generator().manual_seed(0)
    queries = torch.randn(3, 50, 8, generator=draw) + 30  # a mean far above the spread
    found = moments(queries.split(block, 1))
    torch.testing.assert_close(found, statistics_of(queries), atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("kind", ["llama", "llama-yarn", "qwen3", "glm", "opt"])
def test_the_statistics_are_of_what_the_query_projection_gives(kind: str) -> None:
    """Behind its norm and bias, in front of rotary embedding; where a model scales that, the scale is in them."""
    model, seen = tiny(kind), {}
    last = model.shape.n_layers - 1
    attention = model.attentions[last]
    module = getattr(attention, "q_norm", attention.q_proj)
    hook = module.register_forward_hook(lambda module, args, out: seen.update(q=out))
    with model.hooked():
        trace = prefill(model, prompt(60), [QueryStatistics(4)])
    hook.remove()
    queries = seen["q"].reshape(1, 60, model.shape.h, model.shape.d_h)[0].transpose(0, 1)
    rotary = next((m for m in model.hf.modules() if hasattr(m, "attention_scaling")), None)
    queries = queries * (attention.scaling if kind == "opt" else rotary.attention_scaling if rotary else 1)
    found, scale = trace.observed(QueryStatistics(4), last), trace.softmax[last].scale
    if kind == "opt":  # it scales its queries by itself
        assert scale == 1
    torch.testing.assert_close(found, statistics_of(queries[:, 4:]), atol=2e-4, rtol=1e-4)


# --- the average rotation ---


@pytest.mark.parametrize("kind", ["llama", "llama-yarn", "glm"])
@pytest.mark.parametrize("n", [1, 5, 100])
def test_the_average_rotation_is_the_mean_of_turned_queries(kind: str, n: int) -> None:
    """Halves that turn together, neighbours that do, and dimensions that stay as they are."""
    turns = tiny(kind).turn
    assert turns is not None
    turn = turns[0]
    q = torch.randn(1, 3, 1, 8, generator=torch.Generator().manual_seed(0))
    each = turn(q.expand(-1, -1, n, -1), torch.arange(40, 40 + n)[None])
    found = q[0, :, 0] @ average_rotation(turn, 8, 40, n, CPU).T
    torch.testing.assert_close(found, each.double().mean(2).float()[0], atol=1e-6, rtol=1e-5)


def test_an_average_shrinks_fast_channels_and_is_the_identity_without_rotary_positions() -> None:
    averaged = average_rotation(rotation(10_000.0), 16, 300, 512, CPU)
    lengths = averaged.norm(dim=0)
    assert lengths[0] < 0.01 and lengths[7] > 0.99
    assert torch.equal(average_rotation(None, 16, 300, 512, CPU), torch.eye(16))


# --- the scores ---


def test_sampled_queries_give_the_probabilities_of_the_closed_form() -> None:
    draw = torch.Generator().manual_seed(3)
    d_h, n = 8, 40
    mean, root = torch.randn(1, d_h, generator=draw), 0.3 * torch.randn(1, d_h, d_h, generator=draw)
    keys = torch.randn(1, n, d_h, generator=draw)
    closed = expected_logits(mean, root @ root.mT, keys, d_h**-0.5).softmax(-1)
    queries = mean + torch.randn(400_000, d_h, generator=draw) @ root[0].T
    sampled = (queries.double() @ keys[0].double().T * d_h**-0.5).exp().mean(0)
    torch.testing.assert_close(closed[0].double(), sampled / sampled.sum(), rtol=0.02, atol=0)


def test_one_position_and_no_covariance_are_the_softmax_of_the_mean_query_there() -> None:
    draw = torch.Generator().manual_seed(0)
    mean, keys = torch.randn(4, 16, generator=draw), torch.randn(2, 30, 16, generator=draw)
    turn = rotation(10_000.0)
    statistics = torch.cat([mean[:, None], torch.zeros(4, 16, 16)], 1)
    turned, covariance = turned_statistics(statistics, average_rotation(turn, 16, 30, 1, CPU))
    assert (covariance == 0).all()
    at_s = turn(mean[None, :, None], 30)[0, :, 0]
    expected = (at_s.unflatten(0, (2, 2)) @ keys.mT * 0.25).softmax(-1)
    for given in (None, covariance):
        found = expected_logits(turned, given, keys, 0.25).softmax(-1).unflatten(0, (2, 2))
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def test_logits_do_not_depend_on_the_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(0)
    mean, root = torch.randn(6, 8, generator=draw), torch.randn(6, 8, 8, generator=draw)
    keys = torch.randn(2, 57, 8, generator=draw)
    whole = expected_logits(mean, root @ root.mT, keys, 0.3)
    monkeypatch.setattr(expected_attention, "CHUNK_BYTES", 4 * 3 * 8 * 10)
    torch.testing.assert_close(expected_logits(mean, root @ root.mT, keys, 0.3), whole)


def test_softmax_comes_before_the_mean_of_the_group_and_eps_before_the_value_norm() -> None:
    logits, values = torch.tensor([[0.0, 4.0, 4.0], [9.0, 0.0, 0.0]]), torch.tensor([[[2.0], [1.0], [3.0]]])
    mean = logits.softmax(-1).mean(0)
    torch.testing.assert_close(
        expected_scores(logits, values, 0.5, True, Softmax(1.0))[0, 0], (mean + 0.5) * values[0, :, 0]
    )
    torch.testing.assert_close(expected_scores(logits, values, 0.5, False, Softmax(1.0))[0, 0], mean)


# --- the method ---


def seen_trace(s: int = 60, n_sink: int = 4, kind: str = "llama") -> Trace:
    model = tiny(kind)
    with model.hooked():
        return prefill(model, prompt(s), [QueryStatistics(n_sink, is_rotary) for is_rotary in (True, False)])


@pytest.mark.parametrize(("cap", "n_sink"), [(60, 4), (20, 4), (5, 4), (4, 1), (3, 0), (1, 0)])
def test_every_head_keeps_cap_tokens_and_the_sinks(cap: int, n_sink: int) -> None:
    row = row_of(ExpectedAttention, PARAMS, seen_trace(n_sink=n_sink), request(tokens=cap))
    assert row.plan == ExpectedAttention.Plan(cap, n_sink)
    assert shortened(row) == ({} if n_sink == 4 else {"n_sink": n_sink})
    for layer in range(3):
        kept = row.store[layer].attended()
        assert kept.sum() == 6 * cap and kept[:, :n_sink].all()


def test_budgets_share_the_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    score = ExpectedAttention.scores
    monkeypatch.setattr(ExpectedAttention, "scores", lambda row, layer: calls.append(layer) or score(row, layer))
    trace = seen_trace()
    for cap in (10, 20, 30):
        row_of(ExpectedAttention, PARAMS, trace, request(tokens=cap))
    assert calls == [0, 1, 2]


def test_a_model_without_rotary_positions_is_asked_for_openly() -> None:
    with pytest.raises(ConfigError, match=r"no rotary positions.*use method\.rotary=none"):
        ExpectedAttention.check_model(PARAMS, tiny("opt").checkpoint)
    ExpectedAttention.check_model(replace(PARAMS, rotary="none"), tiny("opt").checkpoint)
    ExpectedAttention.check_model(PARAMS, tiny().checkpoint)
    row = row_of(ExpectedAttention, replace(PARAMS, rotary="none"), seen_trace(kind="opt"), request(tokens=20))
    assert torch.equal(row.rotation(0), torch.eye(8))
    assert row.store[0].attended().sum() == 6 * 20


# --- statistics from a file ---


def test_statistics_of_texts_pool_as_if_they_were_one() -> None:
    draw = torch.Generator().manual_seed(0)
    queries = torch.randn(1, 3, 50, 8, generator=draw) + 2
    parts = [(n, statistics_of(x[0])[None]) for n, x in ((n, x) for x in queries.split(20, 2) for n in [x.shape[2]])]
    found, expected = pooled(parts), statistics_of(queries[0])[None]
    expected[:, :, 1:] *= 50 / 49
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_the_command_writes_a_file_that_a_run_of_that_model_takes(tmp_path: Path, capsys: Any) -> None:
    folder, texts, file = save_tiny(tmp_path / "tiny"), tmp_path / "texts.txt", tmp_path / "statistics.safetensors"
    texts.write_text("It was the best of times, it was the worst of times. " * 60)
    assert main([str(folder), str(texts), str(file)]) == 0
    assert "queries" in capsys.readouterr().out
    words = ["model=any", f"model.id={folder}", "model.name=tiny", "limit=1", "ratio=0.3", *NEEDLE]
    words += ["method=expected_attention", "method.stats=file"]
    own, _ = run([*words, f"method.stats_file={file}"], tmp_path / "a")
    assert own.within_budget and own.params["stats_file"] == str(file)
    wrong = tmp_path / "wrong"
    write_statistics(wrong, torch.zeros(3, 6, 8), torch.zeros(3, 6, 8, 8))
    with pytest.raises(ConfigError, match="made with the model vectors"):
        run([*words, f"method.stats_file={wrong}"], tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_what_a_file_holds_is_part_of_a_runs_identity(tmp_path: Path) -> None:
    digests = []
    for value in (1.0, 2.0):
        write_statistics(tmp_path / "file", torch.full((3, 6, 8), value), torch.zeros(3, 6, 8, 8))
        digests.append(ExpectedAttention.data_digest(replace(PARAMS, stats="file", stats_file=tmp_path / "file")))
    assert digests[0] != digests[1]
    assert ExpectedAttention.data_digest(PARAMS) is None


@pytest.mark.parametrize("arguments", [[], ["embedded", "nothing.txt", "out"], ["a", "b"]])
def test_wrong_arguments_of_the_command_are_answered_by_its_usage(arguments: list[str], capsys: Any) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith("usage:")


def test_texts_that_are_too_short_are_refused(tmp_path: Path, capsys: Any) -> None:
    folder, texts = save_tiny(tmp_path / "tiny"), tmp_path / "texts.txt"
    texts.write_text("It")
    assert main([str(folder), str(texts), str(tmp_path / "out")]) == 2
    assert "longer" in capsys.readouterr().err


def test_a_file_of_another_model_is_refused(tmp_path: Path) -> None:
    shape, file = tiny().shape, tmp_path / "file"
    params = replace(PARAMS, stats="file", stats_file=file)
    write_statistics(file, torch.zeros(3, 6, 8), torch.zeros(3, 6, 8, 8), digest="other")
    ExpectedAttention.check(params, request(tokens=20), shape)
    model = tiny().checkpoint
    with pytest.raises(ConfigError, match="made with the model other and this is tiny"):
        ExpectedAttention.check_model(params, model)
    ExpectedAttention.check_model(params, replace(model, digests=("tiny", "other")))
    write_statistics(file, torch.zeros(3, 4, 8), torch.zeros(3, 4, 8, 8))
    with pytest.raises(ConfigError, match=r"query_mean of shape \[3, 4, 8\]"):
        ExpectedAttention.check(params, request(tokens=20), shape)
    for content in (b"", b"no such thing", struct.pack("<Q", 2) + json.dumps([]).encode()):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=r"no safetensors file|has query_mean of shape None"):
            ExpectedAttention.check(params, request(tokens=20), shape)
    with pytest.raises(ConfigError, match="cannot be read"):
        ExpectedAttention.check(replace(params, stats_file=tmp_path / "none"), request(tokens=20), shape)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"stats": "file"}, "needs a file"),
        ({"stats_file": Path("x")}, "has no effect"),
    ],
)
def test_impossible_parameters_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        replace(PARAMS, **changes)
