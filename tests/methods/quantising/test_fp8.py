"""FP8 against an independent implementation's codes and answers, its bytes, and what it refuses."""

from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvbench.engine.budget import BudgetRequest
from kvbench.kernels.packed.floats import E4M3, E5M2, encode, values
from kvbench.methods.quantising.floats import CodedSide, FloatCache, FloatMethod
from kvbench.methods.quantising.fp8 import FP8
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
