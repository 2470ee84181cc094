"""What it costs a decode step that somebody records its spans.

In one decode every other step is recorded, so that neighbours are the pairs. PQCache, which has the most spans, on a
short prompt, where a step is shortest.

Not here: what spans say (`docs/cost.md`).
"""

import argparse
from contextlib import ExitStack
from fractions import Fraction

from kvbench.benchmarks.bench_step import row
from kvbench.benchmarks.paired import Paired, record
from kvbench.engine.books.spans import recording
from kvbench.engine.budget import BudgetRequest
from kvbench.engine.checkpoints.load import load
from kvbench.engine.decode import decode
from kvbench.engine.prefill import prefill
from kvbench.methods.calibration.prose import embedded_prose


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=2000)
    options = parser.parse_args()
    model = load("smollm2-135m", "embedded", dtype="bfloat16", device="cpu")
    n_steps = 2 * options.pairs + 8
    ids = model.tokenizer.encode(embedded_prose())[: options.tokens + n_steps]
    request = BudgetRequest(Fraction(1, 10), None, Fraction(1, 64))
    n_spans = []
    with model.hooked(), ExitStack() as open_record:
        trace = prefill(model, ids[: options.tokens])
        made = row(trace, "pqcache", [], request, n_steps + 1)

        def turn(n_done: int, n_rows: int) -> None:
            """Every other step is recorded."""
            open_record.close()
            if n_done % 2:
                found = open_record.enter_context(recording())
                open_record.callback(lambda: n_spans.append(len(found.marks)))

        feed = ids[options.tokens :]
        seconds = decode(model, trace, [made], max_new_tokens=0, feed=feed, on_step=turn).step_seconds[8:]
    assert min(n_spans) > 4 * trace.shape.n_layers, "the recorded steps hold too few spans"
    shape = f"{n_spans[-1]} spans, {options.tokens} tokens, {model.shape.name}"
    record("decode step recorded by spans against not", shape, "bfloat16", Paired(seconds[0::2], seconds[1::2]))


if __name__ == "__main__":
    main()
