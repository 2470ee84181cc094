"""Attention and observations under caps and sinks, against the plain formula in float64 with the sink as a column."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvbench.engine.attend import Part, attend, attend_own, attend_own_past, attend_rows, attend_weights, partial
from kvbench.engine.causal import Chunk, causal, over_past, whole
from kvbench.engine.observe import BandLogits, BandSums, ColumnSums, MeanWeights, query_lse, window_scores
from kvbench.engine.passes.second_pass import joined
from kvbench.engine.softmax import Softmax
from kvbench.kernels.column_sums import column_sums
from kvbench.tests.kernels.test_capped import KINDS, bent, causal_logits, draw, probabilities, sinks
from kvbench.tests.vectors import Check, differs, first, load

H, H_KV, D = 6, 2, 16


def drawn(s: int, about: float | None, cap: float, s_q: int | None = None) -> tuple[Tensor, Tensor, Tensor, Softmax]:
    q, k, v = draw(1, H, s_q or s, D, seed=s) * 3, draw(1, H_KV, s, D, seed=1), draw(1, H_KV, s, D, seed=2)
    return q, k, v, Softmax(0.25, cap, sinks(H, about))


@pytest.mark.parametrize(("cap", "about"), KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 2, 255, 256, 257, 700])
def test_a_step_over_parts(cap: float, about: float | None, dtype: torch.dtype, n: int) -> None:
    """Any split into parts, some with a bias, a mask or a query of their own: a sink joins once."""
    q, k, v, softmax = drawn(n, about, cap, 1)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    bias = draw(1, H_KV, n, seed=7)
    mask = draw(1, H_KV, n, seed=8) > -1
    mask[..., 0] = True
    logits = bent(q[0].double() @ k[0].double().repeat_interleave(3, 0).mT * 0.25, cap)  # (h, 1, n)
    values = v[0].double().repeat_interleave(3, 0)
    cuts = sorted({0, n // 3, n // 2, n})
    plain = [Part(k[:, :, a:b], v[:, :, a:b]) for a, b in pairwise(cuts)]
    biased, masked = Part(k, v, bias=bias), Part(k, v, mask=mask)
    chosen = Part(k, v, mask=mask, idx=torch.arange(n).expand(1, H_KV, n).where(mask, -1))
    hidden = logits.masked_fill(~mask[0].repeat_interleave(3, 0).unsqueeze(1), -torch.inf)
    cases = [
        (plain, logits, values),
        ([biased], logits + bias[0].double().repeat_interleave(3, 0).unsqueeze(1), values),
        ([masked], hidden, values),
        ([chosen], hidden, values),
        ([*plain, masked], torch.cat([logits, hidden], -1), torch.cat([values, values], 1)),
    ]
    exact = 2e-5 if dtype == torch.float32 else 0.03
    for parts, theirs, beside in cases:
        weights = probabilities(theirs, softmax.sink)
        right = (weights @ beside).transpose(0, 1).unsqueeze(0).transpose(1, 2)
        found = [
            attend(q, parts, softmax),
            attend_weights(q, parts, softmax)[0],
            attend_rows(q, [parts], softmax, [False])[0],
        ]
        for out in found:
            torch.testing.assert_close(out.double(), right, rtol=exact, atol=exact)
        own = attend_weights(q, parts, softmax)[1][0]
        torch.testing.assert_close(own.double(), weights[:, 0], rtol=1e-3, atol=1e-5)


def test_parts_that_rows_share_join_a_sink_once() -> None:
    q, k, v, softmax = drawn(600, 2.0, 4.0, 1)
    rows = [[Part(k, v)], [Part(k, v), Part(k[:, :, :3], v[:, :, :3])]]
    out, _ = attend_rows(torch.cat([q, q.flip(1)]), rows, softmax, [False, False])
    for i, (parts, asking) in enumerate(zip(rows, (q, q.flip(1)), strict=True)):
        torch.testing.assert_close(out[i : i + 1], attend(asking, parts, softmax), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("cap", "about"), KINDS)
@pytest.mark.parametrize("window", [None, 1, 7, 129, Chunk(32)])
@pytest.mark.parametrize("s", [1, 31, 32, 33, 129, 300])
def test_a_pass_over_a_prompt(cap: float, about: float | None, window: int | Chunk | None, s: int) -> None:
    q, k, v, softmax = drawn(s, about, cap)
    logits, ends = causal_logits(q, k, 0.25, cap), torch.arange(s).unsqueeze(1)
    if isinstance(window, Chunk):
        logits = logits.masked_fill(ends // window.n != ends.T // window.n, -torch.inf)
    elif window is not None:
        logits = logits.masked_fill(ends - ends.T >= window, -torch.inf)
    right = probabilities(logits, softmax.sink) @ v[0].double().repeat_interleave(3, 0)
    out, lse = causal(q, k, v, softmax, window)
    torch.testing.assert_close(out[0].double(), right, rtol=1e-5, atol=1e-5)
    exact = logits.logsumexp(-1)
    exact = exact if softmax.sink is None else torch.logaddexp(exact, softmax.sink.double().view(-1, 1))
    torch.testing.assert_close(lse[0].double(), exact, rtol=1e-5, atol=1e-5)
    last = attend_own(q[:, :, -1:], k, v, softmax, window, s - 1)
    torch.testing.assert_close(last[0].double(), right[:, -1:], rtol=1e-5, atol=1e-5)
    some = min(s, 5)
    several = attend_own_past(q[:, :, -some:], k, v, softmax, window, s - some)
    torch.testing.assert_close(several[0].double(), right[:, -some:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("cap", "about"), KINDS)
def test_a_pass_behind_others(cap: float, about: float | None) -> None:
    """Parts are joined without the sink, which then takes its share of all of them."""
    q, k, v, softmax = drawn(90, about, cap)
    late = [x[:, :, 40:] for x in (q, k, v)]
    parts = [over_past(late[0], late[1], late[2], softmax), whole(late[0], k[:, :, :40], v[:, :, :40], softmax)]
    out, lse = softmax.finish(*joined(parts))
    right, right_lse = causal(q, k, v, softmax)
    torch.testing.assert_close(out, right[:, :, 40:], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, right_lse[:, :, 40:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("cap", "about"), KINDS)
@pytest.mark.parametrize(("s", "w"), [(9, 9), (70, 1), (70, 8), (131, 64)])
def test_votes(cap: float, about: float | None, s: int, w: int) -> None:
    q, k, v, softmax = drawn(s, about, cap)
    logits = causal_logits(q, k, 0.25, cap)
    weights = probabilities(logits, softmax.sink)  # (h, s, s)
    _, lse = causal(q, k, v, softmax)
    votes = window_scores(q[:, :, -w:], k, softmax)[0].double()
    torch.testing.assert_close(votes, weights[:, -w:, : s - w].sum(1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        MeanWeights(w).observe(q, k, softmax).double(), weights[:, -w:].mean(0), rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(query_lse(q[:, :, -w:], k, softmax), lse[:, :, -w:], rtol=1e-4, atol=1e-5)
    band = weights * torch.ones(s, s).triu(1 - w)
    for given in (None, lse):
        found = ColumnSums().observe_pass(q, k, softmax, given)[0].double()
        torch.testing.assert_close(found, weights.sum(1), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            BandSums(w).observe_pass(q, k, softmax, given)[0].double(), band.sum(1), rtol=1e-4, atol=1e-5
        )
    ends = torch.arange(s)
    behind = ends.unsqueeze(1) - ends
    near = logits.where((behind > 0) & (behind <= w), torch.zeros(()).double()).sum(1)
    torch.testing.assert_close(BandLogits(w).observe(q, k, softmax)[0].double(), near, rtol=1e-4, atol=1e-3)


def run_vectors(path: Path) -> list[Check]:
    """One layer of a model that has sinks or caps: attention over sets, in one part and in several, and votes."""
    meta, arrays = load(path)
    x = {name: torch.from_numpy(array) for name, array in arrays.items()}
    sink = x["sink"].float() if "sink" in x else None
    softmax, q, k, v = Softmax(meta["scale"], meta["softcap"] or 0.0, sink), x["q"], x["k"], x["v"]
    (h, s), checks = (q.shape[1], k.shape[2]), list[str | None]()
    kinds = torch.arange(s) % 3
    with_sink = x.get("lse_sink_f64", x["lse_f64"])
    for keep, right, lse, lse_sink in zip(x["keep"].bool(), x["out"], x["lse_f64"], with_sink, strict=True):
        masks = [keep.unsqueeze(0), *(keep.unsqueeze(0) & (kinds == i) for i in range(3))]
        whole, *pieces = [Part(k, v, mask=mask, idx=torch.arange(s).where(mask, -1)) for mask in masks]
        for parts in ([whole], pieces):
            out = attend(q, parts, softmax)[0, :, 0]
            checks.append(differs("output", out, right, 1e-5))
        of_tokens = partial(q, whole, softmax)[1].reshape(h)
        checks.append(differs("log-sum-exp", of_tokens, lse, 1e-5))
        weights = attend_weights(q, [Part(k, v, mask=masks[0])], softmax)[1].sum(-1)[0]
        checks.append(differs("mass of tokens", weights, (lse - lse_sink).exp(), 1e-5))
    w, s_prompt = meta["window"], meta["s_prompt"]
    q_window, past, votes = x["q_window"], k[:, :, :s_prompt], x["window_votes_f64"]
    checks.append(differs("votes", window_scores(q_window, past, softmax)[0], votes[:, : s_prompt - w], 1e-5))
    lse = query_lse(q_window, past, softmax)
    sums = column_sums(q_window, past, softmax.scale, lse=lse, cap=softmax.cap).flatten(0, 1)
    checks.append(differs("column sums", sums, votes, 1e-5))
    return [(path.stem, first(*checks))]


GOLDEN = [*(Path(__file__).parents[1] / "golden" / "attention_kinds").glob("s*.npz")]


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_attention_agrees_with_reference_vectors(path: Path) -> None:
    assert [problem for _, problem in run_vectors(path)] == [None]
