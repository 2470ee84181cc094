"""Everything that a GPU has to show, as one command that ends in a table: `python -m kvbench.benchmarks.gpu`.

    copies     bytes per second within the device, and from pinned host memory to it
    kernels    each Triton op against its plain reference (`benchmarks/gpu/ops.py`)
    agreement  every method's tokens and books against a CPU's (`benchmarks/gpu/models.py`, as all below)
    methods    times to second token and per token, memory, and what was simulated, by length
    memory     the largest batch that fits into the card's memory, and its tokens a second
    baseline   transformers with a static cache and one CUDA graph
    sweep      twenty variants against full attention alone

Rows go to benchmarks/gpu.csv as they are measured, with device and versions, and to standard error; parts can be
commands of their own, and goals are held to all that the file has of this device. `--device cpu
--small` runs all of it in minutes, in Triton's interpreter (set TRITON_INTERPRET=1), to see that it runs; its times
mean nothing. So do the tests, on a device that is pretended.

Not here: scores, and the same figures for CPUs (`bench_*.py`).
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
import yaml

from kvbench.benchmarks.gpu import models
from kvbench.benchmarks.gpu.ops import LLAMA, OPS, SMALL, copies, kernels
from kvbench.benchmarks.gpu.results import Result, collect, recorded, show
from kvbench.engine.budget import BudgetRequest
from kvbench.engine.checkpoints.load import load_random, read_config, torch_device
from kvbench.engine.errors import ConfigError
from kvbench.engine.model import Model
from kvbench.evals.overrides import CONF
from kvbench.evals.studies.hardware import layers_of, method_of, read_hardware

RESULTS = Path(__file__).parents[1] / "gpu.csv"
PARTS = ("copies", "kernels", "agreement", "methods", "memory", "baseline", "sweep")
OF_MODELS = {"methods", "memory", "baseline", "sweep"}
REQUEST = BudgetRequest(None, 2048, Fraction(1, 64))  # tokens: a step of so many need not grow with the prompt
SMALL_REQUEST = BudgetRequest(Fraction(1, 2), None, Fraction(1, 8))  # of prompts of some hundred tokens
LENGTHS, SMALL_LENGTHS = (8192, 32768, 131000), (300, 400)
SMALL_RATIOS, SMALL_ROWS = ("1/2", "3/5"), 3


def measured(asked: argparse.Namespace, device: torch.device) -> Iterator[Result]:
    """All that was asked for, part by part."""
    wanted = asked.only or PARTS
    with torch.inference_mode():
        if "copies" in wanted:
            yield from copies(device, 1 << 20 if asked.small else 1 << 30)
        if "kernels" in wanted:
            yield from kernels(SMALL if asked.small else LLAMA, device, asked.ops)
    if "agreement" in wanted:
        yield from models.agreement(device, asked.methods or models.ALL)
    if not OF_MODELS.intersection(wanted):
        return
    model, config = small_or_llama(asked.small, asked.device)
    request, lengths = SMALL_REQUEST if asked.small else REQUEST, asked.lengths
    found: list[Result] = []

    def kept(results: Iterator[Result]) -> Iterator[Result]:
        for result in results:
            found.append(result)
            yield result

    if "methods" in wanted:
        names = {s: asked.methods or (models.ALL if s == min(lengths) else models.MANY) for s in lengths}
        layers, hardware = layers_of(model.shape, config), asked.hardware or models.hardware_of(device)
        for batch in asked.batches:
            of = models.times(model, layers, names, asked.n_new, asked.repeats, request, hardware, batch)
            yield from kept(of)
    if "memory" in wanted:
        names = asked.methods or models.SERVED
        most = SMALL_ROWS if asked.small else None
        of = models.memory(model, min(lengths), names, asked.n_new, request, asked.memory_gb, most)
        yield from kept(of)
    if "baseline" in wanted:
        yield from kept(models.baseline(model, min(lengths), asked.n_new))
    if "sweep" in wanted:
        ratios = SMALL_RATIOS if asked.small else models.SWEEP_RATIOS
        one = models.sweep(
            model, min(lengths), asked.n_new, request.comm or Fraction(1, 64), asked.methods or models.SWEEP, ratios
        )
        yield from kept(iter([one]))
    if not asked.recorded:
        yield from models.goals(found)


def small_or_llama(is_small: bool, device: str) -> tuple[Model, Any]:
    """Random weights in Llama-3.1-8B's shape, or three layers of the embedded model's; and its configuration."""
    name = "smollm2-135m" if is_small else "llama-3.1-8b"
    shape = yaml.safe_load((CONF / "architecture" / f"{name}.yaml").read_text())
    config = read_config(name, shape | ({"num_hidden_layers": 3} if is_small else {}))
    return load_random(name, config, device=device), config


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kvbench.benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="a small layer, and three of the embedded model's shape")
    parser.add_argument("--only", nargs="+", choices=PARTS)
    parser.add_argument("--ops", nargs="+", choices=OPS, default=OPS, help="of kernels")
    parser.add_argument("--csv", type=Path, help="file of the rows; without, benchmarks/gpu.csv, and none with --small")
    parser.add_argument("--methods", nargs="+", help="of agreement, methods and sweep; without, those of each part")
    parser.add_argument("--lengths", nargs="+", type=int, help="tokens; all methods at the shortest one")
    parser.add_argument("--batches", nargs="+", type=int, default=[1], help="requests at once, of methods")
    parser.add_argument("--memory-gb", type=float, help="of memory; without, all that the card has")
    parser.add_argument("--hardware", help="file of conf/hardware that is simulated beside; without, this GPU's")
    parser.add_argument(
        "--repeats", type=int, default=1, help="passes of a method at a length, of which the middle counts"
    )
    parser.add_argument("--n-new", type=int, default=20)
    asked = parser.parse_args(words)
    if min(asked.repeats, asked.n_new - 2, *(asked.lengths or ()), *asked.batches) < 1:
        parser.error("--repeats, --lengths and --batches are at least 1, --n-new at least 3")
    asked.lengths = asked.lengths or (SMALL_LENGTHS if asked.small else LENGTHS)
    if torch.device(asked.device).type == "cuda" and not torch.cuda.is_available():
        print("error: there is no GPU that torch can use; --device cpu --small shows that it runs", file=sys.stderr)
        return 2
    try:
        device = torch_device(asked.device)
        for name in asked.methods or ():
            method_of(name)
        if asked.hardware is not None:
            read_hardware(asked.hardware)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    path = asked.csv or (None if asked.small else RESULTS)
    asked.recorded = path is not None
    results = collect(measured(asked, device), path, device)
    if path is not None and OF_MODELS.intersection(asked.only or PARTS):
        results += collect(models.goals(recorded(path, device)), path, device)
    show(results)
    wrong = [result.what for result in results if not result.ok]
    if wrong:
        print(f"wrong: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
