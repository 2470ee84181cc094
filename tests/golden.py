"""`python -m tests.golden DIR`: run every reference vector below DIR, a line per case and a count per folder.

DIR holds a folder per method with .npz files, and metrics/ with .json and .jsonl files. Exit code 1 on any failure.
Beside a method's tests stands the function that runs its vectors; a new one adds a line to `RUNNERS`.
"""

import sys
from collections import Counter
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path

from tests import golden_metrics
from tests.engine import test_budget, test_entries
from tests.engine.caches import test_blocks
from tests.evals.tasks import (
    test_gsm8k,
    test_ifeval_system,
    test_infinitebench,
    test_longbench,
    test_longbench_v2,
    test_longproc,
    test_reasoning,
    test_scbench_rules,
)
from tests.methods.compacting import test_attention_matching
from tests.methods.decoding import test_rkv, test_schedule, test_triattention
from tests.methods.dropping import (
    test_adakv,
    test_duo_attention,
    test_expected_attention,
    test_h2o,
    test_keydiff,
    test_knorm,
    test_kvzip,
    test_lagkv,
    test_pyramidinfer,
    test_pyramidkv,
    test_snapkv,
    test_streamingllm,
    test_tova,
    test_xkv,
)
from tests.methods.quantising import test_kivi, test_turboquant
from tests.methods.retrieving import (
    test_clusterkv,
    test_double_sparsity,
    test_infinigen,
    test_infllm,
    test_loki,
    test_magicpig,
    test_oracle,
    test_pqcache,
    test_quest,
    test_retroinfer,
    test_rocketkv,
    test_shadowkv,
    test_sparq,
)
from tests.vectors import Check

Runner = Callable[[Path], list[Check]]

RUNNERS: dict[str, Runner] = {
    "oracle/*.npz": test_oracle.run_vectors,
    "streamingllm/*.npz": test_streamingllm.run_vectors,
    "snapkv/*.npz": test_snapkv.run_vectors,
    "pyramidkv/*.npz": test_pyramidkv.run_vectors,
    "adakv/*.npz": test_adakv.run_vectors,
    "duo_attention/*.npz": test_duo_attention.run_vectors,
    "xkv/*.npz": test_xkv.run_vectors,
    "expected_attention/*.npz": test_expected_attention.run_vectors,
    "kvzip/*.npz": test_kvzip.run_vectors,
    "h2o/*.npz": test_h2o.run_vectors,
    "tova/*.npz": test_tova.run_vectors,
    "keydiff/*.npz": test_keydiff.run_vectors,
    "knorm/*.npz": test_knorm.run_vectors,
    "lagkv/*.npz": test_lagkv.run_vectors,
    "pyramidinfer/prefill_*.npz": test_pyramidinfer.run_vectors,
    "pyramidinfer/decode_block_*.npz": test_pyramidinfer.run_block_vectors,
    "rkv/*.npz": test_rkv.run_vectors,
    "triattention/*.npz": test_triattention.run_vectors,
    "decode_time/*.npz": test_schedule.run_vectors,
    "decode_time/prulong_footprint.json": test_entries.run_vectors,
    "kivi/*.npz": test_kivi.run_vectors,
    "turboquant/*.npz": test_turboquant.run_vectors,
    "sparq/*.npz": test_sparq.run_vectors,
    "quest/*.npz": test_quest.run_vectors,
    "rocketkv/*.npz": test_rocketkv.run_vectors,
    "attention_matching/*.npz": test_attention_matching.run_vectors,
    "shadowkv/*.npz": test_shadowkv.run_vectors,
    "magicpig/*.npz": test_magicpig.run_vectors,
    "retroinfer/*.npz": test_retroinfer.run_vectors,
    "infllm/*.npz": test_infllm.run_vectors,
    "clusterkv/*.npz": test_clusterkv.run_vectors,
    "infinigen/*.npz": test_infinigen.run_vectors,
    "double_sparsity/*.npz": test_double_sparsity.run_vectors,
    "loki/*.npz": test_loki.run_vectors,
    "pqcache/h2o_*.npz": test_h2o.run_weight_vectors,
    "pqcache/cache_*.npz": test_blocks.run_vectors,
    "pqcache/budget_*.npz": test_budget.run_vectors,
    "pqcache/oracle_*.npz": test_oracle.run_weight_vectors,
    "pqcache/search_*.npz": test_pqcache.run_vectors,
    "pqcache/assign_*.npz": test_pqcache.run_vectors,
    "pqcache/kmeans_*.npz": test_pqcache.run_vectors,
    "pqcache/trace_*.npz": test_pqcache.run_vectors,
    "pqcache/iters_*.npz": test_pqcache.run_vectors,
    "pqcache/fit_*.npz": test_pqcache.run_vectors,
    "pqcache/bytes_*.npz": test_pqcache.run_vectors,
    "metrics/longbench_metrics.json": test_longbench.run_metric_vectors,
    "metrics/longbench_datasets.json": test_longbench.run_dataset_vectors,
    "metrics/needle_ruler.json": golden_metrics.run_needle_ruler,
    "metrics/gsm8k_extraction.json": test_gsm8k.run_vectors,
    "metrics/infinitebench_samples.jsonl": test_infinitebench.run_samples,
    "metrics/infinitebench_totals.json": test_infinitebench.run_totals,
    "metrics/infinitebench_tricky.json": test_infinitebench.run_tricky,
    "metrics/reasoning_answers.json": test_reasoning.run_answers,
    "metrics/reasoning_passk.json": test_reasoning.run_passk,
    "metrics/longproc_scores.json": test_longproc.run_vectors,
    "metrics/scbench_samples.json": test_scbench_rules.run_samples,
    "metrics/scbench_repoqa.json": test_scbench_rules.run_repoqa,
    "metrics/scbench_aggregate.json": test_scbench_rules.run_aggregate,
    "metrics/scbench_prompts.json": test_scbench_rules.run_prompts,
    "metrics/kvzip_answers.json": test_scbench_rules.run_kvzip,
    "metrics/longbench_v2.json": test_longbench_v2.run_vectors,
    "metrics/ifeval.json": test_ifeval_system.run_ifeval,
    "metrics/leakage_rouge.json": test_ifeval_system.run_leakage,
}


def find_runner(path: Path) -> Runner | None:
    """Who runs a file, by the names of its folder and itself."""
    return next(
        (run for pattern, run in RUNNERS.items() if fnmatch(f"{path.parent.name}/{path.name}", pattern)),
        None,
    )


def files_below(root: Path) -> list[Path]:
    found = [
        *root.glob("*/*.npz"),
        *root.glob("decode_time/*.json"),
        *root.glob("metrics/*.json"),
        *root.glob("metrics/*.jsonl"),
    ]
    return sorted(found)


def run(root: Path) -> dict[str, Counter[str]]:
    """Run all files; per folder how many cases are ok, fail, or have no runner."""
    counts: dict[str, Counter[str]] = {}
    for path in files_below(root):
        count = counts.setdefault(path.parent.name, Counter())
        runner = find_runner(path)
        if runner is None:
            print(f"no runner  {path.parent.name}/{path.name}")
            count["no runner"] += 1
            continue
        try:
            cases = runner(path)
        except Exception as error:  # a case that breaks the code is a failure like any other, and the others must run
            cases = [(path.stem, f"{type(error).__name__}: {error}")]
        for name, problem in cases:
            print(
                f"ok         {path.parent.name}/{name}"
                if problem is None
                else f"FAILS      {path.parent.name}/{name}: {problem}"
            )
            count["ok" if problem is None else "FAILS"] += 1
    return counts


def main(arguments: list[str]) -> int:
    if len(arguments) != 1 or not Path(arguments[0]).is_dir():
        print(
            "usage: python -m tests.golden DIR, a folder with one folder of vectors per method",
            file=sys.stderr,
        )
        return 2
    counts = run(Path(arguments[0]))
    for folder, count in counts.items():
        print(f"{folder}: " + ", ".join(f"{number} {what}" for what, number in sorted(count.items())))
    if not counts:
        print(f"no vectors below {arguments[0]}", file=sys.stderr)
    return int(not counts or any(count["FAILS"] for count in counts.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
