import pytest
import torch
from torch import Tensor

from kvbench.engine import attend as engine_attend
from kvbench.engine.attend import MANY, Part, attend, attend_rows, attend_weights, partial
from kvbench.engine.softmax import Softmax


def reference(q: Tensor, parts: list[Part], scale: float) -> Tensor:
    """Softmax over the union, everything in float64 and repeated to query heads."""
    h = q.shape[1]
    logits, values = [], []
    for part in parts:
        repeat = h // part.k.shape[1]
        k, v = (x.double().repeat_interleave(repeat, 1) for x in (part.k, part.v))
        x = (q if part.q is None else part.q).double() @ k.mT * scale
        if part.mask is not None:
            x = x.masked_fill(~part.mask.repeat_interleave(repeat, 1).unsqueeze(2), -torch.inf)
        logits.append(x)
        values.append(v)
    return torch.cat(logits, -1).softmax(-1) @ torch.cat(values, 2)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def some_parts(dtype: torch.dtype, h: int = 6, h_kv: int = 2, d_h: int = 16) -> list[Part]:
    k, v = draw(1, h_kv, 40, d_h, seed=1, dtype=dtype), draw(1, h_kv, 40, d_h, seed=2, dtype=dtype)
    return [
        Part(k[:, :, :9], v[:, :, :9]),  # a view with strides of another tensor
        Part(draw(1, h, 7, d_h, seed=3, dtype=dtype), draw(1, h, 7, d_h, seed=4, dtype=dtype)),  # per query head
        Part(k[:, :, 20:21], v[:, :, 20:21]),  # a single token
        Part(k[:, :, 30:], v[:, :, 30:], mask=torch.arange(20).view(1, 2, 10) % 3 > 0),
        Part(k[:, :, 12:18], v[:, :, 12:18], q=draw(1, h, 1, d_h, seed=5, dtype=dtype)),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("which", [slice(0, 1), slice(1, 2), slice(0, 3), slice(3, 4), slice(0, 5)])
def test_attention_over_parts_is_attention_over_their_union(dtype: torch.dtype, which: slice) -> None:
    """Error at most twice that of plain torch in the same dtype, both against float64, plus a floor."""
    q, parts = draw(1, 6, 1, 16, dtype=dtype), some_parts(dtype)[which]
    exact = reference(q, parts, 0.25)
    allowed = 2 * (reference(q, parts, 0.25).to(dtype) - exact).abs().max() + 4 * torch.finfo(dtype).eps
    assert (attend(q, parts, Softmax(0.25)) - exact).abs().max() <= allowed
    out, weights = attend_weights(q, parts, Softmax(0.25))
    assert (out - exact).abs().max() <= allowed
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("heads", [2, 6])
@pytest.mark.parametrize("turned", [False, True])
def test_chosen_rows_are_attended_to_as_if_they_were_copied(dtype: torch.dtype, heads: int, turned: bool) -> None:
    q, others = draw(1, 6, 1, 16, dtype=dtype), some_parts(dtype)
    k, v = draw(1, 2, 40, 16, seed=6, dtype=dtype), draw(1, 2, 40, 16, seed=7, dtype=dtype)
    idx = torch.stack([torch.randperm(45, generator=torch.Generator().manual_seed(i))[:11] for i in range(heads)])
    idx[1, 4:] = -1
    idx = idx.unsqueeze(0)
    late = (draw(1, 2, 5, 16, seed=8, dtype=dtype), draw(1, 2, 5, 16, seed=9, dtype=dtype))
    chosen = Part(k, v, idx >= 0, draw(1, 6, 1, 16, seed=5, dtype=dtype) if turned else None, idx, late)
    copied = chosen.gathered()
    owner = torch.arange(heads) // (heads // 2)
    rows = torch.cat([k, late[0]], 2)[0][owner.unsqueeze(1), idx[0].clamp(min=0)]
    assert torch.equal(copied.k[0][idx[0] >= 0], rows[idx[0] >= 0])
    assert copied.idx is None
    assert chosen.n_tokens() == copied.n_tokens() == 11
    for parts in ([chosen], [others[0], chosen], [*others, chosen]):
        exact = reference(q, [part.gathered() for part in parts], 0.25)
        rounding = (exact.to(dtype) - exact).abs().max() + 2 * torch.finfo(dtype).eps
        allowed = 2 * rounding + 1e-6  # masks and weights are worked on in float32
        assert (attend(q, parts, Softmax(0.25)) - exact).abs().max() <= allowed
        out, weights = attend_weights(q, parts, Softmax(0.25))
        assert (out - exact).abs().max() <= allowed
        assert weights.shape[-1] == sum(part.n_tokens() for part in parts)


@pytest.mark.parametrize("has_sink", [False, True])
@pytest.mark.parametrize("cap", [0.0, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_want_weights_get_them_beside_others(dtype: torch.dtype, cap: float, has_sink: bool) -> None:
    """Of parts that one call of C++ takes, and of those that torch has to."""
    others, k, v = some_parts(dtype), draw(1, 2, 600, 16, seed=6, dtype=dtype), draw(1, 2, 600, 16, seed=7, dtype=dtype)
    idx = torch.stack([torch.randperm(600, generator=torch.Generator().manual_seed(i))[:300] for i in range(2)])
    idx[1, 4:9] = -1
    chosen = Part(k, v, (idx >= 0)[None], idx=idx[None])
    weighty = Part(k, v, bias=draw(1, 2, 600, seed=8))
    rows = [others[:1], [others[0], chosen], [weighty, others[2]], others[:3], others]
    wants, q = [False, True, True, True, True], draw(5, 6, 1, 16, dtype=dtype)
    softmax = Softmax(0.25, cap, draw(6, seed=9) if has_sink else None)
    out, weights = attend_rows(q, rows, softmax, wants)
    assert weights[0] is None
    for i, parts in enumerate(rows[1:], 1):
        expected, of_each = attend_weights(q[i : i + 1], parts, softmax)
        found = weights[i]
        assert found is not None and found.dtype == torch.float32
        torch.testing.assert_close(found, of_each, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(out[i : i + 1], expected)


def test_a_part_that_is_all_padding_changes_nothing() -> None:
    q, parts = draw(1, 6, 1, 16), some_parts(torch.float32)[:1]
    nothing = Part(draw(1, 2, 3, 16), draw(1, 2, 3, 16), mask=torch.zeros(1, 2, 3, dtype=torch.bool))
    torch.testing.assert_close(attend(q, [*parts, nothing], Softmax(0.25)), attend(q, parts, Softmax(0.25)))


def test_an_empty_part_changes_nothing() -> None:
    q, parts = draw(1, 6, 1, 16), some_parts(torch.float32)[:1]
    empty = Part(torch.empty(1, 2, 0, 16), torch.empty(1, 2, 0, 16))
    torch.testing.assert_close(attend(q, [*parts, empty], Softmax(0.25)), attend(q, parts, Softmax(0.25)))


def test_the_log_sum_exp_is_that_of_the_logits() -> None:
    q, part = draw(1, 6, 1, 16), some_parts(torch.float32)[0]
    _, lse = partial(q, part, Softmax(0.25))
    expected = (q @ part.k.repeat_interleave(3, 1).mT * 0.25).logsumexp(-1)
    torch.testing.assert_close(lse.reshape(1, 6, 1), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_part_that_rows_have_in_common_is_read_once(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    k, v = (draw(1, 2, MANY + 9, 16, seed=i, dtype=dtype) for i in (1, 2))
    common, own = Part(k[:, :, :MANY], v[:, :, :MANY]), some_parts(dtype)
    rows = [[common, own[0]], [own[1], Part(common.k, common.v)], [Part(k, v)], [common], [common, own[2]]]
    q, lengths = draw(5, 6, 1, 16, seed=9, dtype=dtype), list[int]()

    def counted(q: Tensor, part: Part, softmax: Softmax) -> tuple[Tensor, Tensor]:
        lengths.append(part.n_tokens())
        return partial(q, part, softmax)

    monkeypatch.setattr(engine_attend, "partial", counted)
    monkeypatch.setattr(engine_attend, "native_takes", lambda *_: False)
    out, weights = attend_rows(q, rows, Softmax(0.25), [False] * 4 + [True])
    assert lengths.count(MANY) == 1 and lengths.count(MANY + 9) == 1
    assert [x is None for x in weights] == [True] * 4 + [False]
    for i, parts in enumerate(rows):
        right = reference(q[i : i + 1], parts, 0.25)
        plain = (attend(q[i : i + 1], parts, Softmax(0.25)) - right).abs().max()
        assert (out[i : i + 1] - right).abs().max() <= 2 * plain + 4e-7
