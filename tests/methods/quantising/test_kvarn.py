"""KVarN against vectors of its page, its bytes against those that are allocated, and what it refuses."""

from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvbench.engine.budget import BudgetRequest
from kvbench.engine.errors import ConfigError
from kvbench.engine.shapes import ModelShape
from kvbench.evals.cells import cell_without_task
from kvbench.evals.settings import from_words
from kvbench.kernels.packed.codes import quantise_channels, quantise_tokens, rebuild_channels, rebuild_tokens, unpack
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
        problems += [differs(f"{name} as seen", x[0], arrays[f"{name}_hat"], 2e-2 * x.abs().max()) for name, x in seen]
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
