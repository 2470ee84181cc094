from pathlib import Path

from matplotlib.colors import to_hex

from kvbench.tasks.needle.heatmap import Pivot, draw_heatmap, frame, pivot


def test_a_picture_does_not_depend_on_those_drawn_before(tmp_path: Path) -> None:
    lengths, depths = [1000, 2000, 16000], [0.0, 50.0, 100.0]
    first = Pivot(lengths, depths, [[0.0, 0.5, 1.0]] * 3, lengths)
    second = Pivot(lengths, depths, [[1.0, float("nan"), 0.25]] * 3, lengths)
    frame.cache_clear()
    draw_heatmap(tmp_path / "first.png", first, "StreamingLLM (C), ratio 0.1, a model")
    draw_heatmap(tmp_path / "behind.png", second, "Full")
    frame.cache_clear()
    draw_heatmap(tmp_path / "alone.png", second, "Full")
    assert (tmp_path / "behind.png").read_bytes() == (tmp_path / "alone.png").read_bytes()
    assert (tmp_path / "behind.png").read_bytes() != (tmp_path / "first.png").read_bytes()


def test_hit_and_miss_differ_in_lightness_and_no_cell_looks_like_a_score() -> None:
    """Red and green looked alike to who sees no difference between them."""
    _, _, image = frame((1000,), (50.0,))
    miss, half, hit = (sum(image.cmap(score)[:3]) / 3 for score in (0.0, 0.5, 1.0))
    assert half - miss > 0.2 and hit - half > 0.1
    assert to_hex(image.cmap(float("nan"))) == "#ffffff"


def test_a_column_is_as_long_as_its_prompts_were() -> None:
    """A column of prompts of 337 tokens was called 500, which was the limit."""
    rows = [{"length": 500, "depth": d, "score": 1.0, "prompt_tokens": n} for d, n in ((0.0, 336), (50.0, 338))]
    table = pivot(rows)
    assert (table.lengths, table.tokens) == ([500], [337])
    _, ax, _ = frame(tuple(table.tokens), tuple(table.depths))
    assert [label.get_text() for label in ax.get_xticklabels()] == ["337"]
