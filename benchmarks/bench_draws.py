"""Several methods with several draws each in one batch, against full attention's draws alone.

    python -m kvbench.benchmarks.bench_draws
    python -m kvbench.benchmarks.bench_draws --new 256 --rounds 5

Both decode the same prompt with the embedded model, in turn, for as many steps; prefill and building apart. The ratio
is the median over rounds of CPU seconds of the steps.
"""

import argparse
from statistics import median
from time import perf_counter, process_time

from kvbench.engine.budget import BudgetRequest, Fraction
from kvbench.engine.declared import build_params
from kvbench.engine.decode import decode
from kvbench.engine.model import Model
from kvbench.engine.prefill import prefill
from kvbench.engine.sampling.spec import Sampling, draw_seed
from kvbench.evals.models import load_model, resolve_hardware
from kvbench.evals.settings import from_words, load_class
from kvbench.methods.base import Variant
from kvbench.tests.vectors import built

METHODS = "full,rkv,rkv_code,triattention,snapkv_decode,streamingllm_decode,h2o_decode,tova_decode"


def variant(name: str, model: Model, s_prompt: int, budget: int) -> Variant:
    words = [f"method={name}", *([f"budget={budget}", "method.interval=32"] if name != "full" else [])]
    settings = from_words(words)
    kind = load_class(settings.method)
    request = BudgetRequest(None, budget, Fraction(0))
    return kind.variant_for(  # type: ignore[attr-defined]
        build_params(kind, settings.method.params, "method"), request, model.shape, s_prompt
    )


def seconds(model: Model, ids: list[int], variants: list[Variant], n_draws: int, n_new: int) -> tuple[float, float]:
    """CPU and wall seconds of the steps of all variants with all of their draws."""
    sampling = Sampling(0.6, 0.95, n_answers=n_draws)
    trace = prefill(model, ids, [what for each in variants for what in each.observations])
    rows = [built(each.row(trace, n_new)) for each in variants for _ in range(n_draws)]
    seeds = [draw_seed(0, "prompt", j) for _ in variants for j in range(n_draws)]
    cpu, wall = process_time(), perf_counter()
    decode(model, trace, rows, max_new_tokens=n_new, sampling=sampling, seeds=seeds)
    return process_time() - cpu, perf_counter() - wall


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--draws", type=int, default=4)
    parser.add_argument("--new", type=int, default=97)
    parser.add_argument("--budget", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    model = load_model(resolve_hardware(from_words(["device=cpu"])))
    ids = [*model.tokenizer.encode("How many prime numbers are there below one hundred? Think step by step. " * 6)]
    with model.hooked():
        many = [variant(name, model, len(ids), given.budget) for name in given.methods.split(",")]
        one = [variant("full", model, len(ids), given.budget)]
        ratios, walls = [], []
        for _ in range(given.rounds):
            full, full_wall = seconds(model, ids, one, given.draws, given.new)
            every, every_wall = seconds(model, ids, many, given.draws, given.new)
            ratios.append(every / full)
            walls.append(every_wall / full_wall)
            print(f"Full x {given.draws}: {full:.1f} s of CPU; {len(many)} methods x {given.draws}: {every:.1f} s")
    print(f"ratio {median(ratios):.2f} of CPU seconds, {median(walls):.2f} of wall seconds")


if __name__ == "__main__":
    main()
