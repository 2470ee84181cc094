from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvbench.kernels.topk as module
from kvbench.kernels.jit import triton
from kvbench.kernels.topk import (
    LARGEST,
    NO_KEY,
    KeyChoice,
    counters,
    pack_keys_ref,
    sort_keys_triton,
    stream_of,
    top_border,
    top_keys,
    top_keys_ref,
    top_keys_triton,
    top_native,
    top_packed,
    top_stable,
    top_stable_ref,
)
from kvbench.tests.kernels.clocks import aged

Path = Callable[[torch.Tensor, int], torch.Tensor]
GPU = "cuda" if torch.cuda.is_available() else "cpu"  # where Triton runs; on a CPU its interpreter does
with_triton = pytest.mark.skipif(triton is None, reason="Triton is not installed")


def top_by_cpp(scores: torch.Tensor, k: int) -> torch.Tensor:
    """By C++, where it is asked: for some scores, but not all."""
    if module.native() is None or not 0 < k < scores.shape[-1]:
        return top_border(scores, k)
    return top_native(scores, k)


PATHS: tuple[Path, ...] = (top_border, top_packed, top_by_cpp)


@pytest.mark.parametrize("path", [*PATHS, top_stable])
@pytest.mark.parametrize("steps", [1, 8, 1 << 20])
@pytest.mark.parametrize(("s", "k"), [(1, 1), (7, 3), (500, 50), (4097, 1000), (20, 0), (20, 20)])
def test_the_set_is_that_of_a_stable_sort(s: int, k: int, steps: int, path: Path) -> None:
    draw = torch.Generator().manual_seed(s)
    scores = (torch.randn(2, 3, s, generator=draw) * steps).round() / steps
    chosen = path(scores, k)
    assert chosen.shape == (2, 3, k)
    assert torch.equal(chosen.sort(-1).values, top_stable_ref(scores, k).sort(-1).values)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=True), min_size=1, max_size=30), st.integers(1, 30))
def test_signs_zeros_and_extremes_rank_as_in_a_sort(values: list[float], k: int) -> None:
    # The packed form does not tell infinity from the largest number.
    scores = torch.tensor([values], dtype=torch.float32).clamp(-LARGEST, LARGEST)
    k = min(k, len(values))
    expected = top_stable_ref(scores, k).sort(-1).values
    for path in PATHS:
        assert torch.equal(path(scores, k).sort(-1).values, expected)


@pytest.mark.parametrize("path", PATHS)
def test_among_equals_the_lower_index_is_taken(path: Path) -> None:
    for value in (2.5, 0.0, -0.0, -2.5, 1e-42, -torch.inf):
        scores = torch.full((2, 50), value)
        assert path(scores, 7).sort(-1).values.tolist() == [[*range(7)]] * 2
    assert path(torch.tensor([-0.0, 0.0, -0.0]), 2).sort().values.tolist() == [0, 1]
    assert path(torch.tensor([[1.0, 3.0, 2.0, 2.0]]), 2).sort().values.tolist() == [[1, 2]]


@pytest.mark.parametrize("path", [*PATHS, top_stable])
def test_views_that_are_not_contiguous_are_read_as_they_are(path: Path) -> None:
    scores = torch.randn(2, 4, 100, generator=torch.Generator().manual_seed(0))
    view = scores[:, 1::2, 3:90]
    expected = top_stable_ref(view, 9).sort(-1).values
    assert torch.equal(path(view, 9).sort(-1).values, expected)
    assert top_stable(view, 200).shape == view.shape


def keys_of(scores: torch.Tensor) -> torch.Tensor:
    return pack_keys_ref(scores, torch.arange(scores.shape[-1]))


def scores_of(keys: torch.Tensor) -> torch.Tensor:
    """The scores that keys were made of."""
    rising = (~(keys >> 32)).int()
    return (rising ^ ((rising >> 31) & 0x7FFFFFFF)).view(torch.float32)


@with_triton
@pytest.mark.parametrize(("n", "ks"), [(1, (1,)), (300, (7, 300)), (1500, (700, 0, 1499)), (4500, (1600,))])
@pytest.mark.parametrize("steps", [1, 1 << 20])
def test_keys_are_chosen_as_by_a_sort_and_in_order(n: int, ks: tuple[int, ...], steps: int) -> None:
    """Twice, for the first launch must leave its counters as it found them; with few scores nearly all are equal."""
    draw = torch.Generator().manual_seed(n)
    scores = (torch.randn(len(ks), 2, n, generator=draw) * steps).round() / steps
    keys = keys_of(scores)
    if n > 1000:
        keys[0, 0, -9:] = NO_KEY
    expected = top_keys_ref(keys, ks)
    for _ in range(2):
        assert torch.equal(top_keys_triton(keys.to(GPU), ks).cpu(), expected)
    for i, k in enumerate(ks):
        best = top_stable_ref(scores[i], k).sort(-1).values
        if n <= 1000:
            assert torch.equal(expected[i, :, :k].int().long(), best)
        assert (expected[i, :, k:] == NO_KEY).all()


@with_triton
@pytest.mark.parametrize("ks", [(7,), (7, 9, 0)])
def test_rows_choose_more_keys_at_every_step(ks: tuple[int, ...]) -> None:
    more = [1, 0, 2][: len(ks)]
    choice = KeyChoice(len(ks), 2, ks, torch.device(GPU), more=more, n_steps=4)
    for age in (0, 1, 4):
        keys = keys_of(torch.randn(len(ks), 2, 30 + age, generator=torch.Generator().manual_seed(age)))
        wanted = [k + age * grows for k, grows in zip(ks, more, strict=True)]
        found, expected = choice.take(keys.to(GPU), aged(age, GPU)).cpu(), top_keys_ref(keys, wanted)
        assert torch.equal(found[..., : max(wanted)], expected)
        assert (found[..., max(wanted) :] == NO_KEY).all()


@with_triton
def test_keys_are_ranked_as_by_a_sort() -> None:
    keys = keys_of(torch.randn(2, 3, 333, generator=torch.Generator().manual_seed(0)).round())
    assert torch.equal(sort_keys_triton(keys.to(GPU)).cpu(), keys.sort(-1).values)
    kept = torch.zeros(3, *keys.shape, dtype=torch.int64, device=GPU)
    assert torch.equal(sort_keys_triton(keys.to(GPU), kept, aged(5, GPU)), kept[2]) and not kept[:2].any()
    assert torch.equal(kept[2].cpu(), keys.sort(-1).values)


def test_all_or_no_keys_need_no_choice() -> None:
    keys = keys_of(torch.randn(1, 2, 20))
    assert top_keys(keys, [30]) is not None and torch.equal(top_keys(keys, [30]), keys)
    assert top_keys(keys, [0]).shape == (1, 2, 0)


@with_triton
@pytest.mark.skipif(GPU == "cuda", reason="a GPU has nothing left to go on with")
def test_who_waits_for_a_program_that_never_comes_ends_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another launch on the same counters has taken a program's work."""
    monkeypatch.setattr(module, "LOOKS", 50)
    keys, counted = keys_of(torch.randn(1, 1, 4500)), torch.zeros(4, dtype=torch.int32)
    counted[0] = 1
    monkeypatch.setattr(module, "counters", lambda *_: counted)
    with pytest.raises(Exception, match="inline_asm"):
        top_keys_triton(keys, (7,))


def test_streams_have_counters_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches of two streams run at once, and each takes its work by counting."""
    stream = SimpleNamespace(cuda_stream=1)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    device, cpu = torch.device("cuda", 0), torch.device("cpu")
    first = counters(cpu, stream_of(device), 8)
    stream.cuda_stream = 2
    assert counters(cpu, stream_of(device), 8) is not first
    stream.cuda_stream = 1
    assert counters(cpu, stream_of(device), 8) is first
    assert stream_of(cpu) == 0
