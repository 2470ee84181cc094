"""KVarN against vectors of its page, its bytes against those that are allocated, and what it refuses."""

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from kvbench.engine.attend import partial
from kvbench.engine.budget import BudgetRequest
from kvbench.engine.errors import ConfigError
from kvbench.engine.shapes import ModelShape
from kvbench.engine.softmax import Softmax
from kvbench.evals.cells import cell_without_task, check
from kvbench.evals.settings import from_words
from kvbench.kernels.packed.attend import attend_packed_ref, takes_packed
from kvbench.kernels.packed.codes import quantise_channels, rebuild_channels, unpack
from kvbench.methods.combinations import SHAPE
from kvbench.methods.full import Full
from kvbench.methods.quantising import codebooks
from kvbench.methods.quantising.kvarn import SETTINGS, KVarN, KVarNCache, Tiles, coded, halves, rebuilt
from kvbench.methods.rules import Quantizer, planned
from kvbench.tests.conformance import answers, model, ours
from kvbench.tests.vectors import Check, built, differs, first, load, row_of, step, trace_of

VECTORS = Path(__file__).parents[2] / "golden" / "kvarn"
PARAMS = KVarN.Params(4, 2, 128, "group", 8)
SMALL_TILES = KVarN.Params(4, 2, 64, "group", 8)
WHOLE = BudgetRequest(Fraction(1), None, Fraction(0))
LARGE, SMALL = ModelShape("l", 1, 32, 8, 128, 1 << 20, (0,)), ModelShape("s", 1, 9, 3, 64, 1 << 20, (0,))


def in_bytes(memory: str) -> BudgetRequest:
    return BudgetRequest(None, None, Fraction(0), memory=Fraction(memory))


def plan_of(key_bits: int, value_bits: int, group: int, sink: int | None = None) -> KVarN.Plan:
    return KVarN.Plan(key_bits, value_bits, group, group if sink is None else sink, 8)


def run_vectors(path: Path) -> list[Check]:
    """A prompt, and the steps of those that have some, through the engine."""
    meta, arrays = load(path)
    s, n = meta["S"], meta["n"]
    params = KVarN.Params(meta["key_bits"], meta["value_bits"], meta["group"], meta["sink"], meta["iterations"])
    k, v = (torch.from_numpy(arrays[name]).unsqueeze(0) for name in "kv")
    row = row_of(KVarN, params, trace_of(k, v, meta["Hq"], s), WHOLE, n_new=n)
    quantized: KVarNCache = row.store[0].quantized
    counts, outs = [counts_of(quantized)], []
    for t in range(n):
        q, at = torch.from_numpy(arrays["q_step"][t])[None, :, None], slice(s + t, s + t + 1)
        outs.append(step(row, q, k[:, :, at], v[:, :, at], t + 1)[0, :, 0])
        counts.append(counts_of(quantized))
    problems = [differs("counts", counts, arrays["counts"])]
    if n:
        problems.append(differs("out", torch.stack(outs), arrays["out"], 2e-3 * np.abs(arrays["out"]).max()))
    if meta["tiles"]:
        for name, tiles, bits in zip("kv", quantized.filled(), (params.key_bits, params.value_bits), strict=True):
            problems += tiles_differ(name, tiles, bits, arrays)
    if "k_rot" in arrays:
        turned = {name: halves(x[0] @ quantized.turn) for name, x in (("k", k), ("v", v))}
        problems += [differs(f"{name} turned", turned[name], arrays[f"{name}_rot"]) for name in "kv"]
    if "k_hat" in arrays:
        seen = zip("kv", quantized.rebuilt(), strict=True)
        problems += [
            differs(f"{name} as seen", x[0], arrays[f"{name}_hat"], 2e-3 * float(x.abs().max())) for name, x in seen
        ]
    return [(path.stem, first(*problems))]


def counts_of(quantized: KVarNCache) -> list[int]:
    return [quantized.n_tiles * quantized.plan.group, quantized.n_exact]


def tiles_differ(name: str, tiles: Tiles, bits: int, arrays: dict[str, np.ndarray]) -> list[str | None]:
    """Codes where rounding is sure exactly, others one apart; numbers of equal codes, never scales alone."""
    theirs = Tiles(*(torch.from_numpy(arrays[f"{name}_{what}"]) for what in ("code", "scale", "zero", "other")))
    mine, expected = (unpack(x.codes, bits, x.others.shape[-1]).int() for x in (tiles, theirs))
    sure = np.unpackbits(arrays[f"{name}_sure"], axis=-1, bitorder="little").astype(bool)
    numbers, largest = rebuilt(theirs, bits), rebuilt(theirs, bits).abs().amax((-2, -1), keepdim=True)
    off = ((rebuilt(tiles, bits) - numbers) / largest).where(mine == expected, 0)
    return [
        differs(f"sure codes of {name}", mine.numpy()[sure], expected.numpy()[sure]),
        differs(f"codes of {name}", mine, expected, 1),
        differs(f"numbers of {name}", off, torch.zeros_like(off), 2e-3),
        differs(f"bytes of {name}", bytes_of(tiles), bytes_of(theirs)),
    ]


def bytes_of(tiles: Tiles) -> int:
    return sum(x.nbytes for x in tiles)


@pytest.mark.parametrize("path", sorted(VECTORS.glob("*.npz")), ids=lambda path: path.stem)
def test_vectors(path: Path) -> None:
    for name, problem in run_vectors(path):
        assert problem is None, f"{name}: {problem}"


@pytest.mark.parametrize(
    ("plan", "tile", "large", "small"),
    [
        ((4, 4, 128), 17_920, "0.2839", "0.3595"),
        ((4, 4, 64), 9_344, "0.2909", "0.3250"),
        ((4, 2, 128), 13_824, "0.2223", "0.3035"),
        ((4, 2, 64), 7_296, "0.2289", "0.2650"),
        ((2, 2, 128), 9_728, "0.1607", "0.2475"),
        ((2, 2, 64), 5_248, "0.1669", "0.2050"),
    ],
)
def test_the_page_s_bytes_are_those_that_are_allocated(
    plan: tuple[int, int, int], tile: int, large: str, small: str
) -> None:
    made = plan_of(*plan)
    assert made.tile_bytes(128) == tile
    assert f"{KVarN.code_bytes(made, 10_000, LARGE) / 40_960_000:.4f}" == large
    n_bytes = KVarN.code_bytes(made, 2000, SMALL)
    assert f"{n_bytes / 1_536_000:.4f}" == small
    k, v = torch.randn(2, 1, 3, 2000, 64).bfloat16()
    quantized = KVarNCache(replace(made, iterations=1), k, v, 0)
    assert quantized.counted_bytes() == n_bytes == sum(x.nbytes for x in quantized.tensors())


def test_a_layer_s_bytes_in_the_page() -> None:
    assert KVarN.code_bytes(plan_of(4, 4, 128), 10_000, LARGE) == 11_628_544
    assert KVarN.code_bytes(plan_of(4, 2, 128), 10_000, LARGE) == 9_105_408
    assert KVarN.code_bytes(plan_of(4, 2, 128), 2000, SMALL) == 466_176
    assert KVarN.code_bytes(plan_of(4, 2, 64), 2000, SMALL) == 407_040


@pytest.mark.parametrize("sink", [0, 64, 128])
@pytest.mark.parametrize("n", [1, 63, 64, 127, 128, 190, 256])
def test_books_have_the_formula_at_every_step_and_what_lies_there_at_the_last(sink: int, n: int) -> None:
    """A block is packed at the end of the step that fills it, which had it exact."""
    plan, d, last = plan_of(4, 2, 64, sink), 32, 70
    k, v = torch.randn(2, 1, 2, n + last, d).bfloat16()
    quantized = KVarNCache(plan, k[:, :, :n], v[:, :, :n], last)
    for t in range(n, n + last):
        assert counts_of(quantized) == [64 * max(0, t // 64 - sink // 64), t - 64 * max(0, t // 64 - sink // 64)]
        assert quantized.counted_bytes() == KVarN.code_bytes(plan, t, ModelShape("x", 1, 4, 2, d, 1 << 20, (0,)))
        quantized.append(k[:, :, t : t + 1], v[:, :, t : t + 1])
        exact = quantized.parts()[-1]
        assert torch.equal(exact.k[:, :, -1:], k[:, :, t : t + 1]), "the current token is exact"
        assert sum(part.n_tokens() for part in quantized.parts()) == t + 1
        quantized.pack_due()
    unused = sum(late.shape[2] - quantized.n_exact for late in quantized.late) * 2 * d * 2
    assert sum(x.nbytes for x in quantized.tensors()) == quantized.counted_bytes() + unused


def test_steps_pack_a_block_as_the_prompt_does() -> None:
    """But for float32 products of other shapes."""
    torch.manual_seed(0)
    k, v = torch.randn(2, 1, 2, 200, 64)
    at_once, later = (
        KVarNCache(plan_of(4, 2, 64), k, v, 0),
        KVarNCache(plan_of(4, 2, 64), k[:, :, :100], v[:, :, :100], 100),
    )
    for t in range(100, 200):
        later.append(k[:, :, t : t + 1], v[:, :, t : t + 1])
        later.pack_due()
    for mine, expected in zip(later.rebuilt(), at_once.rebuilt(), strict=True):
        assert (mine - expected).norm() < 0.02 * expected.norm()
        assert torch.equal(mine[:, :, :64], expected[:, :, :64]), "the sink is exact"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_below_two_blocks_it_is_full_attention_bit_for_bit(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    k, v = torch.randn(2, 1, 2, 128, 64).to(dtype)
    rows = [row_of(KVarN, SMALL_TILES, trace_of(k[:, :, :90], v[:, :, :90], 8), WHOLE)]
    rows.append(row_of(Full, Full.Params(), rows[0].trace, WHOLE))
    for t in range(90, 128):
        q = torch.randn(1, 8, 1, 64).to(dtype)
        mine, full = (step(row, q, k[:, :, t : t + 1], v[:, :, t : t + 1], t - 89) for row in rows)
        assert torch.equal(mine, full), f"step {t - 89}"


def test_the_whole_memory_is_exact() -> None:
    variant = KVarN.variant_for(SMALL_TILES, in_bytes("1"), model().shape, 240)
    full = Full.variant_for(Full.Params(), WHOLE, model().shape, 240)
    said, expected = answers([variant, full])
    assert variant.is_full and said.ids == expected.ids


@pytest.mark.parametrize("cap", [0.0, 5.0])
@pytest.mark.parametrize("plan", [(4, 4, 128), (4, 2, 64), (2, 2, 64)])
def test_attention_to_codes_is_that_to_rebuilt_numbers(plan: tuple[int, int, int], cap: float) -> None:
    torch.manual_seed(0)
    k, v, q = torch.randn(1, 2, 400, 64), torch.randn(1, 2, 400, 64), torch.randn(1, 6, 1, 64)
    quantized = KVarNCache(plan_of(*plan), k, v, 0)
    part, softmax = quantized.part(), Softmax(64**-0.5, cap)
    assert part.packed is not None and not takes_packed(q, part.packed)
    out, lse = partial(q, part, softmax)
    expected, its_lse = attend_packed_ref(q, part.packed, softmax.scale, cap)
    torch.testing.assert_close(out.reshape(1, 6, 1, 64), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.reshape(1, 6, 1), its_lse, atol=1e-5, rtol=1e-5)


def made_keys(n: int, d: int) -> Tensor:
    """Keys with a few channels that are large for all tokens, and tokens of uneven size, (1, n, d)."""
    draw = torch.Generator().manual_seed(0)
    channels = 1 + 9 * (torch.rand(d, generator=draw) > 0.9)
    sizes = (0.7 * torch.randn(n, 1, generator=draw)).exp()
    offset = 3 * torch.randn(d, generator=draw) * (channels > 1)
    return ((torch.randn(n, d, generator=draw) * channels + offset) * sizes)[None]


def seen(x: Tensor, bits: int) -> Tensor:
    """One tile of keys (1, 128, d) as attention sees it."""
    turn = codebooks.hadamard(x.shape[2])
    return rebuilt(coded((x @ turn).half().float().mT, bits, 8), bits).mT @ turn


def off(x: Tensor, exact: Tensor) -> float:
    return float((x - exact).norm() / exact.norm())


def sizes_off(x: Tensor, exact: Tensor) -> float:
    return float((x.norm(dim=-1) / exact.norm(dim=-1) - 1).abs().mean())


@pytest.mark.parametrize("bits", [4, 2])
def test_keys_lose_less_than_without_turn_and_scales(bits: int) -> None:
    """KIVI in one group of 128 is the same rounding; what is won most is the size of a token."""
    keys = made_keys(128, 128)
    plain = rebuild_channels(quantise_channels(keys, bits, 128), bits, 128)
    mine = seen(keys, bits)
    assert off(mine, keys) < 0.7 * off(plain, keys)
    assert sizes_off(mine, keys) < 0.2 * sizes_off(plain, keys)


@pytest.mark.parametrize("bits", [4, 2])
def test_odd_tiles_are_finite(bits: int) -> None:
    """Constant rows, zeros, one token 30 times larger, all zeros, and numbers beyond float16's."""
    x = made_keys(128, 64)
    x[0, :, 9] = 2.0
    x[0, 3], x[0, 5], x[:, 7] = 0, 0.5, 30 * x[:, 7]
    for keys in (x, torch.zeros_like(x), torch.ones_like(x), 1e5 * x, 1e-7 * x, 1e30 * x):
        quantized = KVarNCache(plan_of(bits, bits, 128, 0), keys[None], keys[None], 0)
        assert all(number.isfinite().all() for number in quantized.rebuilt())
    assert not KVarNCache(plan_of(bits, bits, 128, 0), x[None], x[None], 0).rebuilt()[1][0, 0, 3].any()


@pytest.mark.parametrize(
    ("memory", "shape", "s", "plan"),
    [
        ("1/2", LARGE, 10_000, (4, 4, 128)),
        ("1/2", SMALL, 2000, (4, 4, 128)),
        ("1/4", LARGE, 10_000, (4, 2, 128)),
        ("1/4", SMALL, 2000, (2, 2, 128)),
        ("0.33", SMALL, 2000, (4, 4, 64)),
        ("1/5", LARGE, 10_000, (2, 2, 128)),
        ("0.206", SMALL, 2000, (2, 2, 64)),
    ],
)
def test_memory_takes_the_first_setting_that_fits(
    memory: str, shape: ModelShape, s: int, plan: tuple[int, int, int]
) -> None:
    _, made, _ = planned(KVarN, PARAMS, in_bytes(memory), shape, s)
    assert made == plan_of(*plan)


def test_a_sink_of_its_own_leaves_settings_out_whose_blocks_it_would_cut() -> None:
    params = replace(SMALL_TILES, sink=64)
    budget = KVarN.budget_for(params, WHOLE, 2000)
    assert [*KVarN.candidates(params, budget, SMALL)] == [plan_of(*one, 64) for one in SETTINGS if one[2] == 64]
    assert {plan.sink for plan in KVarN.candidates(replace(PARAMS, sink=0), budget, SMALL)} == {0}


def test_too_little_memory_names_the_least_and_a_composition() -> None:
    with pytest.raises(ConfigError, match=r"use memory=0\.1607 or more, or method=snapkv compose=kvarn"):
        planned(KVarN, PARAMS, in_bytes("1/8"), LARGE, 10_000)
    planned(KVarN, PARAMS, in_bytes("0.1607"), LARGE, 10_000)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["method=kvarn", "ratio=0.2"], r"ratio=0\.2 drops tokens, and KVarN attends to everything"),
        (["method=kvarn", "ratio=1", "method.group=32"], r"method\.group=32"),
        (["method=kvarn", "ratio=1", "method.key_bits=3"], r"method\.key_bits=3"),
        (["method=kvarn", "ratio=1", "method.sink=100"], r"no multiple of method\.group=128, .*; use 128, or group"),
        (["method=kvarn", "ratio=1", "method.iterations=0"], r"method\.iterations=0"),
        (["method=pqcache", "ratio=0.2", "compose=kvarn"], "KVarN makes no codes of single tokens"),
        (["method=clusterkv", "ratio=0.2", "compose=kvarn"], "KVarN makes no codes of single tokens"),
        (["method=quest", "ratio=0.2", "compose=kvarn"], "Quest drops no tokens"),
        (["method=pyramidkv", "ratio=0.2", "compose=kvarn"], "other numbers of tokens"),
        (["method=adakv", "ratio=0.2", "compose=kvarn"], "other numbers of tokens"),
        (["method=snapkv_paper", "ratio=0.2", "compose=kvarn"], "each query head keeps tokens of its own"),
        (["method=kvarn", "memory=1/2", "compose=kivi"], "nothing is packed twice"),
    ],
)
def test_what_is_refused_is_one_sentence(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        refuse_shape(words, SMALL)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        (replace(SMALL, d_h=80), "needs a power of two, and s has 80 dimensions; use kivi in its place"),
        (replace(SMALL, value_width=32), "turns both by one matrix"),
    ],
)
def test_shapes_that_it_cannot_turn_are_refused(shape: ModelShape, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        refuse_shape(["method=kvarn", "ratio=1"], shape)
    with pytest.raises(ConfigError, match=said):
        refuse_shape(["method=snapkv", "ratio=0.2", "compose=kvarn"], shape)


def refuse_shape(words: list[str], shape: ModelShape) -> None:
    check(replace(cell_without_task(from_words(words)), shape=shape), SHAPE)


@pytest.mark.parametrize(
    "name", ["snapkv", "streamingllm", "keydiff_kvpress", "lagkv", "cur", "knorm_kvpress", "tova_kvpress", "chunkkv"]
)
@pytest.mark.parametrize("order", ["drop_first", "quantise_first"])
def test_what_methods_keep_becomes_tiles(name: str, order: str) -> None:
    one = ours(name, *(["method.generated=on_top"] if name == "streamingllm" else []))
    quantizer = Quantizer(KVarN, KVarN.Params(4, 2, 64, 0, 2), order == "quantise_first")
    variant = one.kind.variant_for(one.params, in_bytes("2/5"), model().shape, 240, quantizer=quantizer)
    (said,) = answers([variant])
    ledger, n = said.row.store.ledger, variant.budget.tokens
    assert ledger.within_memory(variant.budget, model().shape, with_index=False)
    assert n > 96, "codes make room for more tokens"
    assert {entry.attended for entry in ledger.entries if entry.step == 3} == {6 * (n + 3)}
    assert {said.row.store[layer].quantized.n_tiles for layer in range(3)} == {(n + 10) // 64}


def test_tiles_are_of_kept_tokens_in_order_behind_the_first_of_them() -> None:
    streaming = ours("streamingllm")
    params = type(streaming.params)(4, "on_top", "original")
    torch.manual_seed(0)
    k, v = torch.randn(2, 1, 2, 300, 16)
    trace, request = trace_of(k, v, 4), BudgetRequest(None, 140, Fraction(0))
    quantizer = Quantizer(KVarN, SMALL_TILES)
    variant = streaming.kind.variant_for(params, request, trace.shape, 300, quantizer=quantizer)
    row = built(variant.row(trace, 4))
    kept = torch.cat([torch.arange(4), torch.arange(164, 300)])
    assert row.store[0].positions()[0, 0].tolist() == kept.tolist()
    alone = KVarNCache(plan_of(4, 2, 64), k[:, :, kept], v[:, :, kept], 4)
    for mine, expected, exact in zip(row.store[0].quantized.rebuilt(), alone.rebuilt(), (k, v), strict=True):
        assert torch.equal(mine, expected)
        assert torch.equal(mine[:, :, :64], exact[:, :, kept[:64]]) and torch.equal(mine[:, :, 128:], exact[:, :, 288:])


NAMES = {"kvarn": "KVarN K4 V2 bit", "kvarn_k4v4": "KVarN 4 bit", "kvarn_paper": "KVarN 2 bit"}


def test_labels_have_the_bits() -> None:
    labels = {name: cell_without_task(from_words([f"method={name}", "ratio=1"])).label for name in NAMES}
    assert labels == NAMES
    assert cell_without_task(from_words(["method=kvarn", "memory=1/2"])).label == "KVarN"
    composed = cell_without_task(from_words(["method=snapkv", "ratio=0.2", "compose=kvarn_paper"]))
    assert composed.label.endswith("+ KVarN 2 bit")
    assert KVarN.chosen({"key_bits": 4, "value_bits": 4}) == "4 bit"
