"""A sweep of twenty variants against its cells one by one, and against full attention alone.

    python -m kvbench.benchmarks.bench_sweep
    python -m kvbench.benchmarks.bench_sweep --many --clock cpu

Ten methods at two ratios are asked a few samples, always to the last new token. Each sample is a pair: what twenty runs
spend on it, and what one fused run does, with the same loaded model and all that a run writes. In float32 both must say
the same, and that is checked first; in 16 bits the number of equal answers is printed, because a batch of another
height rounds differently.

With `--many`, 145 variants against full attention alone: thirty methods at five ratios, 2,000 tokens and answers of 16.
With `--clock cpu`, seconds are those that all threads computed, for machines that others use too.

With `--memory`, the largest resident size of a fused run and of full attention, each in a process of its own. With
`--profile`, where the fused run's time goes, by the engine's spans and by Python's functions.

Not here: single methods (`bench_step.py`), the time to load a model.
"""

import argparse
import cProfile
import json
import pstats
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, process_time

import torch
from hydra import compose, initialize_config_dir

from kvbench.benchmarks.paired import measure, record
from kvbench.engine.books.spans import recording
from kvbench.evals.answer import Answering
from kvbench.evals.loop import Group
from kvbench.evals.models import Models
from kvbench.evals.overrides import CONF
from kvbench.evals.prepare import PreparedSample
from kvbench.evals.runner import prepare
from kvbench.evals.screen.progress import Progress, say
from kvbench.evals.settings import Settings, settings
from kvbench.results import peak_rss_bytes, read_samples
from kvbench.results.opened import open_folders

METHODS = "snapkv,pyramidkv,h2o,xkv,sparq,quest,clusterkv,infllm,infinigen,pqcache"
RATIOS = "0.1,0.2"
MANY = (
    "full,oracle,pqcache,clusterkv,quest,sparq,infinigen,infllm_short,double_sparsity,loki,rocketkv,magicpig,retroinfer,"
    "shadowkv,attention_matching,snapkv,pyramidkv,xkv,adakv,ada_pyramid,expected_attention,kvzip,duo_attention,tova,"
    "keydiff,knorm,lagkv,h2o,pyramidinfer,streamingllm"
)
MANY_RATIOS = "0.1,0.2,0.3,0.4,0.6"
CLOCKS = {"wall": perf_counter, "cpu": process_time}
MAX_GAIN_BYTES = 1.5e9  # of a fused run over full attention


Ready = tuple[Group, list[PreparedSample], Answering]  # a group, the samples that it has not answered, its model


class Unstopped(Answering):
    """Answers have the length that was asked for."""

    def stop_ids(self, one: PreparedSample) -> frozenset[int]:
        return frozenset()


def cells(options: argparse.Namespace, methods: Sequence[str], out: Path) -> list[Settings]:
    depths = ",".join(f"{100 * i / max(1, options.samples - 1):g}" for i in range(options.samples))
    words = [
        *("task=needle", "task.source=embedded", f"task.lengths=[{options.tokens}]"),
        *(
            f"task.depths=[{depths}]",
            f"task.max_new_tokens={options.new}",
            f"dtype={options.dtype}",
        ),
        *("device=cpu", f"out={out}", f"sweep.max_variants={options.max_variants}", "sweep.refused=skip"),
    ]
    made = []
    with initialize_config_dir(str(CONF), version_base="1.3"):
        for method in methods:
            for ratio in options.ratios if method != "full" else options.ratios[:1]:
                given = [*words, f"method={method}", f"ratio={ratio}"]
                cfg = compose("config", given, return_hydra_config=True)
                made.append(settings(cfg, cfg.hydra.runtime.choices, is_sweep=True))
    return made


@contextmanager
def opened(groups: Sequence[Sequence[Settings]], models: Models) -> Iterator[list[Ready]]:
    """Groups that are ready to be asked one sample after the other."""
    with ExitStack() as stack:
        made: list[Ready] = []
        for group in groups:
            checked = prepare(group)
            one = Group(checked)
            one.prepare()
            answering = Unstopped(models.get(checked[0].settings), one.first, Quiet("", one.n, 0))
            made.append((one, one.enter(open_folders(checked, stack, say)), answering))
        if made:
            stack.enter_context(made[0][2].model.hooked())
        yield made


class Quiet(Progress):
    def say(self, line: str) -> None:
        """Only what is measured is printed."""


def asking(groups: Sequence[Ready], clock: Callable[[], float] = perf_counter) -> Callable[[], float]:
    """Ask all of them the next sample: seconds."""
    at = iter(range(len(groups[0][1])))

    def ask() -> float:
        i = next(at)
        start = clock()
        for group, waiting, answering in groups:
            group.ask(waiting[i], answering)
        return clock() - start

    return ask


def answers(folder: Path) -> dict[tuple[str, str], str]:
    """Predictions by run and sample."""
    return {
        (path.parent.name, row.id): row.prediction
        for path in folder.glob("*/samples.jsonl")
        for row in read_samples(path.parent)
    }


def bench_time(options: argparse.Namespace, methods: Sequence[str], scratch: Path) -> None:
    models = Models()
    fused = cells(options, methods, scratch / "fused")
    alone = [] if options.beside == "full" else [[one] for one in cells(options, methods, scratch / "alone")]
    full = cells(options, ["full"], scratch / "full")
    again = cells(options, methods, scratch / "again")
    warm = argparse.Namespace(**vars(options) | {"tokens": min(3000, options.tokens)})
    with opened([cells(warm, methods, scratch / "warm")], models) as groups:
        asking(groups)()
    name = models.get(prepare(fused[:1])[0].settings).shape.name
    dtype, clock = str(models.model.dtype).removeprefix("torch."), CLOCKS[options.clock]

    with opened([fused, full, again, *alone], models) as groups:
        pairs = measure(asking(groups[3:], clock), asking(groups[:1], clock), options.samples, 0) if alone else None
        beside_full = measure(asking(groups[1:2], clock), asking(groups[2:3], clock), options.samples, 0)
        n_variants = len(groups[0][0].cells)
    shape = f"{n_variants} variants, {options.tokens} tokens, {options.new} new, {name}"
    shape += ", CPU time" if options.clock == "cpu" else ""
    record("sweep: fused against full attention alone", shape, dtype, beside_full)
    if pairs is None:
        return
    ours, theirs = answers(scratch / "fused"), answers(scratch / "alone")
    n_same = sum(ours[key] == said for key, said in theirs.items())
    print(f"{n_same} of {len(theirs)} answers are the same fused and alone ({dtype})")
    assert ours.keys() == theirs.keys()
    assert dtype != "float32" or n_same == len(theirs), "fused and alone say different things"
    record("sweep: fused against one by one", shape, dtype, pairs)


def bench_profile(options: argparse.Namespace, methods: Sequence[str], scratch: Path) -> None:
    """Seconds of one fused sample by span, and by function."""
    models = Models()
    with opened([cells(options, methods, scratch / "profile")], models) as groups:
        ask, profile = asking(groups), cProfile.Profile(CLOCKS[options.clock])  # spans are by the wall's clock
        ask()
        with recording() as spans:
            seconds = ask()
        print(f"one sample, fused: {seconds:.2f} s")
        named = spans.seconds()
        for name, part in named.items():
            print(f"  {name:<24} {part:8.2f} s {part / seconds:7.1%}")
        print(f"  {'outside of all spans':<24} {seconds - sum(named.values()):8.2f} s")
        profile.runcall(ask)
    pstats.Stats(profile).sort_stats("tottime").print_stats(options.functions)


def bench_memory(options: argparse.Namespace) -> None:
    """Largest resident sizes, each measured in a process of its own."""
    peak = {}
    for which in ("full", options.methods):
        command = [
            sys.executable,
            "-m",
            "kvbench.benchmarks.bench_sweep",
            "--peak",
            "--methods",
            which,
            "--samples",
            "1",
        ]
        for key in ("tokens", "new", "dtype", "max_variants"):
            command += [f"--{key.replace('_', '-')}", str(getattr(options, key))]
        command += ["--ratios", ",".join(options.ratios)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        peak[which] = json.loads(done.stdout.splitlines()[-1])["peak_rss_bytes"]
    gain = peak[options.methods] - peak["full"]
    print(
        f"peak memory at {options.tokens} tokens: full {peak['full'] / 1e9:.2f} GB, fused "
        f"{peak[options.methods] / 1e9:.2f} GB; {gain / 1e9:+.2f} GB of {MAX_GAIN_BYTES / 1e9:.1f} allowed"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--many", action="store_true", help="145 variants in place of twenty")
    parser.add_argument("--methods")
    parser.add_argument("--ratios")
    parser.add_argument("--beside", choices=("runs", "full"), help="full: full attention alone")
    parser.add_argument("--clock", choices=tuple(CLOCKS), default="wall")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--new", type=int)
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-variants", default="auto")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--functions", type=int, default=30, help="of the profile")
    parser.add_argument("--peak", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.methods = options.methods or (MANY if options.many else METHODS)
    options.ratios = (options.ratios or (MANY_RATIOS if options.many else RATIOS)).split(",")
    options.beside = options.beside or ("full" if options.many else "runs")
    options.tokens = options.tokens or (2000 if options.many else 8000 if options.memory else 4000)
    options.new = options.new or (16 if options.many else 32)
    methods = options.methods.split(",")
    torch.set_grad_enabled(False)
    with TemporaryDirectory() as folder:
        scratch = Path(folder)
        if options.memory:
            bench_memory(options)
        elif options.peak:
            with opened([cells(options, methods, scratch)], Models()) as groups:
                asking(groups)()
            print(json.dumps({"peak_rss_bytes": peak_rss_bytes()}))
        elif options.profile:
            options.samples = max(3, options.samples)
            bench_profile(options, methods, scratch)
        else:
            bench_time(options, methods, scratch)


if __name__ == "__main__":
    main()
