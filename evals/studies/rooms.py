"""How many variants of a method are decoded at once on a GPU that is not here: `python -m kvbench.evals.studies.rooms`.

The arithmetic of a run (`engine/books/width.py`), with the free memory of an idle GPU that has loaded the model.
`together` counts one variant of each method, as a fused sweep has them: how many of them the first wave takes.

Not here: times (`evals/studies/hardware.py`).
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from math import floor

from kvbench.engine.books.width import SHARE, prompt_bytes, variant_bytes, waves
from kvbench.engine.budget import EVERYTHING, BudgetRequest
from kvbench.engine.errors import ConfigError
from kvbench.engine.shapes import ModelShape
from kvbench.engine.terminal import say
from kvbench.evals.studies.hardware import method_of, read_model
from kvbench.methods.base import Variant
from kvbench.methods.decoding.schedule import DecodingRules
from kvbench.results.sheet import Sheet, show

METHODS = "full snapkv h2o streamingllm quest sparq clusterkv infllm infinigen pqcache".split()
LENGTHS = (8192, 32768, 131072)
ELEMENT_BYTES = 2  # of K and V


def variant_of(name: str, shape: ModelShape, s: int, ratio: Fraction) -> Variant:
    kind, params = method_of(name)
    request = BudgetRequest(ratio, None, Fraction(1, 64)) if kind.traits.has_budget else EVERYTHING
    tokens = floor(ratio * s)
    if issubclass(kind, DecodingRules) and (protects := kind.beside_prompt(params)):
        params = replace(params, **protects[2])  # it would keep the whole prompt, whatever the ratio
        tokens = tokens if protects[2] else s + protects[0]
    if kind.traits.of_answers:  # prompt and answer share as many tokens as others keep of a prompt
        request = BudgetRequest(None, tokens, Fraction(0))
    return kind.variant_for(params, request, shape, s)


def table(
    shape: ModelShape, weights: int, gb: float, names: Sequence[str], lengths: Sequence[int], ratio: Fraction,
    n_new: int, chunk: int | None,
) -> Sheet:  # fmt: skip
    """A table of methods: gigabytes of a variant, and how many fit at once, at each length."""
    free, of_length = gb * 1e9 - weights, list[tuple[float, list[int]]]()
    for s in lengths:
        room = SHARE * free - prompt_bytes(shape, s, ELEMENT_BYTES, chunk)
        sizes = [variant_bytes(variant_of(name, shape, s, ratio), shape, n_new, ELEMENT_BYTES) for name in names]
        of_length.append((room, sizes))
    heads = ["method", *(f"{s:,} tokens: {what}" for s in lengths for what in ("GB", "at once"))]
    rows = [
        [name, *(text for room, sizes in of_length for text in (f"{sizes[i] / 1e9:.2f}", at_once(room, sizes[i])))]
        for i, name in enumerate(names)
    ]
    first = [waves([round(x) for x in sizes], round(room), None)[0].stop for room, sizes in of_length]
    rows.append(["together", *(x for (_, sizes), n in zip(of_length, first, strict=True)
                               for x in (f"{sum(sizes) / 1e9:.2f}", f"{n} of {len(names)}"))])  # fmt: skip
    return Sheet(heads, rows, n_keys=1)


def at_once(room: float, size: float) -> str:
    """How many fit at once; where even one does not, one is tried all the same."""
    return f"{room // size:.0f}" if room >= size else "none"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="llama-3.1-8b", help="as in a run, such as a file of conf/model")
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    parser.add_argument("--gb", type=float, default=80, help="of the GPU")
    parser.add_argument("--ratio", type=Fraction, default=Fraction(1, 5))
    parser.add_argument("--n-new", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--chunk", type=int, help="prefill.chunk")
    asked = parser.parse_args(words)
    try:
        model, layers = read_model(asked.model)
        budget = asked.ratio, asked.n_new, asked.chunk
        show(table(model.shape, layers.weight_bytes, asked.gb, asked.methods, asked.lengths, *budget))
    except ConfigError as error:
        say(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
