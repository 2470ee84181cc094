"""`python -m kvbench.tests.golden DIR [FOLDER…]`: all reference vectors below DIR, a line per case, a count per folder.

DIR holds folders of .npz, .json and .jsonl files: one per method (its name), per prefill (`prefill_NAME`), and of
tasks. Exit code 1 on any failure, and for a file without a runner whose method, prefill or task the project has. Files
of what it does not have are no failure: they are named, counted per folder, and in the last line. With names of folders
only those are run.

Beside a method's tests stands the function that runs its vectors; a new one adds a line to `RUNNERS`.
"""

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path

from kvbench.tests import golden_metrics
from kvbench.tests.engine import test_budget, test_entries, test_post_processing, test_softmax
from kvbench.tests.engine.caches import test_blocks
from kvbench.tests.engine.passes import test_latents
from kvbench.tests.engine.sparse import test_rules
from kvbench.tests.methods.decoding import test_random_decode, test_schedule, test_vase
from kvbench.tests.methods.dropping import (
    test_h2o,
    test_pyramidinfer,
)
from kvbench.tests.methods.retrieving import (
    test_oracle,
)
from kvbench.tests.tasks import (
    test_acceptance,
    test_agent_traces,
    test_babilong,
    test_graphwalks,
    test_gsm8k,
    test_helmet,
    test_ifeval_system,
    test_infinitebench,
    test_longbench,
    test_longbench_v2,
    test_longproc,
    test_mrcr,
    test_oolong,
    test_reasoning,
    test_scbench_rules,
)
from kvbench.tests.vectors import Check

Runner = Callable[[Path], list[Check]]

TESTS = Path(__file__).resolve().parent
CONF = TESTS.parent / "conf"
NOT_YET = "not implemented"
BAD = ("FAILS", "no runner")

NEWER = (
    test_agent_traces,
    test_babilong,
    test_graphwalks,
    test_helmet,
    test_mrcr,
    test_oolong,
)  # tests of tasks with the runners of their own files

RUNNERS: dict[str, Runner] = {
    "acceptance/blocks_*.json": test_acceptance.run_blocks,
    "acceptance/*.npz": test_acceptance.run_vectors,
    "attention_kinds/mla_*.npz": test_latents.run_vectors,
    "attention_kinds/s*.npz": test_softmax.run_vectors,
    "key_rerotation/*.npz": test_post_processing.run_rotation_vectors,
    "merging/*.npz": test_post_processing.run_merging_vectors,
    "pyramidinfer/decode_block_*.npz": test_pyramidinfer.run_block_vectors,
    "decode_time/*.npz": test_schedule.run_vectors,
    "decode_time/prulong_footprint.json": test_entries.run_vectors,
    "random_decode/survival.json": test_random_decode.run_survival,
    "vase/inclusion.json": test_vase.run_inclusion,
    "pqcache/h2o_*.npz": test_h2o.run_weight_vectors,
    "pqcache/cache_*.npz": test_blocks.run_vectors,
    "pqcache/budget_*.npz": test_budget.run_vectors,
    "pqcache/oracle_*.npz": test_oracle.run_weight_vectors,
    "prefill_a_shape/*.npz": test_rules.run_vectors,
    "prefill_block_sparse/*.npz": test_rules.run_vectors,
    "prefill_flexprefill/*.npz": test_rules.run_vectors,
    "prefill_top_cdf/*.npz": test_rules.run_vectors,
    "prefill_xattention/*.npz": test_rules.run_vectors,
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
    **{f"metrics_3/{name}.json": run for test in NEWER for name, run in test.RUNNERS.items()},
}


def find_runner(path: Path) -> Runner | None:
    """Who runs a file, by the names of its folder and itself."""
    name = f"{path.parent.name}/{path.name}"
    if run := next((run for pattern, run in RUNNERS.items() if fnmatch(name, pattern)), None):
        return run
    return of_method(path.parent.name) if path.suffix == ".npz" else None


def of_method(folder: str) -> Runner | None:
    """That of the tests of the method that a folder is called after."""
    test = next((TESTS / "methods").rglob(f"test_{folder}.py"), None)
    if test is None:
        return None
    module = import_module(".".join(["kvbench", *test.relative_to(TESTS.parent).with_suffix("").parts]))
    return getattr(module, "run_vectors", None)


def missing(path: Path) -> str | None:
    """What the project would need for a file of which it has nothing; None where it has the method, prefill or task.

    A folder with a runner is the project's, and so is every file in it, but for those of tasks.
    """
    folder, task = path.parent.name, path.stem.partition("_")[0]
    is_ours = of_method(folder) or any(pattern.startswith(f"{folder}/") for pattern in RUNNERS)
    if is_ours and folder.partition("_")[0] != "metrics":
        return None
    if (prefill := folder.removeprefix("prefill_")) != folder:
        return None if has("prefill", prefill) else f"no prefill {prefill}"
    if folder.partition("_")[0] == "metrics":
        return None if any(one.stem.startswith(task) for one in (CONF / "task").glob("*.yaml")) else f"no task {task}"
    return None if has("method", folder) else f"no method or option {folder}"


def has(group: str, name: str) -> bool:
    return (CONF / group / f"{name}.yaml").is_file()


def files_below(root: Path) -> list[Path]:
    return sorted(path for path in root.glob("*/*") if path.suffix in (".npz", ".json", ".jsonl"))


def run(root: Path, folders: Sequence[str] = ()) -> dict[str, Counter[str]]:
    """Run all files, or those of these folders; per folder how many cases are ok, fail, have no runner, or wait."""
    counts: dict[str, Counter[str]] = {}
    for path in files_below(root):
        if folders and path.parent.name not in folders:
            continue
        count = counts.setdefault(path.parent.name, Counter())
        runner = find_runner(path)
        if runner is None:
            lacks = missing(path)
            what = "no runner" if lacks is None else NOT_YET
            print(f"{what:<15}  {path.parent.name}/{path.name}{'' if lacks is None else f': {lacks}'}")
            count[what] += 1
            continue
        try:
            cases = runner(path)
        except Exception as error:  # a case that breaks the code is a failure like any other, and the others must run
            cases = [(path.stem, f"{type(error).__name__}: {error}")]
        for name, problem in cases:
            what = "ok" if problem is None else "FAILS"
            print(f"{what:<15}  {path.parent.name}/{name}{'' if problem is None else f': {problem}'}")
            count[what] += 1
    return counts


def summary(counts: dict[str, Counter[str]]) -> str:
    """All folders in a line."""
    total = sum(counts.values(), Counter[str]())
    folders = [folder for folder, count in counts.items() if count[NOT_YET]]
    names = f" in {len(folders)} folders ({', '.join(folders)})" if folders else ""
    return (
        f"{total['ok']} ok, {total['FAILS']} FAILS, {total['no runner']} without a runner, "
        f"{total[NOT_YET]} files {NOT_YET}{names}"
    )


def main(arguments: list[str]) -> int:
    if not arguments or not Path(arguments[0]).is_dir():
        print(
            "usage: python -m kvbench.tests.golden DIR [FOLDER…], a folder with one folder of vectors per method",
            file=sys.stderr,
        )
        return 2
    counts = run(Path(arguments[0]), arguments[1:])
    if not counts:
        print(f"no vectors below {arguments[0]}", file=sys.stderr)
        return 1
    for folder, count in counts.items():
        print(f"{folder}: " + ", ".join(f"{number} {what}" for what, number in sorted(count.items())))
    print(summary(counts))
    return int(any(count[what] for count in counts.values() for what in BAD))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
