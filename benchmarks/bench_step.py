"""A decode step of methods against one of full attention in the same engine.

Two settings. One layer of attention in the shape of Llama-3.1-8B (32/8 heads of 128, bfloat16) at 32,768 tokens with a
budget of 1,024: what selection and attention cost together, against exact attention over the whole cache. And whole
steps of the embedded model at 8,000 tokens and a ratio of 0.1, linear layers included.

Parity comes first: with the whole budget every method must give full attention's output. Where others use the machine,
`--clock cpu` with OMP_NUM_THREADS=1 counts seconds of the processor, and `--layer` leaves the whole steps out.

Not here: quality (`task=fidelity`), single ops (`bench_select_attend.py`), many rows at once (`bench_decode.py`).
"""

import argparse
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from time import perf_counter, process_time

import torch
from hydra import compose, initialize_config_dir

from kvbench.benchmarks.paired import measure, record
from kvbench.engine.budget import BudgetRequest
from kvbench.engine.checkpoints.load import load
from kvbench.engine.declared import build_params
from kvbench.engine.decode import decode
from kvbench.engine.model import Model
from kvbench.engine.observe import Observation
from kvbench.engine.passes.trace import Trace
from kvbench.engine.prefill import prefill
from kvbench.engine.shapes import ModelShape
from kvbench.engine.softmax import Softmax
from kvbench.engine.step import attend_group
from kvbench.evals.overrides import CONF
from kvbench.evals.settings import load_class, settings
from kvbench.methods.base import SelectiveAttention
from kvbench.methods.calibration.prose import embedded_prose

# Method and settings beside its file's; `comm` is what the method needs at least, or what the papers compare at.
METHODS: dict[str, tuple[list[str], str]] = {
    "sparq": ([], "1/64"),
    "quest": ([], "1/64"),
    "quest, 16-token pages": (["method=quest", "method.comm_mode=native"], "13/100"),
    "clusterkv": ([], "1/64"),
    "infllm": ([], "1/64"),
    "pqcache": ([], "1/64"),
    "double_sparsity": ([], "1/16"),
    "loki": ([], "1/16"),
    "rocketkv": ([], "1/64"),
    "magicpig": ([], "1/64"),
    "retroinfer": ([], "1/8"),
}
# One layer: tokens, budget, and who; PQCache also where its paper's latencies end, with a twentieth of the tokens.
LAYERS = [
    (32_768, 1024, METHODS),
    (131_072, 6553, {"pqcache": ([], "1/128")}),
]
N_STEPS = 16
CALLS = 8  # steps of the one layer that are timed together
CLOCKS = {"wall": perf_counter, "cpu": process_time}


def variant(name: str, words: Sequence[str]) -> tuple[type[SelectiveAttention], object]:
    """A method with the parameters of its file, changed by `words`."""
    given = [f"method={name}", *words] if not any("method=" in w for w in words) else list(words)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("config", given, return_hydra_config=True)
    part = settings(cfg, cfg.hydra.runtime.choices).method
    kind = load_class(part)
    return kind, build_params(kind, part.params, "method")


def row(trace: Trace, name: str, words: Sequence[str], request: BudgetRequest, n_new: int) -> SelectiveAttention:
    kind, params = variant(name, words)
    made = kind.variant_for(params, request, trace.shape, trace.s_prompt).row(trace, n_new)
    for layer in trace.shape.attention_layers:
        made.build(layer)
    made.complete()
    return made


def observations(
    shape: ModelShape, s: int, request: BudgetRequest, name: str, words: Sequence[str]
) -> tuple[Observation, ...]:
    kind, params = variant(name, words)
    return kind.variant_for(params, request, shape, s).observations


class OneLayer:
    """Rows of one layer of random K and V; the last layer of three, because some methods leave the first ones whole."""

    LAYER, N_NEW = 2, 4096

    def __init__(self, s: int, clock: str) -> None:
        self.now = CLOCKS[clock]
        shape = ModelShape("llama-3.1-8b", 3, 32, 8, 128, 1 << 20, (self.LAYER,))
        self.draw = torch.Generator().manual_seed(0)
        self.trace = Trace(shape, s, torch.device("cpu"))
        # Keys with directions of their own, as real ones have: noise about some hundred centres.
        centres = torch.randn(1, 8, 400, 128, generator=self.draw)
        of = torch.randint(400, (s,), generator=self.draw)
        k = (centres[:, :, of] + 0.5 * self.normal(8, s)).bfloat16()
        self.trace.add(self.LAYER, k, self.normal(8, s).bfloat16(), Softmax(128**-0.5))
        self.s = s
        self.t: dict[str, int] = {}

    def normal(self, heads: int, s: int) -> torch.Tensor:
        return torch.randn(1, heads, s, 128, generator=self.draw)

    def observe(self, what: Observation) -> None:
        q = self.normal(32, self.s).bfloat16()
        self.trace.observe(self.LAYER, what, q, self.trace.keys(self.LAYER), Softmax(128**-0.5))

    def seconds(self, name: str, made: SelectiveAttention) -> float:
        """Mean seconds of some steps, each with a query of its own."""
        kind, total = type(made), 0.0
        for _ in range(CALLS):
            q, k, v = (self.normal(heads, 1).bfloat16() for heads in (32, 8, 8))
            self.t[name] = self.t.get(name, 0) + 1
            start = self.now()
            attend_group(kind, [made], self.LAYER, q, k, v, Softmax(128**-0.5))
            total += self.now() - start
        return total / CALLS

    def output(self, made: SelectiveAttention) -> torch.Tensor:
        draw = torch.Generator().manual_seed(1)
        q, k, v = (torch.randn(1, h, 1, 128, generator=draw).bfloat16() for h in (32, 8, 8))
        return attend_group(type(made), [made], self.LAYER, q, k, v, Softmax(128**-0.5))[0]


def bench_layer(
    s: int,
    budget: int,
    methods: dict[str, tuple[list[str], str]],
    pairs: int,
    only: Sequence[str],
    clock: str = "wall",
) -> None:
    at = OneLayer(s, clock)
    whole = BudgetRequest(None, s, Fraction(1, 64))
    full = row(at.trace, "full", [], whole, at.N_NEW)
    exact = at.output(row(at.trace, "full", [], whole, at.N_NEW))
    shape = f"{budget:,} of {s} tokens, 32/8 heads of 128" + (", CPU seconds" if clock == "cpu" else "")
    for name, (words, comm) in methods.items():
        if only and name not in only:
            continue
        request = BudgetRequest(None, budget, Fraction(comm))
        for what in observations(at.trace.shape, s, request, name, words):
            at.observe(what)
        everything = BudgetRequest(None, s, Fraction(comm))
        same = at.output(row(at.trace, name, words, everything, at.N_NEW))
        torch.testing.assert_close(same, exact, rtol=0.016, atol=3e-4)  # bfloat16, joined from parts
        made = row(at.trace, name, words, request, at.N_NEW)
        at.seconds(name, made)  # waits for what is built beside the prefill
        ours: Callable[[], float] = partial(at.seconds, name, made)
        record(
            f"attention step: {name} against full",
            shape,
            "bfloat16",
            measure(partial(at.seconds, "full", full), ours, pairs),
        )


def bench_model(model: Model, ids: list[int], dtype: str, pairs: int, only: Sequence[str]) -> None:
    wanted = {name: given for name, given in METHODS.items() if not only or name in only}
    asked = [
        what
        for name, (words, comm) in wanted.items()
        for what in observations(
            model.shape,
            len(ids),
            BudgetRequest(Fraction("1/10"), None, Fraction(comm)),
            name,
            words,
        )
    ]
    with model.hooked():
        trace = prefill(model, ids, asked)

    def seconds(name: str, words: Sequence[str], ratio: str, comm: str) -> float:
        request = BudgetRequest(Fraction(ratio), None, Fraction(comm))
        made = row(trace, name, words, request, N_STEPS + 1)
        with model.hooked():
            steps = decode(model, trace, [made], max_new_tokens=N_STEPS + 1).step_seconds
        return sorted(steps)[len(steps) // 2]

    for name, (words, comm) in wanted.items():
        baseline = partial(seconds, "full", [], "1", "1/64")
        ours = partial(seconds, name, words, "1/10", comm)
        shape = f"ratio 0.1 of {len(ids)} tokens, {model.shape.name}"
        record(f"decode step: {name} against full", shape, dtype, measure(baseline, ours, pairs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="wall", help="for the one layer")
    parser.add_argument("--layer", action="store_true", help="the one layer alone")
    options = parser.parse_args()
    for s, budget, methods in LAYERS:
        if not options.only or set(options.only) & set(methods):
            bench_layer(s, budget, methods, options.pairs, options.only, options.clock)
    if options.layer:
        return
    for dtype in ("float32", "bfloat16"):
        model = load("smollm2-135m", "embedded", dtype=dtype, device="cpu")
        ids = model.tokenizer.encode(embedded_prose())[: options.tokens]
        bench_model(model, ids, dtype, options.pairs, options.only)


if __name__ == "__main__":
    main()
