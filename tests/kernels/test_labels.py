import pytest
import torch

from kvbench.kernels import labels as op
from kvbench.kernels.labels import by_channel, label_scores, label_top, label_top_ref, takes_native
from kvbench.kernels.topk import top_stable_ref


def random_labels(heads: int, stored: int, c: int, s: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    weights = torch.randn(2, heads, c, generator=draw)
    weights[torch.rand(weights.shape, generator=draw) < 0.3] = 0.0
    return weights, by_channel(torch.randn(stored, s, c, generator=draw))


def test_the_cpp_is_there() -> None:
    assert takes_native(random_labels(2, 1, 3, 5)[1])


@pytest.mark.parametrize(
    ("heads", "stored", "c", "s"), [(6, 2, 3, 100), (4, 4, 8, 5000), (9, 3, 1, 2049), (1, 1, 5, 7)]
)
def test_it_chooses_as_a_stable_sort(heads: int, stored: int, c: int, s: int) -> None:
    weights, labels = random_labels(heads, stored, c, s)
    for n in (s, s - 1, max(2, s // 3)):
        wide = label_scores(weights.double(), labels.double(), n)
        for k in (1, n // 2, n - 1, n, n + 3):
            found = label_top(weights, labels, n, k)
            assert found.shape == (2, heads, min(k, n))
            chosen = wide.gather(-1, found).amin(-1) if k else None
            best = wide.gather(-1, top_stable_ref(wide, min(k, n))).amin(-1)
            torch.testing.assert_close(chosen, best, atol=1e-5, rtol=1e-5)
            assert all(len(set(head)) == min(k, n) for row in found.tolist() for head in row)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_labels_of_a_narrow_dtype_are_searched_as_the_same_numbers_in_float32(dtype: torch.dtype) -> None:
    weights, labels = random_labels(6, 2, 5, 3001)
    narrow = by_channel(labels.to(dtype))
    assert takes_native(narrow)
    for k in (1, 90, 2000):
        assert torch.equal(label_top(weights, narrow, 2999, k), label_top(weights, by_channel(narrow.float()), 2999, k))
    torch.testing.assert_close(label_scores(weights, narrow, 10), label_scores(weights, narrow.float(), 10))


@pytest.mark.parametrize("k", [1, 200, 1024])
def test_a_sample_that_misleads_costs_no_token(k: int) -> None:
    """Every sixteenth score is the highest there is, or the lowest: the rest lies on one side of any threshold."""
    for sign in (1.0, -1.0):
        scores = torch.randn(20_000, generator=torch.Generator().manual_seed(2))
        scores[::16] = sign * (10 + torch.rand(1250, generator=torch.Generator().manual_seed(3)))
        found = label_top(torch.ones(1, 1, 1), by_channel(scores.view(1, -1, 1)), 20_000, k)
        assert torch.equal(found[0, 0], top_stable_ref(scores, k).sort().values)


@pytest.mark.parametrize("k", [1, 2, 37, 150, 299])
def test_of_equal_scores_the_first_are_chosen(k: int) -> None:
    """Labels of few whole numbers: sums are exact whatever their order, and most are equal."""
    draw = torch.Generator().manual_seed(1)
    labels = by_channel(torch.randint(-2, 3, (2, 300, 3), generator=draw).float())
    weights = torch.randint(-1, 2, (3, 4, 3), generator=draw).float()
    weights[0, 0] = 0.0  # all scores are equal
    expected = top_stable_ref(label_scores(weights, labels, 300), k).sort(-1).values
    assert torch.equal(label_top(weights, labels, 300, k).sort(-1).values, expected)
    assert torch.equal(label_top_ref(weights, labels, 300, k).sort(-1).values, expected)


def test_signed_zeros_are_equal() -> None:
    labels = by_channel(torch.tensor([[[-0.0], [0.0], [-1.0], [0.0]]]))
    assert label_top(torch.ones(1, 1, 1), labels, 4, 2).tolist() == [[[0, 1]]]


def test_without_a_compiler_torch_chooses_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, labels = random_labels(6, 3, 4, 900)
    native = label_top(weights, labels, 800, 60).sort(-1).values
    monkeypatch.setattr(op, "native", lambda: None)
    assert torch.equal(label_top(weights, labels, 800, 60).sort(-1).values, native)
