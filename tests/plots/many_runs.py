"""Thousands of made-up finished runs, for the size and the speed of what is made of them.

    python -m kvbench.tests.plots.many_runs DIR [N]

Files are those that runs have, written without the care that a run takes against being killed.
"""

import json
import random
import sys
from itertools import islice, product
from pathlib import Path
from typing import Any

import yaml

from kvbench.plots.looks import LOOKS
from kvbench.results import LEDGER_MEANS, RunFacts, SampleRow, config_hash, prompt_hash, run_name, summarise
from kvbench.results.files import sealed

TASKS = {  # datasets and samples of each
    "longbench": (("docs_qa", "docs_multi_qa", "docs_summary", "docs_classify", "docs_count", "code"), 4),
    "needle": (("own",), 20),
    "gsm8k": (("test",), 24),
    "ruler": (("niah", "vt", "cwe", "qa"), 6),
}
RATIOS = ("0.05", "0.1", "0.2", "0.3", "0.4", "0.5")
COMMS = ("1/128", "1/64", "1/32")
WORDS = "the of a key value cache token budget method attention layer head prompt answer question context".split()


def write_many(root: Path, n: int) -> None:
    """`n` runs: of all methods that the figures know, tasks, ratios and comms, on as many models as it takes."""
    methods = [name for name in LOOKS if name != "minference"]
    each = product(range(1000), TASKS, RATIOS, COMMS, methods)
    for i, (model, task, ratio, comm, method) in enumerate(islice(each, n)):
        write_one(root, random.Random(i), f"model-{model}", task, ratio, comm, method)


def write_one(root: Path, draw: random.Random, model: str, task: str, ratio: str, comm: str, method: str) -> None:
    config: dict[str, Any] = {
        "method": {"name": method, "params": {"window": 32, "n_sink": 4}},
        "task": {"name": task, "params": {}},
        "model": {"name": model, "id": f"org/{model}"},
        "ratio": ratio, "budget": None, "comm": comm, "seed": 0, "limit": None, "dtype": "bfloat16", "device": "cpu",
        "model_digest": model,
    }  # fmt: skip
    datasets, n_each = TASKS[task]
    level = 0.9 if method == "full" else 0.3 + float(ratio)
    rows = [
        sample(draw, f"{dataset}-{i:02d}", model, task, dataset, i, level, float(ratio), method)
        for dataset in datasets
        for i in range(n_each)
    ]
    facts = RunFacts(
        method=method, method_label=method.replace("_", " ").capitalize(), params=config["method"]["params"], task=task,
        task_version=1, dataset="+".join(datasets), data_source="embedded", model=model, compressed_layers=[0, 1],
        dtype="bfloat16", device="cpu", seed=0, ratio_exact=ratio, budget=None, comm_exact=comm, protocol="full_prompt",
        config_hash=config_hash(config), versions={"python": "3.11", "torch": "2.13"}, git_sha="abc", peak_rss_bytes=1,
    )  # fmt: skip
    folder = root / run_name(config)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.dump(config, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper)))
    (folder / "samples.jsonl").write_text("".join(sealed(row.to_json()) + "\n" for row in rows))
    (folder / "env.json").write_text(json.dumps({"platform": "here", "cpu": "one", "n_cores": 2}))
    (folder / "result.json").write_text(sealed(summarise(rows, facts).to_json()))


def sample(
    draw: random.Random, id: str, model: str, task: str, dataset: str, i: int, level: float, ratio: float, method: str
) -> SampleRow:
    n_prompt = 1000 + 10 * i
    attended = n_prompt if method == "full" else ratio * n_prompt + draw.random()
    bins = [1.0 if method == "full" or k in (0, 99) else round(ratio * draw.random(), 3) for k in range(100)]
    ledger: dict[str, Any] = dict.fromkeys(LEDGER_MEANS.values(), 0.0) | {
        "steps": 12, "tokens_budget": int(ratio * n_prompt), "tokens_attended_mean": attended,
        "effective_ratio": attended / n_prompt, "bytes_resident_device": int(attended * 46_080),
        "bytes_resident_host": int((n_prompt - attended) * 46_080), "bytes_moved_kv_per_step": attended * 2304,
        "bytes_moved_meta_per_step": attended * 100, "bytes_resident_device_actual": int(attended * 46_000),
        "bytes_searched_per_step": n_prompt * 1000.0 if method == "oracle" else 0.0,
        "cache_hit_rate": None, "within_budget": True,
    }  # fmt: skip
    fields: dict[str, Any] = {"dataset": dataset} if task != "needle" else {
        "length": 1000 * (1 + i % 4), "depth": 25.0 * (i // 4)
    }  # fmt: skip
    text = " ".join(draw.choices(WORDS, k=200))
    return SampleRow(
        id=id, prompt_sha256=prompt_hash([len(model), len(task), i]), prompt_tokens=n_prompt,
        original_prompt_tokens=n_prompt, generated_tokens=12, prediction=" ".join(draw.choices(WORDS, k=25)),
        references=[text[:40]], score=float(draw.random() < level), status="ok", error=None, prefill_s=draw.random(),
        decode_s=draw.random(), tpot_s=draw.random() / 20, batch_rows=8, ledger=ledger,
        fields=fields | {"attended_bins": bins, "prompt_end": {"context": text[:600], "question": text[-60:]}},
    )  # fmt: skip


if __name__ == "__main__":
    write_many(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 5000)
