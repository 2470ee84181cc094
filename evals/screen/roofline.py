"""The least time that samples take on a machine: products of the model's weights, and what steps read.

Not here: what each method would cost (`evals/studies/hardware.py`), what a loaded model takes (`expect.py`).
"""

import time
from collections.abc import Callable, Sequence
from math import fsum

import torch
from torch import Tensor

from kvbench.engine.budget import token_bytes
from kvbench.engine.shapes import ModelShape
from kvbench.evals.models import config_of, random_config
from kvbench.evals.prepare import Load
from kvbench.evals.settings import Settings
from kvbench.evals.studies.hardware import Hardware, Layers, layers_of, linear, reading

ROWS, SIDE = 32768, 4096  # of weights that are more than caches hold
TOKENS, PART = 512, 4096  # of the input that is multiplied with a part of the rows
REPEATS = 3


def times(
    settings: Settings, shape: ModelShape, loads: Sequence[Load], n_rows: int, on: Hardware
) -> tuple[float, float]:
    """Seconds to read the prompts, once for all variants, and to answer: every variant reads its whole cache."""
    spec = settings.model
    config = random_config(spec) if settings.weights == "random" else config_of(spec)
    layers = layers_of(shape, config.get_text_config(decoder=True), spec.trust_remote_code)
    answering = (load.n_steps * step(layers, on, load.n_read, n_rows) for load in loads)
    return fsum(read(layers, on, load.n_read) for load in loads), fsum(answering)


def read(layers: Layers, on: Hardware, s: int) -> float:
    return layers.n_kept * reading(layers, on, s, s * s / 2) + linear(on, layers.head_weights, 1)


def step(layers: Layers, on: Hardware, s: int, n_rows: int) -> float:
    shape, head = layers.shape, linear(on, layers.head_weights, n_rows)
    kept = layers.n_kept * s * token_bytes(shape) + shape.left_bytes(s)
    return shape.n_layers * linear(on, layers.layer_weights, n_rows) + head + n_rows * kept / on.bandwidth


def this_machine(device: str, dtype: str) -> Hardware:
    """What this machine reaches now, in products that take a second in all; other work on it counts."""
    kind = getattr(torch, dtype)
    weights, x = (torch.ones(n, SIDE, dtype=kind, device=device) for n in (ROWS, TOKENS))
    product = timed(lambda: torch.nn.functional.linear(x, weights[:PART]), device)
    vector = timed(lambda: torch.nn.functional.linear(x[:1], weights), device)
    title = torch.cuda.get_device_name(device) if device.startswith("cuda") else f"this machine ({threads()})"
    return Hardware(
        title=title, matrix_tflops=2 * PART * SIDE * TOKENS / product / 1e12,
        memory_gb_s=weights.nbytes / vector / 1e9, memory_gb=0, link_gb_s=None, host_tflops=0,
        share_matrix=1, share_memory=1, share_link=1, layer_us=0, call_us=0, link_us=0, number_ns=0,
    )  # fmt: skip


def threads() -> str:
    n = torch.get_num_threads()
    return f"{n} threads" if n > 1 else "one thread"


def timed(work: Callable[[], Tensor], device: str) -> float:
    """Seconds of the fastest of a few runs after one that does not count."""
    found = []
    for _ in range(REPEATS + 1):
        begun = time.perf_counter()
        work()
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - begun)
    return min(found[1:])
