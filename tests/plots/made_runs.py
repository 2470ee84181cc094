"""Finished runs of every task that tables and figures read, made up and written by the writer that runs have."""

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from kvbench.results import (
    LEDGER_MEANS,
    RunFacts,
    RunFolder,
    RunResult,
    SampleRow,
    config_hash,
    prompt_hash,
    run_name,
    summarise,
)

N_LAYERS = 12
LABELS = {
    "full": "Full", "oracle": "Oracle", "h2o": "H2O (C)", "snapkv": "SnapKV (C)", "infllm": "InfLLM",
    "sparq": "SPARQ", "pqcache": "PQCache", "xkv": "XKV", "quest": "Quest", "clusterkv": "ClusterKV",
    "rkv": "R-KV", "snapkv_decode": "SnapKV while decoding",
    "pyramidkv": "PyramidKV (C)", "infinigen": "InfiniGen", "streamingllm": "StreamingLLM",
}  # fmt: skip
PQ = {"m": "auto", "b": "auto", "iterations": 10}


def write(
    root: Path,
    method: str,
    task: str,
    rows: Iterable[dict[str, Any]],
    *,
    params: dict[str, Any] | None = None,
    task_params: dict[str, Any] | None = None,
    ratio: str | None = "1/5",
    budget: int | None = None,
    comm: str = "1/64",
    seed: int = 0,
    cache: dict[str, Any] | None = None,
    model: str = "tiny",
    source: str = "embedded",
    metric: str | None = None,
    label: str | None = None,
    notes: list[str] | None = None,
    prefill: dict[str, Any] | None = None,
    memory: str | None = None,
    counts: str | None = None,
    digest: str | None = None,
    env: dict[str, Any] | None = None,
) -> tuple[Path, RunResult]:
    """A run; each row is what differs from a plain sample, `fields` among it. `prefill`: a sparse one's parameters."""
    sparse = {} if prefill is None else {"prefill": {"name": "minference", "params": prefill}}
    if sparse and label is None:
        label = "MInference" if method == "full" else f"MInference + {LABELS[method]}"
    config: dict[str, Any] = (
        sparse
        | ({} if memory is None else {"memory": memory})
        | ({} if digest is None else {"model_digest": digest})
        | {
            "method": {"name": method, "params": params or {}},
            "task": {"name": task, "params": task_params or {}},
            "model": {"name": model, "id": model},
            "ratio": None if budget else ratio,
            "budget": budget,
            "comm": comm,
            "cache": {"tokens": 0, "block_len": 128, "k_cache": 32, "policy": "lfu"} | (cache or {}),
            "seed": seed,
            "limit": None,
            "data_dir": None if source == "embedded" else "data",
        }
    )
    folder = root / run_name(config)
    with RunFolder.open(folder, config, yaml.safe_dump(config)) as run:
        for i, row in enumerate(rows):
            run.append(sample(i, **row))
        facts = RunFacts(
            method=method, method_label=label or LABELS[method], params=params or {}, task=task, task_version=1,
            dataset=task, data_source=source, model=model, compressed_layers=list(range(N_LAYERS)),
            dtype="float32", device="cpu", seed=0, ratio_exact=None if budget else ratio, budget=budget,
            comm_exact=comm, protocol="full_prompt", config_hash=config_hash(config), versions={}, git_sha=None,
            peak_rss_bytes=1, metric=metric, notes=notes or [], prefill="minference" if sparse else "exact",
            prefill_params=prefill or {}, memory_exact=memory, budget_counts=counts,
        )  # fmt: skip
        result = summarise(run.rows, facts)
        run.finish(result, env or {})
    return folder, result


def sample(
    i: int,
    score: float | None = 0.5,
    fields: dict[str, Any] | None = None,
    ledger: dict[str, Any] | None = None,
    prompt_tokens: int = 1000,
    prediction: str = "",
    references: list[str] | None = None,
    prompt: int | None = None,
    generated_tokens: int = 8,
) -> SampleRow:
    """Line `i`; of the prompt with this number, where several lines are of one."""
    whole: dict[str, Any] = dict.fromkeys(LEDGER_MEANS.values(), 200.0) | {"within_budget": True}
    whole["bytes_resident_device"] = 2.0e6
    ok = score is not None
    return SampleRow(
        id=f"sample-{i}", prompt_sha256=prompt_hash([i if prompt is None else prompt]), prompt_tokens=prompt_tokens,
        original_prompt_tokens=prompt_tokens, generated_tokens=generated_tokens, prediction=prediction,
        references=references or [], score=score, status="ok" if ok else "oom",
        error=None if ok else "out of memory", prefill_s=0.5, decode_s=0.4, tpot_s=0.05, batch_rows=1,
        ledger=whole | (ledger or {}) if ok else {}, fields=fields or {},
    )  # fmt: skip


def answers(datasets: Iterable[str], level: float, n: int = 6, **more: Any) -> list[dict[str, Any]]:
    """Samples of several datasets with scores around a level."""
    random_ = random.Random(f"{level:.4f}")
    return [
        {"score": min(1.0, max(0.0, random_.gauss(level, 0.15))), "fields": {"dataset": name}} | more
        for name in datasets
        for _ in range(n)
    ]


def every_kind(root: Path) -> None:
    """Runs that fill every figure."""
    scores(root)
    timings(root)
    layers(root)
    of_bytes(root)
    of_answers(root)


def of_bytes(root: Path) -> None:
    """Methods at shares of the full cache's bytes."""
    held = {"resident_share": 1.0, "moved_bytes_per_step": 0.0}
    write(root, "full", "longbench", answers(("docs_qa",), 0.7, ledger=held), ratio="1", model="small")
    for i, method in enumerate(("snapkv", "pqcache")):
        for j, memory in enumerate(("1/8", "1/4", "1/2")):
            share = {
                "resident_share": 0.125 * 2**j,
                "moved_bytes_per_step": 1e5 * i,
                "bytes_resident_device": 1e6 * 2**j,
            }
            rows = answers(("docs_qa",), 0.3 + 0.1 * j + 0.05 * i, ledger=share)
            params = PQ if method == "pqcache" else {}
            write(root, method, "longbench", rows, params=params, ratio=memory, memory=memory, model="small")


def of_answers(root: Path) -> None:
    """Budgets of prompt and answer together."""
    write(root, "full", "gsm8k", answers(("gsm8k",), 0.7, ledger={"footprint_entries": 1000.0}), ratio="1")
    for i, method in enumerate(("rkv", "snapkv_decode")):
        for j, budget in enumerate((96, 128, 160)):
            rows = answers(("gsm8k",), 0.3 + 0.1 * j + 0.05 * i, ledger={"footprint_entries": 300.0 + 200 * j + i})
            write(root, method, "gsm8k", rows, ratio=None, budget=budget, comm="0", counts="target")


def scores(root: Path) -> None:
    two = ("docs_qa", "docs_count")
    full = {"bytes_resident_device": 9.0e6}
    write(root, "full", "longbench", answers(two, 0.7, ledger=full), ratio="1")
    for i, method in enumerate(("oracle", "h2o", "snapkv", "infllm", "sparq")):
        for j, ratio in enumerate(("1/10", "1/5", "2/5")):
            kept = {"bytes_resident_device": 1e6 * (1 + j) * (1 + i / 9), "tokens_attended_mean": 100.0 * 2**j + i}
            level = 0.35 + 0.05 * i + 0.1 * j
            write(root, method, "longbench", answers(two, level, ledger=kept), ratio=ratio)
    for i, comm in enumerate(("1/128", "1/32", "1/16")):
        for j, method in enumerate(("infllm", "sparq")):
            found = {"bytes_moved_meta_per_step": 1e3 * 4**i}
            write(root, method, "longbench", answers(two, 0.4 + 0.04 * i + 0.1 * j, ledger=found), comm=comm)
    for m in (2, 4):
        for b in (2, 4, 6):
            said = {"m": m, "b": b, "comm_nominal": m * b / 2048}
            rows = answers(two[:1], 0.3 + m * b / 60)
            rows = [row | {"fields": row["fields"] | {"method_report": said}} for row in rows]
            write(root, "pqcache", "longbench", rows, params=PQ | {"m": m, "b": b}, comm="1/32")
    for policy in ("lru", "lfu"):
        for k in (8, 16, 32):
            cache = {"tokens": 4096, "policy": policy, "k_cache": k}
            hit = {"cache_hit_rate": 0.4 + k / 200 + 0.05 * (policy == "lfu")}
            write(root, "pqcache", "longbench", answers(two, 0.6, ledger=hit), params=PQ, cache=cache)
    for rounds in (1, 5, 10):
        params = PQ | {"iterations": rounds}
        write(root, "pqcache", "longbench", answers(two, 0.4 + rounds / 50), params=params, ratio="1/10")
    for i, method in enumerate(("full", "h2o", "snapkv", "pqcache")):
        grid = [
            {"score": float((length + depth + 13 * i) % 3 != i), "fields": {"length": length, "depth": depth}}
            for length in (500, 1000, 2000)
            for depth in (0.0, 50.0, 100.0)
        ]
        write(root, method, "needle", grid, params=PQ if method == "pqcache" else {}, ratio="1/10")
    for i, method in enumerate(("full", "quest", "clusterkv")):
        rows = [
            {
                "score": 10.0 + i - n / 1000,
                "fields": {
                    "metric": "perplexity",
                    "length": n,
                    "n_targets": 8,
                    "nll_sum": 8 * (2.3 + i / 10 - n / 9000),
                },
            }
            for n in (512, 1024, 2048)
        ]
        write(root, method, "pg19", rows, budget=256, metric="perplexity")
        for budget in (128, 256, 512):
            if method != "full":
                kept = {"tokens_attended_mean": budget + 4.0}
                found = [{"score": 0.3 + 0.1 * i + budget / 2000, "fields": {"metric": "recall"}, "ledger": kept}] * 2
                write(root, method, "fidelity", found, budget=budget, metric="recall")
    exact = {"agg": "query_head", "n_sink": 0, "local_share": 0}
    for ratio in (0.02, 0.1, 0.5):
        mass = [min(1.0, ratio ** (0.1 + layer / 30)) for layer in range(N_LAYERS)]
        rows = [{"score": 1.0, "fields": {"metric": "recall", "by_layer": {"mass": mass}}}]
        write(root, "oracle", "fidelity", rows, params=exact, ratio=str(ratio), metric="recall")


def timing(length: int, slow: float) -> dict[str, Any]:
    def spread(value: float) -> list[float]:
        return [0.95 * value, 1.1 * value]

    ttft, tpot = slow * length / 4000, slow * (0.02 + length / 400_000)
    both = {"ttft": ttft, "tt2t": ttft + 2 * tpot, "tpot": tpot}
    found: dict[str, Any] = {f"{name}_s": value for name, value in both.items()}
    found |= {f"{name}_s_q": spread(value) for name, value in both.items()}
    found["prefill_parts_s"] = {"model": ttft * 0.6, "attention": ttft * 0.3, "offload": ttft * 0.1}
    found["step_parts_s"] = {"model": tpot * 0.5, "search": tpot * 0.3, "fetch": tpot * 0.2}
    return found


def timings(root: Path) -> None:
    def rows(slow: float) -> list[dict[str, Any]]:
        return [
            {
                "score": slow,
                "prompt_tokens": n,
                "fields": {"metric": "tpot_ratio", "length": n, "batch": 1, "timing": timing(n, slow)},
            }
            for n in (4000, 8000, 16_000)
        ]

    asked: dict[str, Any] = {"task_params": {"n_new": 32}, "metric": "tpot_ratio"}
    write(root, "full", "latency", rows(1.0), ratio="1", **asked)
    write(root, "snapkv", "latency", rows(0.7), **asked)
    for tokens in (0, 2048, 4096):
        cache = {"tokens": tokens}
        write(root, "pqcache", "latency", rows(0.9 - tokens / 20_000), params=PQ, cache=cache, **asked)
    for rounds in (1, 5):
        params = PQ | {"iterations": rounds}
        write(root, "pqcache", "latency", rows(0.8 + rounds / 50), params=params, **asked)


def layers(root: Path) -> None:
    def report(seed: int, **more: Any) -> dict[str, Any]:
        draw = random.Random(seed)
        n = [60 + round(40 * draw.random()) + 5 * (layer % 3) for layer in range(N_LAYERS)]
        retention = [0.5 + 0.4 * draw.random() for _ in range(N_LAYERS)]
        said = {"n": n, "retention": retention, "r_avg": sum(retention) / N_LAYERS}
        return said | more

    def rows(**more: Any) -> list[dict[str, Any]]:
        return [
            {"score": 0.4 + i / 10, "fields": {"dataset": "docs_qa", "method_report": report(i, **more)}}
            for i in range(3)
        ]

    draw = random.Random(0)
    weights = [[draw.random() ** 6 for _ in range(24)] for _ in range(N_LAYERS)]
    at = {name: [30 + 9 * ((layer * k) % 5) for layer in range(N_LAYERS)] for k, name in ((1, "0.5"), (3, "0.9"))}
    profiled = {"allocation": "exact", "profile_bins": 24}
    write(root, "xkv", "longbench", rows(w=weights, n_at_retention=at), params=profiled)
    for ratio in ("1/10", "1/5"):
        params = {"allocation": "uniform", "profile_bins": 0}
        write(root, "xkv", "longbench", rows(), params=params, ratio=ratio)
    for i in range(3):
        params = {"allocation": "sampled", "shares": [1 + i, 2], "profile_bins": 0}
        shifted = [row | {"fields": row["fields"] | {"method_report": report(9 + i)}} for row in rows()]
        write(root, "xkv", "longbench", shifted, params=params, ratio="1/20")
