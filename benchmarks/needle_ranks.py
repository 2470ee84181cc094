"""Where a needle's tokens rank among the prompt's in the scores that dropping methods select by.

Read beside the needle's scores: a token whose rank lies within the budget was kept, so that an answer that breaks off
there is the model's fault; one that ranks behind it was dropped. The share of KV heads that keep a token says the same
for one budget. Votes are SnapKV's (window 32, kernel 7 and 1), column sums are H2O's. `--methods` ranks by the scores
of these methods instead, and `--scope context_only` leaves the question out.

Not here: scores of answers (`python run.py task=needle`).
"""

import argparse
import statistics
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvbench.engine.checkpoints.load import load
from kvbench.engine.model import Model
from kvbench.engine.observe import ColumnSums, LastQueries, window_scores
from kvbench.engine.passes.second_pass import run_second_passes
from kvbench.engine.passes.trace import Trace
from kvbench.engine.prefill import prefill
from kvbench.evals.cells import ask, ready_cells
from kvbench.evals.settings import from_words
from kvbench.methods.scorers import pool_scores, reduce_group
from kvbench.methods.scoring import ScoringMethod
from kvbench.tasks.base import Sample
from kvbench.tasks.needle.task import Needle, Params
from kvbench.tasks.prompt import SCOPES, Prompt, encode

WINDOW = 32


def scores_of(trace: Trace, layer: int) -> dict[str, Tensor]:
    """Per name (1, h_kv, n): what decides who is kept of the first n tokens."""
    q = trace.observed(LastQueries(WINDOW), layer)
    votes = reduce_group(window_scores(q, trace.keys(layer), trace.softmax[layer]), trace.shape.h_kv, "mean")
    sums = reduce_group(trace.observed(ColumnSums(), layer), trace.shape.h_kv, "sum")
    return {
        "votes, kernel 7": pool_scores(votes, 7, "max"),
        "votes, kernel 1": votes,
        "column sums": sums[..., :-WINDOW],
    }


def scores_by(
    methods: Sequence[str], ratio: float, model: Model, prompt: Prompt
) -> Iterator[tuple[int, dict[str, tuple[int, Tensor]]]]:
    """Each layer with what the methods' scores are of: by name the first position, and (1, h_kv, n)."""
    cells = ready_cells(ask([from_words([f"method={name}", f"ratio={ratio}"]) for name in methods]))
    variants = [cell.variant(len(prompt.context_ids), prompt.frame) for cell in cells]
    with model.hooked():
        observations = [what for variant in variants for what in variant.observations]
        trace = prefill(model, prompt.context_ids, observations)
        run_second_passes(model, trace, [what for variant in variants for what in variant.second_passes])
        rows = [variant.row(trace, 1) for variant in variants]
        for layer in trace.shape.attention_layers:
            found: dict[str, tuple[int, Tensor]] = {}
            for name, row in zip(methods, rows, strict=True):
                assert isinstance(row, ScoringMethod), f"{name} scores no tokens"
                scores = reduce_group(row.scores(layer), trace.shape.h_kv, "max")
                found[name] = row.ends()[0], scores
            yield layer, found


def of_one_pass(model: Model, prompt: Prompt) -> Iterator[tuple[int, dict[str, tuple[int, Tensor]]]]:
    """As `scores_by`, of votes and column sums."""
    with model.hooked():
        trace = prefill(model, prompt.context_ids, [LastQueries(WINDOW), ColumnSums()])
    for layer in trace.shape.attention_layers:
        yield layer, {name: (0, scores) for name, scores in scores_of(trace, layer).items()}


def value_tokens(model: Model, sample: Sample, prompt: Sequence[int]) -> list[int]:
    """Positions of the needle's value in the prompt, found by its own tokens."""
    ids = list(prompt)
    needle = model.tokenizer.encode(f" {sample.references[0]}", add_special_tokens=False)
    starts = [i for i in range(len(ids)) if ids[i : i + len(needle)] == needle]
    assert len(starts) == 1, f"{sample.id}: the value stands {len(starts)} times in the prompt"
    return list(range(starts[0], starts[0] + len(needle)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--style", default="own")
    parser.add_argument("--ratio", type=float, default=0.2)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1000, 2000, 4000])
    parser.add_argument("--methods", nargs="+", default=[])
    parser.add_argument("--scope", default="full_prompt", choices=SCOPES)
    options = parser.parse_args()
    model = load("smollm2-135m", "embedded", device="cpu")
    params = Params(
        questions=1, mode=None, feed="compressed", budget_base="context", source="embedded", style=options.style,
        grid="default", lengths=tuple(options.lengths), depths=None, depth_spacing="linear", scorer="auto",
        snap="period", buffer=None, seeds=None, needles=1, max_new_tokens=None,
    )  # fmt: skip
    task = Needle(params, None, 0)
    ranks: dict[tuple[str, int], list[float]] = {}
    for sample in task.samples(model.tokenizer):
        prompt = encode(model.tokenizer, sample, chat="auto", system_prompt="", scope=options.scope)
        where = value_tokens(model, sample, prompt.context_ids)
        with torch.inference_mode():
            found = [*(scores_by(options.methods, options.ratio, model, prompt) if options.methods else
                       of_one_pass(model, prompt))]  # fmt: skip
        for _, by_name in found:
            for name, (first, scores) in by_name.items():
                for i, position in enumerate(where):
                    if not first <= position < first + scores.shape[-1]:
                        continue  # at an end, kept in any case
                    better = (scores[0] > scores[0, :, position - first : position - first + 1]).sum(-1)
                    share = better / len(prompt.context_ids)
                    ranks.setdefault((name, i), []).extend(share.tolist())
    n_tokens = 1 + max(i for _, i in ranks)
    print(f"style={options.style}, median rank in % of the prompt (heads that keep it at ratio {options.ratio})")
    print("| score | " + " | ".join(f"token {i + 1}" for i in range(n_tokens)) + " |")
    print("|---|" + "---|" * n_tokens)
    for name in dict.fromkeys(name for name, _ in ranks):
        cells = []
        for i in range(n_tokens):
            got = ranks[name, i]
            kept = sum(rank < options.ratio for rank in got) / len(got)
            cells.append(f"{100 * statistics.median(got):.1f} ({100 * kept:.0f} %)")
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
