"""A feed of 32 tokens through ten variants in one pass against the same tokens step by step; and many questions on one
context against one question to full attention.

Parity comes first: both ways leave the same books and, in float32, the same next token.

Not here: single steps (`bench_decode.py`).
"""

import argparse
from fractions import Fraction
from time import process_time

from kvbench.benchmarks.paired import measure, record
from kvbench.engine.batch import Batch
from kvbench.engine.budget import EVERYTHING, BudgetRequest
from kvbench.engine.checkpoints.load import load
from kvbench.engine.declared import build_params
from kvbench.engine.decode import decode
from kvbench.engine.model import Model
from kvbench.engine.passes.trace import Trace
from kvbench.engine.prefill import prefill
from kvbench.engine.turns.state import fork_of
from kvbench.evals.settings import from_words, load_class
from kvbench.methods.base import SelectiveAttention, Variant
from kvbench.methods.calibration.prose import embedded_prose

TEN = ("full", "snapkv", "pyramidkv", "h2o", "streamingllm", "pqcache", "quest", "sparq", "infllm", "magicpig")
FEED, N_QUESTIONS, N_ANSWER = 32, 8, 16


def variants(model: Model, s: int) -> list[Variant]:
    found = []
    for name in TEN:
        chosen = from_words([f"method={name}"]).method
        kind = load_class(chosen)
        request = BudgetRequest(Fraction(1, 5), None, Fraction(1, 64)) if kind.traits.has_budget else EVERYTHING
        found.append(kind.variant_for(build_params(kind, chosen.params, "method"), request, model.shape, s))
    return found


def rows_of(trace: Trace, some: list[Variant], n_new: int) -> list[SelectiveAttention]:
    rows = []
    for variant in some:
        row = variant.row(trace, n_new)
        for layer in trace.shape.attention_layers:
            row.build(layer)
        row.complete()
        rows.append(row)
    return rows


def bench_feed(model: Model, ids: list[int], s: int, dtype: str, n: int) -> None:
    some = variants(model, s)
    with model.hooked():
        trace = prefill(model, ids[:s], [what for one in some for what in one.observations])
        rows, feed = rows_of(trace, some, 2 * FEED), ids[s : s + FEED]

        def read(how: str) -> float:
            batch = Batch(model, trace, [fork_of(row) for row in rows])
            batch.read([[5]] * len(rows))  # what waits for the first step is no part of it
            start = process_time()
            batch.read([feed] * len(rows), how)
            return process_time() - start

        if dtype == "float32":
            batches = [Batch(model, trace, [fork_of(row) for row in rows]) for _ in range(2)]
            first, other = (
                batch.read([feed] * len(rows), how).argmax(-1)
                for batch, how in zip(batches, ("compressed", "tokenwise"), strict=True)
            )
            assert first.tolist() == other.tolist(), "a feed in one pass is not the feed step by step"
        pairs = measure(lambda: read("tokenwise"), lambda: read("compressed"), n)
    record(f"feed of {FEED} tokens, {len(some)} variants: one pass against steps", f"{s} tokens", dtype, pairs)


def bench_questions(model: Model, ids: list[int], s: int, dtype: str, n: int) -> None:
    some = variants(model, s)
    feeds = [ids[s + i * FEED : s + i * FEED + 20 + i] for i in range(N_QUESTIONS)]
    n_new = max(map(len, feeds)) + N_ANSWER

    def one() -> float:
        start = process_time()
        trace = prefill(model, ids[:s])
        rows = rows_of(trace, some[:1], n_new)
        decode(model, trace, rows, max_new_tokens=N_ANSWER, feed=feeds[0])
        return process_time() - start

    def all_of_them() -> float:
        start = process_time()
        trace = prefill(model, ids[:s], [what for one in some for what in one.observations])
        rows = rows_of(trace, some, n_new)
        asked = [(row, feed) for feed in feeds for row in rows]
        batch = Batch(model, trace, [fork_of(row) for row, _ in asked])
        batch.answer(batch.read([feed for _, feed in asked]), [N_ANSWER] * len(asked))
        return process_time() - start

    with model.hooked():
        pairs = measure(one, all_of_them, n, warm_up=0)
    what = f"{len(some)} variants x {N_QUESTIONS} questions against one question to full attention"
    record(what, f"{s} tokens, {N_ANSWER} new", dtype, pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--only", choices=("feed", "questions"))
    options = parser.parse_args()
    model = load("smollm2-135m", "embedded", dtype=options.dtype, device="cpu")
    ids = model.tokenizer.encode(embedded_prose())[: options.tokens + FEED * (N_QUESTIONS + 2)]
    if options.only != "questions":
        bench_feed(model, ids, options.tokens, options.dtype, options.pairs)
    if options.only != "feed":
        bench_questions(model, ids, options.tokens, options.dtype, options.pairs)


if __name__ == "__main__":
    main()
