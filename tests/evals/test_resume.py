"""`kill -9` at ten random moments of a sweep: nothing finished is repeated, and it ends as if nothing had happened.

On a model of a few thousand weights, which is killed in its samples as often as in its start; the embedded model would
spend the test in its prefill.
"""

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kvbench.results import read_runs, read_samples
from kvbench.tests.tiny_run import save_tiny

ROOT = Path(__file__).resolve().parents[2]
KILLS = 10
SWEEP = [
    *("dtype=float32", "device=cpu", "task=needle", "task.source=embedded", "task.lengths=[500,600]"),
    "task.max_new_tokens=12",
    "task.depths=[0,5,10,15,20,25,30,35,40,45,50,55,60,65,70,75,80,85,90,95]",
    "method=full,oracle,streamingllm,snapkv,pyramidkv,h2o,pyramidinfer,sparq,quest,clusterkv",
    *("ratio=0.6,0.7", "comm=1/8", "sweep.max_variants=9"),
]  # fmt: skip
DRAWS = [  # three of 4 x 2 answers at a time, so that a prompt's draws end at different moments
    *("dtype=float32", "device=cpu", "task=needle", "task.source=embedded", "task.lengths=[400]"),
    *("task.max_new_tokens=60", "task.depths=[0,25,50,75,100]", "method=snapkv_decode,h2o_decode", "budget=128"),
    *("temperature=0.9", "n_answers=4", "sweep.max_variants=3"),
]  # fmt: skip
TIMES = (
    "prefill_s",
    "decode_s",
    "tpot_s",
    "batch_rows",
    "batch_rows_mean",
    "peak_rss_bytes",
    "git_sha",
    "samples_crc32",  # of lines with their times
)


def start(model: Path, out: Path, words: list[str] = SWEEP) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(ROOT / "run.py"), "-m", f"model={model}", f"out={out}", *words]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def end(process: subprocess.Popen[bytes]) -> None:
    said = process.communicate()[1]
    assert process.returncode == 0, said.decode()


def lines(out: Path) -> dict[str, list[bytes]]:
    """Whole lines of every samples.jsonl."""
    return {file.parent.name: file.read_bytes().split(b"\n")[:-1] for file in sorted(out.glob("*/samples.jsonl"))}


def told(out: Path) -> dict[str, Any]:
    """What the runs say, times apart; the samples by their ids."""
    found = {}
    for path, result in read_runs(out):
        rows = {row.id: row.to_dict() for row in read_samples(path)}
        facts = json.loads(result.to_json())
        for values in (*rows.values(), facts):
            for key in TIMES:
                values.pop(key, None)
            values.get("method_report", {}).pop("clustering_s", None)
        found[path.name] = (rows, facts)
    return found


@pytest.mark.slow
def test_a_sweep_killed_ten_times_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    end(start(model, whole))
    n_lines = sum(map(len, lines(whole).values()))
    assert n_lines == 19 * 40, "ten methods at two ratios; full attention runs once"
    rng, kills, before = random.Random(0), 0, dict[str, list[bytes]]()
    while kills < KILLS:
        # A random moment behind a random number of samples more, or in the start.
        wanted = sum(map(len, before.values())) + rng.randrange(1, n_lines // KILLS)
        wait = rng.random() * 0.05
        if kills % 5 == 4:
            wanted, wait = 0, rng.random() * 8
        process = start(model, killed)
        while process.poll() is None and sum(map(len, lines(killed).values())) < wanted:
            time.sleep(0.002)
        time.sleep(wait)
        assert process.poll() is None, "the sweep ended before it could be killed"
        process.send_signal(signal.SIGKILL)
        process.communicate()
        kills += 1
        now = lines(killed)
        for name, had in before.items():
            assert now[name][: len(had)] == had, "a line that was there is another one now"
        before = now
    assert 0 < sum(map(len, before.values())) < n_lines
    end(start(model, killed))
    for name, had in before.items():
        assert lines(killed)[name][: len(had)] == had, "a finished sample was repeated"
    assert told(killed) == told(whole)


@pytest.mark.slow
def test_a_sweep_killed_between_draws_goes_on_with_the_same_draws(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    end(start(model, whole, DRAWS))
    ids = {json.loads(line)["id"] for of in lines(whole).values() for line in of}
    assert len(ids) == 5 * 4 and all("#" in id for id in ids)
    process = start(model, killed, DRAWS)
    while process.poll() is None and not any(len(of) % 4 for of in lines(killed).values()):
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    before = lines(killed)
    assert process.returncode == -signal.SIGKILL
    assert any(len(of) % 4 for of in before.values()), "it was not killed between draws"
    end(start(model, killed, DRAWS))
    for name, had in before.items():
        assert lines(killed)[name][: len(had)] == had, "a finished draw was repeated"
    assert told(killed) == told(whole)
