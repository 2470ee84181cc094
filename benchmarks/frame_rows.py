"""Seconds and memory of `kvbench.results` by the number of rows, from folders, from what was kept, and from Parquet.

    python -m kvbench.benchmarks.frame_rows [--rows 1000000] [--folder DIR]

The folders are those of docs/submissions/first-look, many times over, with other seeds, prompts and numbers; they are
removed again. Each time is a process's own, without the start of Python, with its peak memory.

Not here: the frame (`results/frame.py`).
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import zlib
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import yaml

from kvbench.engine.terminal import say
from kvbench.results import RunFacts, SampleRow, config_hash, prompt_hash, run_name, summarise
from kvbench.results.files import sealed
from kvbench.results.read import Whole, read_whole

SOURCE = Path(__file__).resolve().parents[1] / "docs" / "submissions" / "first-look" / "runs"
SAMPLES = 2000  # of a run
TIMED = """
import resource, sys, time
import kvbench.results
from kvbench.results.frame import frame
start = time.perf_counter()
table = frame(sys.argv[1])
seconds, peak = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
size = f"frame {table.memory_usage(deep=True).sum() / 1e6:,.0f} MB, {len(table):,} rows of {len(table.columns)} columns"
print(f"{sys.argv[2]}: {seconds:.1f} s, peak {peak / 1e3:,.0f} MB, {size}")
"""


def other(row: SampleRow, i: int, draw: random.Random) -> SampleRow:
    """A line of another prompt with other numbers."""
    ledger: dict[str, Any] = {
        key: value * draw.uniform(0.5, 1.5) if isinstance(value, float) else value for key, value in row.ledger.items()
    }
    seconds = {key: draw.uniform(0.1, 9.0) for key in ("prefill_s", "decode_s", "tpot_s")}
    score = draw.random()
    return replace(row, id=f"{row.id}-{i}", prompt_sha256=prompt_hash([i]), ledger=ledger, score=score, **seconds)


def write(folder: Path, whole: Whole, seed: int) -> None:
    """A finished run of `SAMPLES` lines, without a ledger of steps."""
    result, rows, config = whole
    own, draw = json.loads(json.dumps(config)) | {"seed": seed}, random.Random(seed)
    made = [other(rows[i % len(rows)], i, draw) for i in range(SAMPLES)]
    lines = "".join(sealed(row.to_json()) + "\n" for row in made).encode()
    facts = {spec.name: getattr(result, spec.name) for spec in fields(RunFacts)}
    facts |= {"seed": seed, "config_hash": config_hash(own)}
    place = folder / run_name(own)
    place.mkdir(parents=True)
    (place / "samples.jsonl").write_bytes(lines)
    (place / "config.yaml").write_text(yaml.safe_dump(own))
    ended = replace(summarise(made, RunFacts(**facts)), samples_crc32=f"{zlib.crc32(lines):08x}")
    (place / "result.json").write_text(sealed(ended.to_json()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--folder", type=Path, help="where to write some 3 GB a million rows")
    options = parser.parse_args()
    sources = [read_whole(path) for path in sorted(SOURCE.iterdir())]
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        for seed in range(-(-options.rows // SAMPLES)):
            write(folder / "runs", sources[seed % len(sources)], seed)
        environment = os.environ | {"XDG_CACHE_HOME": str(folder / "cache")}
        parquet = folder / "samples.parquet"

        def timed(place: Path, words: str) -> None:
            command = [sys.executable, "-c", TIMED, str(place), words]
            say(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout, end="")

        timed(folder / "runs", "folders, for the first time")
        timed(folder / "runs", "the same folders again")
        export = ["-m", "kvbench.plots.export.command", str(folder / "runs"), "--to", str(parquet)]
        subprocess.run([sys.executable, *export], env=environment, check=True, capture_output=True)
        timed(parquet, f"Parquet of {parquet.stat().st_size / 1e6:,.0f} MB")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
