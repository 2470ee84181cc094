"""Attention over packed K and V against bfloat16 attention over the same tokens: one layer of Llama-3.1-8B's shape.

`python -m kvbench.benchmarks.bench_packed [TOKENS]`: both in turn in one process, the median of the rounds' ratios. The
least that a ratio can be is that of the bytes: 0.31 with 4 bits and scales of 16 for every 32, 0.19 with 2; 0.5 with
fp8, 0.28 with nvfp4.

Not here: whether the answers agree (`tests/kernels/test_packed.py`).
"""

import sys
from statistics import median
from time import perf_counter

import torch

from kvbench.engine.attend import Part, attend
from kvbench.engine.softmax import Softmax
from kvbench.kernels.packed.attend import Packed, Side, attend_packed
from kvbench.kernels.packed.codes import BY_CHANNEL, BY_FLOAT, BY_TOKEN, quantise_channels, quantise_tokens
from kvbench.kernels.packed.floats import E2M1, E4M3, E5M2, FloatCode, measured, quantise_floats, tables
from kvbench.kernels.select_attend import Tokens, attend_parts_native

H, H_KV, D, GROUP, RESIDUAL, ROUNDS = 32, 8, 128, 32, 128, 30
FP8, NVFP4 = FloatCode(E4M3), FloatCode(E2M1, 16, "e4m3", "layer", E2M1.top * E4M3.top)
FLOATS = {
    "fp8": (FP8, FP8),
    "fp8 per token": (FloatCode(E4M3, scale="float"),) * 2,
    "fp8, e5m2": (FloatCode(E5M2),) * 2,
    "fp8, nvfp4": (FP8, NVFP4),
    "nvfp4": (NVFP4, NVFP4),
    "mxfp8": (FloatCode(E4M3, 32, "e8m0"),) * 2,
    "mxfp4": (FloatCode(E2M1, 32, "e8m0"),) * 2,
}


def packed_of(k: torch.Tensor, v: torch.Tensor, bits: int) -> Packed:
    n = k.shape[2] - RESIDUAL
    keys = quantise_channels(k[0, :, :n], bits, GROUP)
    values = quantise_tokens(v[0, :, :n], bits, GROUP)
    return Packed(
        Side(BY_CHANNEL, bits, GROUP, n, keys, k[:, :, n:].contiguous()),
        Side(BY_TOKEN, bits, GROUP, n, values, v[:, :, n:].contiguous()),
        k.shape[2],
    )


def float_side(x: torch.Tensor, code: FloatCode) -> Side:
    n, of, shared = x.shape[2], code.format, measured(x[0].float(), code)
    packed, (table, of_bytes) = quantise_floats(x[0].float(), code, shared), tables(code, shared)
    if code.scale == "none":
        packed = packed._replace(scales=packed.scales.expand(-1, n, -1), zeros=packed.zeros.expand(-1, n, -1))
    return Side(
        BY_FLOAT, of.bits, code.width(D), n, packed, x[:, :, :0], table, None, of_bytes, of.exponent_bits
    )  # fmt: skip


def main(n: int) -> None:
    torch.manual_seed(0)
    k, v = (torch.randn(1, H_KV, n, D).bfloat16() for _ in "kv")
    q, scale = torch.randn(1, H, 1, D).bfloat16(), D**-0.5
    ways = {
        "torch, bfloat16": lambda: attend(q, [Part(k, v)], Softmax(scale)),
        "C++, bfloat16": lambda: attend_parts_native(q, [Tokens(k, v)], scale)[0],
    }
    for bits in (4, 2):
        packed = packed_of(k, v, bits)
        ways[f"packed, {bits} bits"] = lambda packed=packed: attend_packed(q, packed, scale)[0]
    for name, (of_k, of_v) in FLOATS.items():
        packed = Packed(float_side(k, of_k), float_side(v, of_v), n)
        ways[name] = lambda packed=packed: attend_packed(q, packed, scale)[0]
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS + 3):
        for name, run in ways.items():
            start = perf_counter()
            run()
            seconds[name].append(perf_counter() - start)
    print(f"{n} tokens, {H} heads, {H_KV} KV heads, {D} dimensions, {torch.get_num_threads()} threads")
    for name, found in seconds.items():
        line = f"{name:16} {1000 * median(found[3:]):7.2f} ms"
        for other in ("torch, bfloat16", "C++, bfloat16"):
            ratio = median(a / b for a, b in zip(found[3:], seconds[other][3:], strict=True))
            line += f"   {ratio:5.2f} of {other}"
        print(line)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 32_768)
