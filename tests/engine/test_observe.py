import pytest
import torch

from kvbench.engine import observe
from kvbench.engine.causal import causal
from kvbench.engine.observe import BandLogits, BandSums, ColumnSums, LastQueries, window_scores
from kvbench.engine.softmax import Softmax


def draw(h: int, h_kv: int, s: int, d_h: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    seed = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, heads, s, d_h, generator=seed) for heads in (h, h_kv))
    return q, k


def plain_scores(q: torch.Tensor, k: torch.Tensor, scale: float, w: int) -> torch.Tensor:
    """All weights of the prompt in float64, then the window's rows and the past's columns."""
    s = q.shape[2]
    logits = q.double() @ k.double().repeat_interleave(q.shape[1] // k.shape[1], 1).mT * scale
    logits = logits.masked_fill(torch.ones(s, s, dtype=torch.bool).triu(1), -torch.inf)
    return logits.softmax(-1)[:, :, s - w :, : s - w].sum(2)


@pytest.mark.parametrize("chunk_bytes", [1, 4 * 9 * 60 * 2, 1 << 20])
@pytest.mark.parametrize(("h", "h_kv", "w"), [(4, 4, 1), (6, 2, 9), (9, 3, 59)])
def test_window_scores_are_the_weights_of_full_attention_whatever_the_chunk(
    h: int, h_kv: int, w: int, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observe, "SCORE_CHUNK_BYTES", chunk_bytes)
    q, k = draw(h, h_kv, 60)
    scores = window_scores(LastQueries(w).observe(q, k, Softmax(0.25)), k, Softmax(0.25))
    assert scores.dtype == torch.float32
    expected = plain_scores(q, k, 0.25, w).float()
    torch.testing.assert_close(scores, expected, atol=1e-6, rtol=1e-5)


def test_window_scores_of_a_smaller_window_need_only_the_last_of_the_kept_queries() -> None:
    q, k = draw(4, 2, 40)
    kept = LastQueries(16).observe(q, k, Softmax(0.25))
    torch.testing.assert_close(
        window_scores(kept[:, :, -5:], k, Softmax(0.25)), window_scores(q[:, :, -5:], k, Softmax(0.25))
    )


def test_window_scores_are_float32_for_models_in_half_precision() -> None:
    q, k = (x.bfloat16() for x in draw(4, 2, 40))
    scores = window_scores(q[:, :, -8:], k, Softmax(0.25))
    assert torch.equal(scores, window_scores(q[:, :, -8:].float(), k.float(), Softmax(0.25)))


def test_window_scores_of_a_prompt_that_is_all_window_are_empty() -> None:
    q, k = draw(4, 2, 8)
    assert window_scores(LastQueries(32).observe(q, k, Softmax(0.25)), k, Softmax(0.25)).shape == (1, 4, 0)


def plain_band(q: torch.Tensor, k: torch.Tensor, scale: float, window: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights at distances below `window`, and logits at distances 1 to `window`, summed over queries in float64."""
    s = q.shape[2]
    logits = q.double() @ k.double().repeat_interleave(q.shape[1] // k.shape[1], 1).mT * scale
    distance = torch.arange(s).unsqueeze(1) - torch.arange(s)
    weights = logits.masked_fill(distance < 0, -torch.inf).softmax(-1)
    near = (distance >= 0) & (distance < window)
    behind = (distance >= 1) & (distance <= window)
    return (weights * near).sum(2), (logits * behind).sum(2)


@pytest.mark.parametrize("block_bytes", [0, 1, 4 * 3 * (64 + 7) * 5, 16 << 20])
@pytest.mark.parametrize("window", [1, 7, 64, 100, 199, 200, 1000])
def test_band_sums_are_the_weights_near_the_diagonal_whatever_the_block(
    window: int, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if block_bytes:  # else by a kernel, where there is one
        monkeypatch.setattr(observe, "takes_native", lambda q, k: False)
        monkeypatch.setattr(observe, "BAND_BLOCK_BYTES", block_bytes)
    q, k = draw(6, 2, 200)
    expected, _ = plain_band(q, k, 0.25, window)
    own = BandSums(window).observe(q, k, Softmax(0.25))
    _, lse = causal(q, k, k, Softmax(0.25))
    given = BandSums(window).observe_pass(q, k, Softmax(0.25), lse)
    for sums in (own, given):
        assert sums.dtype == torch.float32
        torch.testing.assert_close(sums, expected.float(), atol=1e-6, rtol=2e-5)


def test_a_band_as_wide_as_the_prompt_is_the_columns() -> None:
    q, k = draw(6, 2, 150)
    band = BandSums(150).observe(q, k, Softmax(0.25))
    torch.testing.assert_close(band, ColumnSums().observe(q, k, Softmax(0.25)), atol=1e-6, rtol=2e-5)


@pytest.mark.parametrize("window", [1, 40, 1500, 3000])
def test_band_logits_are_the_products_with_the_queries_behind(window: int) -> None:
    q, k = draw(4, 2, 2100)
    _, expected = plain_band(q, k, 0.25, window)
    sums = BandLogits(window).observe(q, k, Softmax(0.25))
    assert sums.dtype == torch.float32
    torch.testing.assert_close(sums, expected.float(), atol=1e-3, rtol=1e-5)
    assert (sums[..., -1] == 0).all()


def test_band_sums_of_half_precision_are_close_with_the_log_sum_exps_of_the_pass() -> None:
    """Its kernel rounds exponentials in half precision: 5e-5 of a log-sum-exp measured."""
    q, k = (x.bfloat16() for x in draw(4, 2, 300))
    _, lse = causal(q, k, k, Softmax(0.25))
    sums = BandSums(32).observe_pass(q, k, Softmax(0.25), lse)
    exact, _ = plain_band(q, k, 0.25, 32)
    torch.testing.assert_close(sums, exact.float(), atol=1e-6, rtol=5e-4)
