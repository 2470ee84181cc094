"""Rows and runs made up for the tests of run folders, written by the writer that runs have."""

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from kvbench.results import LEDGER_MEANS, RunFacts, RunFolder, RunResult, SampleRow, config_hash, prompt_hash, summarise
from kvbench.results.scores import Score, crc_of_answer

ROOT = Path(__file__).resolve().parents[2]
CONFIG: dict[str, Any] = {
    "method": {"name": "snapkv", "params": {"window": 32}},
    "task": {"name": "needle", "params": {"lengths": [1024, 2048]}},
    "model": {"name": "smollm2-135m"},
    "ratio": "1/5",
    "seed": 0,
    "out": None,
}
FACTS = RunFacts(
    method="snapkv",
    method_label="SnapKV (C)",
    params={"window": 32},
    task="needle",
    task_version=1,
    dataset="own",
    data_source="embedded",
    model="smollm2-135m",
    compressed_layers=[0, 1, 2],
    dtype="float32",
    device="cpu",
    seed=0,
    ratio_exact="1/5",
    budget=None,
    comm_exact="1/64",
    protocol="full_prompt",
    config_hash=config_hash(CONFIG),
    versions={"python": "3.11"},
    git_sha=None,
    peak_rss_bytes=123,
    notes=["own-worded prompts"],
)
VERSION = 7  # of a scorer
FILES = ("config.yaml", "env.json", "ledger.parquet", "result.json", "samples.jsonl")


def ok_row(i: int = 0, **changes: Any) -> SampleRow:
    ledger: dict[str, float | bool | None] = dict.fromkeys(LEDGER_MEANS.values(), i + 0.1)
    row = SampleRow(
        id=f"needle/{i}",
        prompt_sha256=prompt_hash([i, 2, 3]),
        prompt_tokens=1000 + i,
        original_prompt_tokens=1000 + i,
        generated_tokens=5,
        prediction=f"the answer\n{i}",
        references=["an answer"],
        score=1 / (i + 1),
        status="ok",
        error=None,
        prefill_s=0.1 * i,
        decode_s=0.5,
        tpot_s=0.1,
        batch_rows=1,
        ledger={**ledger, "steps": 4, "cache_hit_rate": None, "within_budget": True},
        fields={"length": 1024, "depth": 0.5 * i},
    )
    return replace(row, **changes)


def oom_row(i: int) -> SampleRow:
    return ok_row(i, score=None, status="oom", error="out of memory", ledger={})


def score_of(row: SampleRow, value: float | None = None, **changes: Any) -> Score:
    value = 1 / (2 + len(row.prediction)) if value is None else value
    score = Score(id=row.id, answer_crc32=crc_of_answer(row), score=value, metric=None, task_version=VERSION)
    return replace(score, **changes)


def ledger_of(i: int) -> dict[str, Any]:
    return {"step": list(range(i + 1)), "moved_bytes": np.arange(i + 1) * 1000}


def open_folder(path: Path, config: dict[str, Any] | None = None, **options: Any) -> RunFolder:
    config = config or CONFIG
    return RunFolder.open(path, config, yaml.safe_dump(config), **options)


def run(
    path: Path,
    n: int = 4,
    row: Callable[[int], SampleRow] = ok_row,
    order: Iterable[int] | None = None,
    pause_s: float = 0,
    **options: Any,
) -> RunResult:
    """What the runner does with a folder, without a model."""
    with open_folder(path, **options) as folder:
        if folder.finished is not None:
            return folder.finished
        for i in order or range(n):
            new = row(i)
            folder.check_prompt(new.id, new.prompt_sha256)
            if not folder.has(new.id):
                folder.append(new, ledger_of(i) if new.status == "ok" else None)
                time.sleep(pause_s)
        result = summarise(folder.rows, FACTS)
        folder.finish(result, {"cpu": "one"})
        return result


def contents(path: Path) -> dict[str, bytes]:
    """Every file below a folder, less the lock's."""
    files = [file for file in path.rglob("*") if file.is_file() and not file.name.startswith(".lock")]
    return {str(file.relative_to(path)): file.read_bytes() for file in files}
