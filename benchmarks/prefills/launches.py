"""Kernels that a layer of a sparse prefill launches, and how often it waits: `python -m
kvbench.benchmarks.prefills.launches`.

Counted on a pretended device (`benchmarks/pretend`), so no GPU is needed; CSV on standard output: with the file's own
parameters, with a density, and what the sums of all weights add, as H2O observes them.

Exit code 1 says that a prefill waits.

Not here: how long a launch takes.
"""

import argparse
import csv
import os
import sys
from collections.abc import Sequence
from typing import Any

if __name__ == "__main__":  # before Triton's kernels are imported
    os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}

import torch

from kvbench.benchmarks.prefills.bench import rule_of
from kvbench.benchmarks.pretend.counts import Counts
from kvbench.benchmarks.pretend.cuda import Machine
from kvbench.benchmarks.pretend.machine import pretended
from kvbench.engine.softmax import Softmax
from kvbench.engine.sparse.base import SparsePrefill
from kvbench.kernels.attend_kept import kept_sums

SMALL = {  # so that a prompt of a few tokens has several blocks
    "minference": ["prefill.n_vertical=20", "prefill.n_slash=20", "prefill.n_near=16", "prefill.n_first=4"],
    "flexprefill_short": ["prefill.min_budget=32"],
    "xattention_short": [],
    "a_shape_short": ["prefill.n_local=64"],
    "tri_shape_short": ["prefill.n_local=64", "prefill.n_last=16"],
    "block_sparse_short": ["prefill.top_chunks=4"],
    "top_cdf_short": [],
}
N_PROMPT = 200


def counted(machine: Machine, rule: SparsePrefill) -> tuple[Counts, Counts]:
    """Of one layer, and of the sums of its weights."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, n, N_PROMPT, 16, generator=draw).to("cuda", torch.bfloat16) for n in (4, 2, 2))
    rule.attend(q, k, v, Softmax(0.25))  # what is made once is no part of a layer
    of_layer, of_sums = Counts(), Counts()
    machine.counts = of_layer
    _, lse, _, kept = rule.attend(q, k, v, Softmax(0.25))
    machine.counts = of_sums
    kept_sums(q, k, 0.25, kept, lse)
    machine.counts = None
    return of_layer, of_sums


def costs(machine: Machine, name: str) -> dict[str, Any]:
    """Launches and waits of one prefill."""
    own, sums = counted(machine, rule_of(name, *SMALL[name]))
    dense, _ = counted(machine, rule_of(name, *SMALL[name], "prefill.density=0.4"))
    return {
        "prefill": name, "launches": own.launches, "launches_density": dense.launches, "launches_sums": sums.launches,
        "waits": own.waits + dense.waits + sums.waits,
    }  # fmt: skip


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("prefills", nargs="*", default=[*SMALL])
    parser.add_argument("--lines", metavar="PREFILL", help="list the lines of code that launch and wait, and end")
    asked = parser.parse_args(words)
    torch.set_num_threads(1)
    with pretended() as machine:
        if asked.lines is not None:
            for what in ("wait", "launch"):
                print(what)
                for line, n in counted(machine, rule_of(asked.lines, *SMALL[asked.lines]))[0].lines(what):
                    print(f"  {n:6}  {line}")
            return 0
        table, waits = None, 0
        for name in asked.prefills:
            found = costs(machine, name)
            if table is None:
                table = csv.DictWriter(sys.stdout, found)
                table.writeheader()
            table.writerow(found)
            sys.stdout.flush()
            waits += found["waits"]
    return int(waits > 0)


if __name__ == "__main__":
    sys.exit(main())
