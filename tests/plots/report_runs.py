"""Finished runs for the tests of the report and of copies, written by the writer that runs have."""

from collections.abc import Sequence
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

LEDGER = ("step", "layer", "tokens", "attended", "moved_kv_bytes", "cache_hits", "cache_lookups")


def config_of(method: str, ratio: str, model: str = "tiny", task: str = "needle", **more: Any) -> dict[str, Any]:
    return {
        "method": {"name": method, "params": {"window": 32}},
        "task": {"name": task, "params": {"depths": [0, 50]}},
        "model": {"name": model, "id": f"org/{model}"},
        "ratio": ratio,
        "comm": "1/64",
        "seed": 0,
        "limit": None,
    } | more


def row(
    i: int,
    score: float,
    prediction: str,
    reference: str,
    within: bool,
    fields: dict[str, Any],
    costs: dict[str, float] | None = None,
) -> SampleRow:
    ledger: dict[str, float | bool | None] = dict.fromkeys(LEDGER_MEANS.values(), 1000.0 + 100 * score)
    ledger |= {"bytes_searched_per_step": 0.0} | (costs or {})
    return SampleRow(
        id=f"sample-{i}", prompt_sha256=prompt_hash([i]), prompt_tokens=337 + i, original_prompt_tokens=337 + i,
        generated_tokens=8, prediction=prediction, references=[reference], score=score, status="ok", error=None,
        prefill_s=0.5, decode_s=0.4, tpot_s=0.05, batch_rows=2, ledger=ledger | {"within_budget": within},
        fields=fields,
    )  # fmt: skip


def needle_fields(i: int) -> dict[str, Any]:
    return {"length": 500 * (1 + i % 2), "depth": 50.0 * (i // 2 % 2)}


def write_run(
    root: Path,
    method: str,
    scores: list[float],
    ratio: str = "1/5",
    predictions: list[str] | None = None,
    reference: str = "the reference",
    within: bool = True,
    ledger: bool = True,
    datasets: Sequence[str] = (),
    fields: dict[str, Any] | None = None,
    costs: dict[str, float] | None = None,
    params: dict[str, Any] | None = None,
    **config: Any,
) -> tuple[Path, RunResult]:
    """A finished run below `root`: a needle sample per score, or samples of `datasets` in turn."""
    settings = config_of(method, ratio, **config)
    settings["method"]["params"] |= params or {}
    folder = root / run_name(settings)
    with RunFolder.open(folder, settings, yaml.safe_dump(settings)) as run:
        for i, score in enumerate(scores):
            own: dict[str, Any] = {"dataset": datasets[i % len(datasets)]} if datasets else needle_fields(i)
            if method != "full":
                own["method_report"] = {"pages": [1, 2, i]}
            text = predictions[i] if predictions else f"{method} says {score}"
            steps = {name: [step * 10 for step in (1, 1, 2, 2)] for name in LEDGER}
            steps |= {"step": [1, 1, 2, 2], "layer": [0, 1, 0, 1], "cache_lookups": [40] * 4}
            sample = row(i, score, text, reference, within, own | (fields or {}), costs)
            run.append(sample, steps if ledger else None)
        facts = RunFacts(
            method=method, method_label=method.capitalize(), params=settings["method"]["params"],
            task=settings["task"]["name"], task_version=1, dataset="own", data_source="embedded",
            model=settings["model"]["name"], compressed_layers=[0, 1], dtype="float32", device="cpu", seed=0,
            ratio_exact=ratio, budget=None, comm_exact=settings["comm"], protocol="full_prompt",
            config_hash=config_hash(settings), versions={"python": "3.11"}, git_sha="abc", peak_rss_bytes=123, notes=[],
        )  # fmt: skip
        result = summarise(run.rows, facts)
        run.finish(result, {"platform": "here", "cpu": "one", "n_cores": 2})
    return folder, result
