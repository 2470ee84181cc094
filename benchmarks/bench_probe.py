"""What methods look at beside the prefill or behind it, against a plain prefill, at 4,096 tokens of the embedded model.

Expected Attention: statistics of the queries before rotary embedding, and then with scoring and choosing, until its
variant is ready to decode. KVzip: the second pass over the context alone. Times are CPU seconds of the process, so that
others who use the machine count for little. Parity comes first: on a short prompt the second pass gives the weights
that a naive softmax gives.

Not here: quality (`evals`), observations of attention (`benchmarks/bench_observe.py`).
"""

import argparse
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from time import process_time
from typing import Any

import torch

from benchmarks.paired import Paired, record
from engine.budget import BudgetRequest, Frame
from engine.checkpoints.load import load
from engine.machine import cpu_multiplies_bfloat16
from engine.model import Model
from engine.observe import QueryStatistics
from engine.passes.probe import probe
from engine.passes.repetition import Repetition, largest_weights
from engine.passes.trace import Trace
from engine.prefill import prefill
from engine.softmax import Softmax
from methods.base import SelectiveAttention
from methods.calibration.prose import embedded_prose
from methods.dropping.expected_attention import ExpectedAttention

REQUEST = BudgetRequest(Fraction(1, 5), None, Fraction(0))
EXPECTED = ExpectedAttention.Params(512, 4, 0.01, Fraction(1, 5), True, True, "prompt", None, "model")


def check_parity() -> None:
    draw = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 9, 600, 64, generator=draw), torch.randn(1, 3, 500, 64, generator=draw)
    logits = q @ k.repeat_interleave(3, 1).mT * 0.125
    expected = logits.softmax(-1).amax(2).unflatten(1, (3, 3)).amax(2)
    torch.testing.assert_close(largest_weights(q, k, Softmax(0.125), logits.logsumexp(-1)), expected)


def seconds(work: Callable[[], Any]) -> float:
    """CPU seconds."""
    start = process_time()
    work()
    return process_time() - start


def read(model: Model, ids: list[int], *what: QueryStatistics) -> Trace:
    with model.hooked():
        return prefill(model, ids, what)


def read_and_choose(model: Model, ids: list[int]) -> None:
    """A prefill until the variant is ready to decode."""
    variant = ExpectedAttention.variant_for(EXPECTED, REQUEST, model.shape, len(ids))
    rows: list[SelectiveAttention] = []

    def build(trace: Trace, layer: int) -> None:
        if not rows:
            rows.append(variant.row(trace, 8))
        rows[0].build(layer)

    with model.hooked():
        prefill(model, ids, variant.observations, build)
        rows[0].complete()


def repeat(model: Model, trace: Trace, what: Repetition) -> None:
    trace.probes.clear()
    probe(model, trace, [what])


def rounds(plain: Callable[[], float], others: dict[str, Callable[[], float]], n: int) -> dict[str, Paired]:
    """Each round runs all of them once, so that they share its `plain`; who is first changes from round to round."""
    works = {"plain": plain, **others}
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for i in range(n):
        names = [*works]
        for name in names[i % len(names) :] + names[: i % len(names)]:
            seconds[name].append(works[name]())
            print(f"round {i + 1} of {n}, {name}: {seconds[name][-1]:.2f} s", flush=True)
    return {name: Paired(seconds["plain"], seconds[name]) for name in others}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--dtype", default="bfloat16" if cpu_multiplies_bfloat16() else "float32")
    options = parser.parse_args()
    check_parity()
    model = load("smollm2-135m", "embedded", dtype=options.dtype, device="cpu")
    ids = model.tokenizer.encode(embedded_prose())[: options.tokens]
    what = Repetition(2000, 8, Frame(30, 0, tuple(ids[:6])))
    trace = read(model, ids)  # for the second pass; the first prefill is slower than those that follow
    works: dict[str, Callable[[], Any]] = {
        "prefill: with query statistics against plain": partial(read, model, ids, QueryStatistics(4)),
        "prefill: with ExpectedAttention against plain": partial(read_and_choose, model, ids),
        "KVzip's second pass against a plain prefill": partial(repeat, model, trace, what),
    }
    plain = partial(seconds, partial(read, model, ids))
    shape = f"{len(ids)} tokens, {model.shape.name}, CPU seconds"
    timed = rounds(plain, {name: partial(seconds, work) for name, work in works.items()}, options.rounds)
    for name, pairs in timed.items():
        record(name, shape, options.dtype, pairs)


if __name__ == "__main__":
    main()
