"""NVFP4 and its relatives against an independent implementation's codes and answers, bytes, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvbench.kernels.packed.codes import pack
from kvbench.kernels.packed.floats import E2M1, encode, values
from kvbench.methods.quantising.nvfp4 import NVFP4
from kvbench.tests.methods.quantising.test_fp8 import bits, run_steps
from kvbench.tests.vectors import Check, differs, first, load

VECTORS = Path(__file__).parents[2] / "golden" / "nvfp4"
PARAMS = NVFP4.Params("nvfp4", "nvfp4", "prompt", 6, (), 0, "exact")


def run_vectors(path: Path) -> list[Check]:
    meta, arrays = load(path)
    return [(path.stem, cast(arrays) if path.stem.startswith("cast") else answered(meta, arrays))]


def cast(arrays: dict[str, np.ndarray]) -> str | None:
    codes = encode(torch.from_numpy(arrays["x"]), E2M1)
    return first(
        differs("codes", codes, arrays["code"]),
        differs("decoded", bits(values(E2M1, codes.device)[codes.int()]), bits(arrays["decoded"])),
        differs("packed", pack(codes, 4), arrays["packed"]),
    )


def answered(meta: dict[str, Any], arrays: dict[str, np.ndarray]) -> str | None:
    over: Any = min(meta["over"])
    params = replace(
        PARAMS, keys=meta["keys"], values=meta["values"], global_scale=meta["global"], over=over,
        query=meta.get("query", "exact"),
    )  # fmt: skip
    return run_steps(NVFP4, params, meta, arrays)


@pytest.mark.parametrize("path", sorted(VECTORS.glob("*.npz")), ids=lambda path: path.stem)
def test_vectors(path: Path) -> None:
    for name, problem in run_vectors(path):
        assert problem is None, f"{name}: {problem}"
