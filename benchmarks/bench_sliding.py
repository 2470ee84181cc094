"""The prefill of a model with sliding windows, against transformers' own with its fastest attention.

Random weights in the shape of Gemma 3 270M: 18 layers, every sixth of them without a window of 512. Parity comes first:
both give the same logits.

Not here: what is observed or built beside the pass (`bench_observe.py`).
"""

import argparse
from collections.abc import Callable
from functools import partial
from time import perf_counter

import torch
import transformers

from benchmarks.paired import measure, record
from engine.checkpoints.load import shape_of
from engine.model import Model, register_attention
from engine.prefill import prefill

LAYERS = ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(18)]


def gemma(dtype: torch.dtype) -> Model:
    config = transformers.Gemma3TextConfig(
        vocab_size=262_144, hidden_size=640, intermediate_size=2048, num_hidden_layers=18, num_attention_heads=4,
        num_key_value_heads=1, head_dim=256, sliding_window=512, layer_types=LAYERS, query_pre_attn_scalar=256,
    )  # fmt: skip
    torch.manual_seed(0)
    hf = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
    register_attention()
    return Model(hf, None, shape_of(config, "gemma-3-270m"), dtype, torch.device("cpu"), "random")


def theirs(model: Model, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model.hf(torch.tensor([ids]), use_cache=True, logits_to_keep=1).logits[0, -1].float()


def ours(model: Model, ids: list[int]) -> torch.Tensor:
    with model.hooked():
        logits = prefill(model, ids).logits
    assert logits is not None
    return logits


def check_parity(model: Model, ids: list[int]) -> None:
    torch.testing.assert_close(ours(model, ids), theirs(model, ids), atol=2e-4, rtol=1e-4)


def seconds(model: Model, ids: list[int], run: Callable[[Model, list[int]], torch.Tensor]) -> float:
    start = perf_counter()
    run(model, ids)
    return perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=6000)
    options = parser.parse_args()
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 200_000, (options.tokens,), generator=draw).tolist()
    for dtype in (torch.float32, torch.bfloat16):
        model = gemma(dtype)
        if dtype == torch.float32:
            check_parity(model, ids)
        pairs = measure(partial(seconds, model, ids, theirs), partial(seconds, model, ids, ours), options.pairs)
        shape = f"{options.tokens} tokens, gemma-3-270m, random weights"
        record(
            "prefill with sliding windows: against transformers' own", shape, str(dtype).removeprefix("torch."), pairs
        )


if __name__ == "__main__":
    main()
