"""FP8 against an independent implementation's codes and answers, its bytes, and what it refuses."""

from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from kvbench.engine.budget import BudgetRequest, resolve
from kvbench.engine.checkpoints.scales import cache_scales
from kvbench.engine.errors import ConfigError, NotFiniteError
from kvbench.engine.layouts.quantized import QuantizedLayer
from kvbench.engine.shapes import Checkpoint, ModelShape
from kvbench.evals.cells import cell_without_task
from kvbench.evals.settings import from_words
from kvbench.kernels.packed.floats import E4M3, E5M2, encode, values
from kvbench.methods.full import Full
from kvbench.methods.quantising import floats
from kvbench.methods.quantising.floats import CodedSide, FloatCache, FloatMethod
from kvbench.methods.quantising.fp8 import FP8
from kvbench.methods.rules import planned
from kvbench.tests.conformance import answers, model, trace_and_rows
from kvbench.tests.tiny import tiny
from kvbench.tests.vectors import Check, differs, first, load, row_of, step, trace_of

VECTORS = Path(__file__).parents[2] / "golden" / "fp8"
WHOLE = BudgetRequest(Fraction(1), None, Fraction(0))
PARAMS = FP8.Params("e4m3", "one", "prompt", "top", (), 0, "exact")
CPU = torch.device("cpu")


def run_vectors(path: Path) -> list[Check]:
    meta, arrays = load(path)
    return [(path.stem, cast(meta, arrays) if path.stem.startswith("cast") else answered(meta, arrays))]


def cast(meta: dict[str, Any], arrays: dict[str, np.ndarray]) -> str | None:
    """Single numbers of every kind, and what each code reads as."""
    form = {"e4m3": E4M3, "e5m2": E5M2}[meta["format"]]
    codes = encode(torch.from_numpy(arrays["x"]), form)
    table = values(form, CPU)
    return first(
        differs("codes", codes, arrays["code"]),
        differs("decoded", bits(table[codes.int()]), bits(arrays["decoded"])),
        differs("all values", bits(table), bits(arrays["all_values"])),
    )


def bits(x: Any) -> np.ndarray:
    """Numbers by their bits, but for those that are none."""
    numbers = np.asarray(x, np.float32)
    return np.where(np.isnan(numbers), 0x7FC00000, numbers.view(np.int32))


def answered(meta: dict[str, Any], arrays: dict[str, np.ndarray]) -> str | None:
    given = [None if r is None else float(r) for r in meta["range"]]
    reach: Any = "top" if given[0] is None else tuple(given)
    params = replace(PARAMS, format=meta["format"], scale=meta["scale"], range=reach, query=meta["query"])
    return run_steps(FP8, params, meta, arrays)


def run_steps(kind: type[FloatMethod], params: Any, meta: dict[str, Any], arrays: dict[str, np.ndarray]) -> str | None:
    """A prompt and the steps behind it: codes, scales, what is read of them, and outputs."""
    s, n = meta["S"], meta["n"]
    k, v = (torch.from_numpy(arrays[name]).unsqueeze(0) for name in "kv")
    row = row_of(kind, params, trace_of(k, v, meta["Hq"], s), WHOLE, n_new=n)
    outs = []
    for t in range(n):
        q = torch.from_numpy(arrays["q_step"][t])[None, :, None]
        outs.append(step(row, q, k[:, :, s + t : s + t + 1], v[:, :, s + t : s + t + 1], t + 1)[0, :, 0])
    quantized: FloatCache = row.store[0].quantized
    if row.store.allocated_bytes() != quantized.counted_bytes():
        return f"{quantized.counted_bytes()} bytes are counted, and {row.store.allocated_bytes()} are there"
    out, largest = torch.stack(outs), float(np.abs(arrays["out"]).max())
    compared = (compare(name, side, arrays, meta) for name, side in zip("kv", quantized.sides, strict=True))
    return first(*compared, differs("out", out / largest, arrays["out"] / largest, 1e-5))


def compare(name: str, side: CodedSide, arrays: dict[str, np.ndarray], meta: dict[str, Any]) -> str | None:
    """Codes where they are sure, scales, and numbers as attention sees them."""
    packed, code, given = side.packed, side.code, {x: arrays.get(f"{name}_{x}") for x in ("code", "scale", "global")}
    if given["global"] is not None and abs(float(side.shared) / float(given["global"]) - 1) > 1e-6:
        return f"{name}: the layer's scale is {float(side.shared)}, expected {float(given['global'])}"
    if meta.get("over") == [6, 4] and code.scale == "e4m3":
        return no_worse(name, side, arrays)
    return first(
        close_codes(f"{name} codes", packed.codes, given["code"], arrays[f"{name}_sure"], code.format.bits),
        scales_differ(f"{name} scales", packed.scales, given["scale"], side),
        relative(f"{name} as seen", side.rebuilt(), arrays.get(f"{name}_hat"), arrays[f"{name}_sure"]),
    )


def close_codes(name: str, ours: Tensor, theirs: Any, sure: np.ndarray, n_bits: int) -> str | None:
    """Equal where they are sure, else one apart with the same sign."""
    a, b = (unpacked(np.asarray(x), n_bits) for x in (ours, theirs))
    if problem := differs(name, a[sure], b[sure]):
        return problem
    half = 1 << (n_bits - 1)
    far = (np.abs(a % half - b % half) > 1) | (a // half != b // half)
    return f"{name}: {int(far.sum())} are more than one apart" if far.any() else None


def unpacked(codes: np.ndarray, n_bits: int) -> np.ndarray:
    wide = codes.astype(np.int64)
    return wide if n_bits == 8 else np.stack([wide & 15, wide >> 4], -1).reshape(*wide.shape[:-1], -1)


def scales_differ(name: str, ours: Tensor, theirs: Any, side: CodedSide) -> str | None:
    if ours.dtype == torch.uint8:
        # A block whose scale is not sure has codes that are not sure either, and has been compared with them.
        return None if np.abs(ours.int().numpy() - theirs.astype(np.int64)).max() <= 1 else f"{name} are far apart"
    found = ours[..., 0].numpy() if side.code.scale == "float" else side.shared.numpy().reshape(np.shape(theirs))
    return relative(name, found, theirs)


def relative(name: str, ours: Any, theirs: Any, where: Any = None) -> str | None:
    if theirs is None:
        return None
    a, b = (np.asarray(x, np.float64) for x in (ours, theirs))
    far = np.abs(a - b) > 1e-6 * np.abs(b)
    far = far if where is None else far & where
    return f"{name}: {int(far.sum())} are off by more than a millionth" if far.any() else None


def no_worse(name: str, side: CodedSide, arrays: dict[str, np.ndarray]) -> str | None:
    """Of each block the squared error, not the bytes: two choices may be equally good."""
    x = arrays[name].astype(np.float64)
    ours, theirs = (
        np.square(np.asarray(hat, np.float64) - x).reshape(*x.shape[:2], -1, 16).sum(-1)
        for hat in (side.rebuilt(), arrays[f"{name}_hat"])
    )
    far = np.abs(ours - theirs) > 1e-5 * theirs
    return f"{name}: {int(far.sum())} blocks have another error" if far.any() else None


@pytest.mark.parametrize("path", sorted(VECTORS.glob("*.npz")), ids=lambda path: path.stem)
def test_vectors(path: Path) -> None:
    for name, problem in run_vectors(path):
        assert problem is None, f"{name}: {problem}"


# --- bytes ---------------------------------------------------------------------------------------

LARGE, SMALL = ModelShape("l", 1, 32, 8, 128, 1 << 20, (0,)), ModelShape("s", 1, 9, 3, 64, 1 << 20, (0,))


def in_bytes(memory: str) -> BudgetRequest:
    return BudgetRequest(None, None, Fraction(0), memory=Fraction(memory))


@pytest.mark.parametrize(
    ("scale", "large", "small"),
    [("one", 0, 0), ("tensor", 8, 8), ("head", 64, 24), ("token_head", 8 * 8 * 10_000, 8 * 3 * 2000)],
)
def test_bytes_are_half_and_the_scales(scale: Any, large: int, small: int) -> None:
    params = replace(PARAMS, scale=scale)
    for shape, n, more in ((LARGE, 10_000, large), (SMALL, 2000, small)):
        plan = FP8.plan_for(params, resolve(WHOLE, n, drops=False), shape)
        assert FP8.code_bytes(plan, n, shape) == 2 * shape.h_kv * shape.d_h * n + more


@pytest.mark.parametrize(
    ("scale", "memory", "fits"),
    [("one", "1/2", True), ("tensor", "1/2", False), ("head", "1/2", False), ("token_head", "33/64", True)],
)
def test_half_of_the_bytes_fits_without_scales_alone(scale: Any, memory: str, fits: bool) -> None:
    params = replace(PARAMS, scale=scale)
    if fits:
        assert planned(FP8, params, in_bytes(memory), LARGE, 10_000)[1].key.format is E4M3
        return
    with pytest.raises(ConfigError, match=r"use memory=0\.5001 or more"):
        planned(FP8, params, in_bytes(memory), LARGE, 10_000)
    assert planned(FP8, replace(params, source="file"), in_bytes(memory), LARGE, 10_000), "of a file they are constants"


@pytest.mark.parametrize(("scale", "least"), [("one", "0.5"), ("token_head", "33/64")])
def test_a_quarter_names_the_least_another_format_and_the_composition(scale: Any, least: str) -> None:
    with pytest.raises(ConfigError) as caught:
        planned(FP8, replace(PARAMS, scale=scale), in_bytes("1/4"), LARGE, 10_000)
    for words in (f"use memory={least} or more", "method=nvfp4", "method=snapkv compose=fp8"):
        assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("residual", [0, 3, 16])
@pytest.mark.parametrize("scale", ["one", "tensor", "head", "token_head"])
def test_each_step_s_books_are_the_bytes_of_its_tensors(scale: Any, residual: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    k, v = torch.randn(2, 1, 3, 47, 32).to(dtype)
    params = replace(PARAMS, scale=scale, residual=residual)
    row = row_of(FP8, params, trace_of(k, v, 9, 40), WHOLE, n_new=7)
    for t in range(7):
        at = slice(40 + t, 41 + t)
        assert step(row, torch.randn(1, 9, 1, 32).to(dtype), k[:, :, at], v[:, :, at], t + 1).isfinite().all()
        entry, n = row.store.ledger.entries[-1], 41 + t
        coded = n - min(n, residual)
        scales = {"one": 0, "tensor": 8, "head": 24, "token_head": 24 * coded}[scale]
        assert entry.resident_kv_bytes == 3 * 32 * (2 * coded + 4 * (n - coded)) + scales
    quantized: FloatCache = row.store[0].quantized
    if not residual:
        assert sum(x.nbytes for x in quantized.tensors()) == quantized.counted_bytes()
    seen = quantized.rebuilt()[0]
    assert torch.equal(seen[:, :, 47 - residual :], k[:, :, 47 - residual :]), "the latest are exact"
    assert residual == 47 or not torch.equal(seen[:, :, : 47 - residual], k[:, :, : 47 - residual])


# --- what is attended to -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_residual_of_all_tokens_is_full_attention_bit_for_bit(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    k, v = torch.randn(2, 1, 2, 210, 64).to(dtype)
    kinds = ((FP8, replace(PARAMS, residual=210)), (Full, Full.Params()))
    rows = [row_of(kind, params, trace_of(k, v, 8, 200), WHOLE, n_new=10) for kind, params in kinds]
    for t in range(10):
        q, at = torch.randn(1, 8, 1, 64).to(dtype), slice(200 + t, 201 + t)
        ours, full = (step(row, q, k[:, :, at], v[:, :, at], t + 1) for row in rows)
        assert torch.equal(ours, full)


def test_the_whole_memory_is_full_attention() -> None:
    whole = FP8.variant_for(PARAMS, in_bytes("1"), model().shape, 240)
    full = Full.variant_for(Full.Params(), WHOLE, model().shape, 240)
    said, reference = answers([whole, full])
    assert whole.is_full and said.ids == reference.ids


def off(kind: type[FloatMethod], params: Any, k: Tensor, v: Tensor, seed: int = 0) -> float:
    """How far the output of a step is from exact attention, relative."""
    q = torch.randn(1, 8, 1, k.shape[3], generator=torch.Generator().manual_seed(seed))
    n = k.shape[2] - 1
    row = row_of(kind, params, trace_of(k, v, 8, n), WHOLE, n_new=1)
    out = step(row, q, k[:, :, n:], v[:, :, n:])
    heads = [x.repeat_interleave(8 // x.shape[1], 1) for x in (k, v)]
    truth = ((q @ heads[0].mT) * k.shape[3] ** -0.5).softmax(-1) @ heads[1]
    return float((out - truth).norm() / truth.norm())


def test_e4m3_is_nearer_than_e5m2_and_a_scale_per_token_no_further_than_none() -> None:
    torch.manual_seed(1)
    k, v = torch.randn(2, 1, 2, 300, 64)
    assert off(FP8, PARAMS, k, v) < off(FP8, replace(PARAMS, format="e5m2"), k, v)
    one, each = (off(FP8, replace(PARAMS, scale=scale), k * 1e-3, v * 1e-3) for scale in ("one", "token_head"))
    assert each <= one / 3, "values of a thousandth are subnormal"


def test_a_step_s_codes_do_not_depend_on_who_is_beside() -> None:
    torch.manual_seed(0)
    k, v = torch.randn(2, 1, 2, 60, 32)
    params = replace(PARAMS, scale="tensor")
    alone = row_of(FP8, params, trace_of(k, v, 8), WHOLE).store[0].quantized
    louder = row_of(FP8, params, trace_of(9 * k, v, 8), WHOLE).store[0].quantized
    again = row_of(FP8, params, trace_of(k, v, 8), WHOLE).store[0].quantized
    for ours, same in zip(alone.tensors(), again.tensors(), strict=True):
        assert torch.equal(ours[..., :60, :] if ours.ndim == 3 and ours.shape[1] > 1 else ours, same[..., :60, :])
    assert not torch.equal(alone.sides[0].shared, louder.sides[0].shared)


def test_scales_of_the_prompt_stay_and_larger_tokens_saturate() -> None:
    torch.manual_seed(0)
    k, v = torch.randn(2, 1, 2, 41, 32)
    k[:, :, 40] *= 100
    row = row_of(FP8, replace(PARAMS, scale="head"), trace_of(k, v, 8, 40), WHOLE, n_new=1)
    side = row.store[0].quantized.sides[0]
    before = side.shared.clone()
    step(row, torch.randn(1, 8, 1, 32), k[:, :, 40:], v[:, :, 40:])
    assert torch.equal(side.shared, before) and torch.equal(before.flatten() * 448, k[0, :, :40].abs().amax((1, 2)))
    largest = side.rebuilt()[:, 40].abs().amax(-1)
    torch.testing.assert_close(largest, before.flatten() * 448)


def test_an_all_zero_layer_has_scale_one() -> None:
    k = torch.zeros(1, 2, 20, 32)
    for scale in ("tensor", "head", "token_head"):
        row = row_of(FP8, replace(PARAMS, scale=scale), trace_of(k, k, 8), WHOLE)
        side = row.store[0].quantized.sides[0]
        assert (side.shared == 1).all() and not side.rebuilt().any()


def test_queries_can_be_coded_too() -> None:
    torch.manual_seed(0)
    k, v = torch.randn(2, 1, 2, 33, 64)
    row = row_of(FP8, replace(PARAMS, query="fp8"), trace_of(k, v, 8, 32), WHOLE, n_new=1)
    q = torch.randn(1, 8, 1, 64)
    scale = (q.abs().amax(-1, keepdim=True) / 448).clamp(min=1e-6)
    seen = values(E4M3, CPU)[encode(q * (1 / scale), E4M3).int()] * scale
    out = step(row, q, k[:, :, 32:], v[:, :, 32:])
    made_k, made_v = (x.repeat_interleave(4, 1) for x in row.store[0].quantized.rebuilt())
    expected = ((seen @ made_k.mT) / 8).softmax(-1) @ made_v
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-5)


def test_named_layers_stay_whole_and_count_whole() -> None:
    params = replace(PARAMS, skip_layers=(0, 2))
    (said,) = answers([FP8.variant_for(params, WHOLE, model().shape, 240)])
    assert [isinstance(said.row.store[layer], QuantizedLayer) for layer in range(3)] == [False, True, False]
    assert planned(FP8, params, in_bytes("5/6"), model().shape, 240)
    with pytest.raises(ConfigError, match="use memory=5/6 or more"):
        planned(FP8, params, in_bytes("4/5"), model().shape, 240)
    assert FP8.whole_layers(replace(PARAMS, skip_layers="sliding"), model().shape) == []


def test_a_latent_is_coded_once() -> None:
    shape = ModelShape("latent", 1, 8, 1, 48, 1 << 20, (0,), value_width=32, is_latent=True)
    latents = torch.randn(1, 1, 30, 48)
    scales = [torch.ones(1, 1, 1)] * 2
    plan = FP8.plan_for(PARAMS, resolve(WHOLE, 30, drops=False), shape)
    quantized = FloatCache(plan, latents, latents[..., :32], 0, scales)
    k, v = quantized.rebuilt()
    assert torch.equal(k[..., :32], v) and quantized.counted_bytes() == 30 * 48 == FP8.code_bytes(plan, 30, shape)
    assert sum(x.nbytes for x in quantized.tensors()) == 30 * 48


def test_a_key_that_is_no_number_names_its_layer_and_token() -> None:
    k, v = torch.randn(2, 1, 2, 20, 32)
    v[0, 1, 7, 3] = torch.nan
    with pytest.raises(NotFiniteError, match="layer 0: the value of token 7"):
        row_of(FP8, PARAMS, trace_of(k, v, 8), WHOLE)
    v[0, 1, 7, 3] = torch.inf
    row = row_of(FP8, PARAMS, trace_of(k, v, 8), WHOLE)
    assert row.store[0].quantized.sides[1].rebuilt()[1, 7, 3] == 448


# --- scales of the checkpoint --------------------------------------------------------------------


def checkpoint_of(folder: Path, tensors: dict[str, Tensor]) -> Checkpoint:
    save_file({"model.embed.weight": torch.ones(2)} | tensors, folder / "model.safetensors")
    return Checkpoint(replace(SMALL, n_layers=2, attention_layers=(0, 1)), ("a",), 16, where=str(folder))


def test_scales_of_a_checkpoint_are_found_by_their_names(tmp_path: Path) -> None:
    tensors = {
        "model.layers.0.self_attn.k_proj.k_scale": torch.tensor([0.5], dtype=torch.bfloat16),
        "model.layers.0.self_attn.v_proj.v_scale": torch.tensor(0.25),
        "model.layers.1.self_attn.attn.v_scale": torch.tensor([0.5, 1.0, 2.0]),
    }
    checkpoint = checkpoint_of(tmp_path, tensors)
    found = cache_scales(checkpoint.where)
    assert found == {0: ((0.5,), (0.25,)), 1: ((0.5, 1.0, 2.0), (0.5, 1.0, 2.0))}, "one that is found serves both"
    FP8.check_model(replace(PARAMS, scale="head", source="file"), checkpoint)
    with pytest.raises(ConfigError, match=r"with method\.scale=head"):
        FP8.check_model(replace(PARAMS, scale="tensor", source="file"), checkpoint)


def test_a_checkpoint_without_scales_asked_for_them_is_a_sentence(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path, {})
    with pytest.raises(ConfigError, match="k_scale and v_scale, and 's' has none; use prompt"):
        FP8.check_model(replace(PARAMS, scale="tensor", source="file"), checkpoint)
    FP8.check_model(replace(PARAMS, scale="tensor", source="found"), checkpoint)


def test_a_scale_that_is_none_is_a_sentence(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path, {"model.layers.0.self_attn.k_scale": torch.tensor(0.0)})
    with pytest.raises(ConfigError, match="a scale is above 0"):
        FP8.check_model(replace(PARAMS, scale="tensor", source="file"), checkpoint)


def test_scales_of_the_checkpoint_are_read_for_each_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any they are 1, as in vLLM; neither is counted."""
    found = {1: ((0.5,), (0.25,))}
    monkeypatch.setattr(floats, "cache_scales", lambda where: found)
    params = replace(PARAMS, scale="tensor", source="found")
    given = tiny("llama")
    (row,) = trace_and_rows([FP8.variant_for(params, WHOLE, given.shape, 240)], 4, given)[1]
    scales = [[float(side.shared) for side in row.store[layer].quantized.sides] for layer in range(3)]
    assert scales == [[1.0, 1.0], [0.5, 0.25], [1.0, 1.0]]
    assert row.store[1].quantized.counted_bytes() == 240 * 2 * 8 * 2


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["method.source=file"], "use method.scale=tensor or head"),
        (["method=fp8_token_head", "method.source=file"], "use method.scale=tensor or head"),
        (["method.range=[200,100]"], "use method.scale=tensor with method.source=prompt"),
        (["method.scale=head", "method.range=[200,100]"], "use method.scale=tensor"),
        (["method.scale=tensor", "method.range=[0,100]"], "method.range"),
        (["method.skip_layers=all"], "method.skip_layers"),
        (["method.format=e3m4"], "use e4m3 or e5m2"),
        (["ratio=1/2"], "attends to everything"),
    ],
)
def test_what_cannot_be_asked_is_one_sentence(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        cell = cell_without_task(from_words(["method=fp8", *words]))
        FP8.check(cell.params, cell.settings.budget, SMALL)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_layers_that_are_not_there_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"method\.skip_layers names layer 7"):
        FP8.check(replace(PARAMS, skip_layers=(7,)), WHOLE, LARGE)
    with pytest.raises(ConfigError, match="leaves no layer"):
        FP8.check(replace(PARAMS, skip_layers=(0,)), WHOLE, LARGE)


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("fp8", "FP8"),
        ("fp8_e5m2", "FP8 (e5m2)"),
        ("fp8_vllm", "FP8 (the checkpoint's scale per layer)"),
        ("fp8_fa3", "FP8 (the checkpoint's scale per head, queries too)"),
        ("fp8_token_head", "FP8 (a scale per token)"),
        ("fp8_range", "FP8 (a scale per layer)"),
    ],
)
def test_presets_say_what_they_are(name: str, label: str) -> None:
    assert FP8.label(cell_without_task(from_words([f"method={name}"])).params, WHOLE) == label
