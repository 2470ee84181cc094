import pytest
import torch

from engine import observe
from engine.observe import LastQueries, window_scores


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
    scores = window_scores(LastQueries(w).observe(q, k, 0.25), k, 0.25)
    assert scores.dtype == torch.float32
    expected = plain_scores(q, k, 0.25, w).float()
    torch.testing.assert_close(scores, expected, atol=1e-6, rtol=1e-5)


def test_window_scores_of_a_smaller_window_need_only_the_last_of_the_kept_queries() -> None:
    q, k = draw(4, 2, 40)
    kept = LastQueries(16).observe(q, k, 0.25)
    torch.testing.assert_close(
        window_scores(kept[:, :, -5:], k, 0.25), window_scores(q[:, :, -5:], k, 0.25)
    )


def test_window_scores_are_float32_for_models_in_half_precision() -> None:
    q, k = (x.bfloat16() for x in draw(4, 2, 40))
    scores = window_scores(q[:, :, -8:], k, 0.25)
    assert torch.equal(scores, window_scores(q[:, :, -8:].float(), k.float(), 0.25))


def test_window_scores_of_a_prompt_that_is_all_window_are_empty() -> None:
    q, k = draw(4, 2, 8)
    assert window_scores(LastQueries(32).observe(q, k, 0.25), k, 0.25).shape == (1, 4, 0)
