"""Methods that hold codes, on a pretended GPU: kernels read them packed, with the tokens and the books of the CPU's."""

from dataclasses import replace

import pytest
import torch

from kvbench.benchmarks.launches import OF_CODES, config_of
from kvbench.benchmarks.pretend.cuda import Machine
from kvbench.engine.books.ledger import Entry
from kvbench.engine.checkpoints.load import load_random
from kvbench.engine.decode import decode
from kvbench.engine.layouts.launch_plan import LaunchPlan
from kvbench.engine.model import Model
from kvbench.engine.prefill import prefill
from kvbench.evals.studies.hardware import method_of
from kvbench.kernels.packed.attend import Side
from kvbench.tests.pretend.test_methods import moved

N_PROMPT, N_NEW = 45, 7  # so that KIVI packs a block of keys on its way, and a value at each step
ASKED = {
    "kivi": ["method.group=16", "method.residual=16"],
    "turboquant": [],
    "turboquant_2bit": ["method.preset=2bit_nc", "method.rotation=haar"],
    "turboquant_3bit": ["method.preset=3bit_nc"],
    "hf_quantized_cache": ["method.group=16"],
    "fp8": ["method.scale=head", "method.format=e5m2"],
    "fp8_token_head": ["method.query=fp8"],
    "nvfp4": [],
    "fp8_nvfp4": [],
}


def answers(model: Model, words: dict[str, list[str]], n_new: int = N_NEW) -> tuple[list[list[int]], list[list[Entry]]]:
    """Tokens and ledgers of variants that answer together."""
    ids = [i * 7 % 250 for i in range(N_PROMPT)]
    kinds = [
        method_of(name.partition("_")[0] if name.startswith("turbo") else name, own) for name, own in words.items()
    ]
    variants = [kind.variant_for(params, OF_CODES, model.shape, N_PROMPT) for kind, params in kinds]
    with model.hooked():
        trace = prefill(model, ids, [each for variant in variants for each in variant.observations])
        rows = [variant.row(trace, n_new) for variant in variants]
        for row in rows:
            for layer in trace.shape.attention_layers:
                row.build(layer)
            row.complete()
        trace.settle()
        done = decode(model, trace, rows, max_new_tokens=n_new)
    return [each.ids for each in done.answers], [row.store.ledger.entries for row in rows]


def rebuilding(side: Side, n: int) -> torch.Tensor:
    raise AssertionError("codes are made numbers of in memory")


@pytest.mark.parametrize(
    "names",
    [("kivi", "turboquant"), ("fp8", "nvfp4"), pytest.param(tuple(ASKED), marks=pytest.mark.slow)],
    ids=["two", "floats", "all"],
)
def test_codes_are_read_packed_and_say_the_same(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]
) -> None:
    model, asked = load_random("small", config_of(2), dtype="float32", device="cpu"), {x: ASKED[x] for x in names}
    expected = answers(model, asked)
    monkeypatch.setattr(Side, "rebuilt", rebuilding)
    assert answers(moved(model, "cuda:1"), asked) == expected


STEADY = [
    ({"kivi": ["method.group=16", "method.residual=16"]}, 9),
    pytest.param(
        {
            "kivi": ["method.group=16", "method.residual=32"],
            "hf_quantized_cache": ["method.group=16", "method.residual=4"],
            "snapkv": [],
        },
        14, marks=pytest.mark.slow,
    ),
    ({"turboquant": [], "think": ["method.recent=8"], "snapkv": []}, 6),
    ({"fp8_token_head": ["method.query=fp8"], "nvfp4": [], "snapkv": []}, 6),
]  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "n_new"),
    STEADY,
    ids=["a block becomes full", "beside others", "rows with queries of their own", "floats"],
)
def test_steps_over_codes_are_told_once(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, asked: dict[str, list[str]], n_new: int
) -> None:
    """Packed values grow by one, those whose keys alone are packed shrink, and exact tokens come behind.

    Queries are rotated to packed keys, or reordered to thin ones.
    """
    model = load_random("small", config_of(2), dtype="float32", device="cpu")
    expected, ages, keep = answers(model, asked, n_new), list[int](), LaunchPlan.keep

    def noting(plan: LaunchPlan, k_new: torch.Tensor, v_new: torch.Tensor) -> None:
        keep(plan, k_new, v_new)
        assert plan.coded is not None
        ages.append(plan.age)

    monkeypatch.setattr(LaunchPlan, "keep", noting)
    on_gpu = replace(moved(model, "cuda:0"), allows_graphs=False)
    assert answers(on_gpu, asked, n_new) == expected
    assert max(ages) >= 2, ages
    ages.clear()
    monkeypatch.setattr(LaunchPlan, "holds", lambda *_: False)
    assert answers(on_gpu, asked, n_new) == expected and not ages
