"""Kernels that a decode step launches, and how often it waits, by method: `python -m kvbench.benchmarks.launches`.

Counted on a pretended device (`benchmarks/pretend`), so no GPU is needed; CSV on standard output. Launches are those of
one compressed layer, the model's own included: what a deeper model launches more, by its further layers. A further row
is one of a class that is there already. Waits are those of a whole step, whatever its layers and rows.

A step is counted without CUDA graphs: one that is replayed is one launch.

Exit code 1 says that a method is above its budget, which is what it needed when it was last lowered; `--goal` holds it
to the goal instead. `--lines METHOD` lists the lines of code that launch, wait and send.

`--uploads` counts instead what the host sends to the device, in copies and bytes of a compressed layer with one row and
with two: at the first step, which says where everything lies, and at the fifth, which goes on from there if it can.

Not here: how long a launch takes.
"""

import argparse
import csv
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

if __name__ == "__main__":  # before Triton's kernels are imported
    os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}

import torch

from kvbench.benchmarks.pretend.counts import Counts
from kvbench.benchmarks.pretend.cuda import Machine
from kvbench.benchmarks.pretend.machine import pretended
from kvbench.engine.budget import EVERYTHING, BudgetRequest
from kvbench.engine.checkpoints.load import load_random, read_config
from kvbench.engine.decode import decode
from kvbench.engine.model import Model
from kvbench.engine.passes.second_pass import run_second_passes
from kvbench.engine.passes.trace import Trace
from kvbench.engine.prefill import prefill
from kvbench.evals.every import own_class
from kvbench.evals.studies.hardware import method_of
from kvbench.methods.base import SelectiveAttention, Variant
from kvbench.results.names import known, own_methods

N_PROMPT = 320
DEPTHS = (3, 5)  # layers; methods leave up to two whole, and the further ones of the deeper model are what is counted
N_ROWS = 2
FITTED: dict[str, list[str]] = {name: ["method.group=16"] for name in ("kivi", "hf_quantized_cache")} | {
    name: ["method.gate=drawn"] for name in ("kvzap", "fastkvzip")
}  # to the small model's heads
TOLD, AGAIN = 0, 4  # steps behind which one is counted that says where everything lies, and one that may go on from it
SENT = "copy from pinned memory"
FIRST = 1  # step behind which one is counted; the ones before make buffers
REQUEST = BudgetRequest(Fraction(3, 5), None, Fraction(1, 8))
OF_ANSWERS = BudgetRequest(None, 512, Fraction(0))  # of prompt and answer together; no step that is counted cuts
OF_CODES = BudgetRequest(Fraction(1), None, Fraction(0))  # of methods that keep all tokens as codes


@dataclass(frozen=True)
class Cost:
    """Of a decode step."""

    row: float  # launches of a compressed layer with one row
    further: float  # launches of a compressed layer for each further row
    waits: float  # of the whole step, the more of one and several rows


GOAL = Cost(45, 3, 1)  # the model itself has 37, and 5 more a layer where embedding and head are shared out among four
GOAL_WITH_WEIGHTS = Cost(55, 6, 1)  # of methods that evict by weights
ABOVE = {
    "retroinfer": Cost(47, 2, 1),  # it estimates as well
    "tova": Cost(43, 0, 1),  # it evicts by its usual setting
    "dms": Cost(44, 3, 1),  # it scores the current token, and notes which heads drop it
    "think": Cost(43, 2, 1),  # each row asks thin keys by a query of its own
    # Their latest queries are written to where they stay.
    **dict.fromkeys(("rkv", "snapkv_decode", "tova_decode", "vase"), Cost(41, 0, 1)),
}


def budget_of(name: str) -> Cost:
    """As measured when somebody last changed what a step does; lower it whenever a kind of method launches less."""
    kind = own_class(name)
    if name in ABOVE:
        return ABOVE[name]
    if not kind.traits.drops and "ratio" in kind.traits.takes and kind.traits.has_budget:
        return Cost(45, 1, 1)  # it searches and fetches
    return Cost(43 if kind.wants_weights or kind.traits.changes else 40, 0, 1)


def goal_of(method: str) -> Cost:
    """Of a method, or of one of its presets."""
    return GOAL_WITH_WEIGHTS if own_class(known(method) or method).wants_weights else GOAL


BUDGETS = {name: budget_of(name) for name in own_methods()}


def config_of(n_layers: int) -> Any:
    """A small Llama with groups of query heads."""
    return read_config("small", {
        "model_type": "llama", "vocab_size": 300, "hidden_size": 64, "intermediate_size": 64,
        "num_hidden_layers": n_layers, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": 4096, "tie_word_embeddings": False,
    })  # fmt: skip


def request_of(kind: type[SelectiveAttention]) -> BudgetRequest:
    """What the method is asked for, in the currency that it takes."""
    if kind.traits.of_answers:
        return OF_ANSWERS
    if kind.traits.takes == ("memory",):
        return OF_CODES
    return REQUEST if kind.traits.has_budget else EVERYTHING


def read(
    model: Model, method: str, n_rows: int = 1 + N_ROWS, n_new: int = AGAIN + 4
) -> tuple[Trace, list[SelectiveAttention]]:  # fmt: skip
    """One prompt, and rows of the method: by default for one step loop with one row and one with several.

    Several methods, `a+b`, have as many rows each.
    """
    variants: list[Variant] = []
    for name in method.split("+"):
        kind, params = method_of(name, FITTED.get(name, []))
        variants.append(kind.variant_for(params, request_of(kind), model.shape, N_PROMPT))
    (pruning,) = {variant.pruning for variant in variants}
    observations = tuple(each for variant in variants for each in variant.observations)
    rows: list[SelectiveAttention] = []

    def build(trace: Trace, layer: int) -> None:
        if not rows:
            rows.extend(variant.row(trace, n_new) for variant in variants for _ in range(n_rows))
        for row in rows:
            row.build(layer)

    ids = [i % 250 for i in range(N_PROMPT)]
    trace = prefill(model, ids, observations, build, pruning)
    run_second_passes(model, trace, [each for variant in variants for each in variant.second_passes])
    for row in rows:
        row.complete()
    trace.settle()
    return trace, rows


def count(machine: Machine, model: Model, trace: Trace, rows: Sequence[SelectiveAttention]) -> Counts:
    """What a step asks for."""
    counts = Counts()

    def on_step(done: int, n_rows: int) -> None:
        machine.counts = counts if done == FIRST else None

    decode(model, trace, rows, max_new_tokens=FIRST + 2, on_step=on_step)
    return counts


def model_of(n_layers: int) -> Model:
    return replace(load_random("small", config_of(n_layers), dtype="bfloat16", device="cuda"), allows_graphs=False)


def cost_of(machine: Machine, method: str) -> Cost:
    """Launches and waits of a method's steps."""
    launches: dict[tuple[int, int], float] = {}
    waits = 0.0
    for n_layers in DEPTHS:
        model = model_of(n_layers)
        with model.hooked():
            trace, rows = read(model, method)
            for some in (rows[:1], rows[1:]):
                counts = count(machine, model, trace, some)
                launches[n_layers, len(some)] = counts.launches
                waits = max(waits, counts.waits)
    few, many = DEPTHS
    row, rows = ((launches[many, n] - launches[few, n]) / (many - few) for n in (1, N_ROWS))
    return Cost(row, (rows - row) / (N_ROWS - 1), waits)


def sent_of(machine: Machine, method: str) -> list[tuple[int, int, float, float]]:
    """Rows, step, copies and bytes that a compressed layer's step sends to the device."""
    found: dict[tuple[int, int, int], tuple[int, int]] = {}
    for n_layers in DEPTHS:
        model = model_of(n_layers)
        with model.hooked():
            trace, rows = read(model, method)
            for some in (rows[:1], rows[1:]):
                for step, counts in counted(machine, model, trace, some).items():
                    found[n_layers, len(some), step] = counts.by_kind[SENT], counts.nbytes[SENT]
    few, many = DEPTHS

    def a_layer(n: int, step: int, what: int) -> float:
        return (found[many, n, step][what] - found[few, n, step][what]) / (many - few)

    return [(n, step, a_layer(n, step, 0), a_layer(n, step, 1)) for n in (1, N_ROWS) for step in (TOLD, AGAIN)]


def counted(machine: Machine, model: Model, trace: Trace, rows: Sequence[SelectiveAttention]) -> dict[int, Counts]:
    """What steps ask for whose uploads are compared."""
    found = {step: Counts() for step in (TOLD, AGAIN)}

    def on_step(done: int, n_rows: int) -> None:
        machine.counts = found.get(done)

    machine.counts = found[TOLD]
    decode(model, trace, rows, max_new_tokens=AGAIN + 2, on_step=on_step)
    return found


def uploads(machine: Machine, methods: Sequence[str]) -> int:
    """Print two steps of each method with one row and with two."""
    table = csv.writer(sys.stdout)
    table.writerow(["method", "rows", "step", "copies_layer", "bytes_layer"])
    for method in methods:
        for n, step, copies, nbytes in sent_of(machine, method):
            table.writerow([method, n, step + 1, f"{copies:.1f}", f"{nbytes:.0f}"])
            sys.stdout.flush()
    return 0


def lines_of(machine: Machine, method: str) -> None:
    """Print where the launches and waits of a step with one row and with several come from."""
    model = model_of(DEPTHS[-1])
    with model.hooked():
        trace, rows = read(model, method)
        for some in (rows[:1], rows[1:]):
            counts = count(machine, model, trace, some)
            for what in ("wait", "launch", SENT):
                print(f"{method}, {len(some)} rows, {DEPTHS[-1]} layers: {what}, per step")
                for line, n in counts.lines(what):
                    print(f"  {n:6}  {line}")


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("methods", nargs="*", default=[*BUDGETS])
    parser.add_argument("--goal", action="store_true", help="exit with 1 above the goal instead of the budget")
    parser.add_argument("--uploads", action="store_true", help="count what the host sends to the device instead")
    parser.add_argument("--lines", metavar="METHOD", help="list the lines of code that ask the device, and end")
    asked = parser.parse_args(words)
    torch.set_num_threads(1)
    with pretended() as machine:
        if asked.lines is not None:
            lines_of(machine, asked.lines)
            return 0
        if asked.uploads:
            return uploads(machine, asked.methods)
        return run(machine, asked.methods, asked.goal)


def run(machine: Machine, methods: Sequence[str], is_goal: bool) -> int:
    """Print a row per method as soon as it was counted; 1 where one is above its limit."""
    table = csv.writer(sys.stdout)
    table.writerow(["method", "launches_row", "launches_further_row", "waits_step", "budget", "goal", "verdict"])
    found = []
    for method in methods:
        cost, goal = cost_of(machine, method), goal_of(method)
        limit = goal if is_goal else BUDGETS.get(method, goal)
        found.append(exceeds(cost, limit))
        verdict = "above" if found[-1] else "within" if exceeds(cost, goal) else "goal reached"
        numbers = [f"{x:.1f}" for x in (cost.row, cost.further, cost.waits)]
        table.writerow([method, *numbers, text(BUDGETS.get(method)), text(goal), verdict])
        sys.stdout.flush()
    return int(any(found))


def exceeds(cost: Cost, limit: Cost) -> bool:
    return cost.row > limit.row or cost.further > limit.further or cost.waits > limit.waits


def text(cost: Cost | None) -> str:
    return "-" if cost is None else f"{cost.row:g}/{cost.further:g}/{cost.waits:g}"


if __name__ == "__main__":
    sys.exit(main())
