"""The embedded model itself: what it says through the engine, and which needles each method lets it find."""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hydra import compose
from packaging.version import Version

from kvbench.engine.checkpoints.load import load
from kvbench.engine.decode import decode
from kvbench.engine.model import Model
from kvbench.engine.passes.trace import Trace
from kvbench.engine.prefill import prefill
from kvbench.evals.composing import composing
from kvbench.evals.runner import run_cells
from kvbench.evals.settings import Settings, settings
from kvbench.methods.base import SelectiveAttention
from kvbench.methods.calibration.prose import embedded_prose
from kvbench.methods.dropping.streamingllm import StreamingLLM
from kvbench.methods.full import Full
from kvbench.methods.retrieving.oracle import Oracle
from kvbench.results import read_run, read_samples
from kvbench.tests.vectors import built, request, row_for

CONF = Path(__file__).resolve().parents[1] / "conf"
RECORDED = Path(__file__).parent / "results" / "recorded"
NEW = 8
ORACLE = Oracle.Params("group_sum", 32, Fraction(1, 2), "inside", "fair", "renormalise")
STREAMING = StreamingLLM.Params(4, "inside", "original")
known_conversion = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"),
    reason="this transformers converts the embedded model to another tokenizer.json, which is another model's digest",
)
Kind = tuple[type[SelectiveAttention], Any, str]


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[None]:
    """This model is large enough for all cores, which test processes beside each other share."""
    before, n_processes = torch.get_num_threads(), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // n_processes))
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(threads: None) -> Model:
    return load("smollm2-135m", "embedded", dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def text(model: Model) -> list[int]:
    return model.tokenizer.encode(embedded_prose())


def say(model: Model, trace: Trace, *kinds: Kind) -> list[list[int]]:
    rows = [built(row_for(kind, params, request(ratio=ratio), trace, NEW)) for kind, params, ratio in kinds]
    with model.hooked():
        return [answer.ids for answer in decode(model, trace, rows, max_new_tokens=NEW).answers]


def read(model: Model, ids: list[int]) -> Trace:
    with model.hooked():
        return prefill(model, ids)


@pytest.mark.parametrize(("start", "n"), [(0, 300), (9000, 450), pytest.param(20_000, 3000, marks=pytest.mark.slow)])
def test_full_attention_says_what_generate_says(model: Model, text: list[int], start: int, n: int) -> None:
    ids = text[start : start + n]
    with torch.inference_mode():
        out = model.hf.generate(torch.tensor([ids]), max_new_tokens=NEW, eos_token_id=None, do_sample=False)
    assert say(model, read(model, ids), (Full, Full.Params(), "1")) == [out[0, n:].tolist()]


def test_eight_variants_say_beside_each_other_what_they_say_alone(model: Model, text: list[int]) -> None:
    trace = read(model, text[5000:5500])
    per_head = Oracle.Params("query_head", 32, Fraction(1, 2), "inside", "fair", "renormalise")
    kinds: list[Kind] = [
        (Full, Full.Params(), "1"),
        (Oracle, ORACLE, "1"),
        (StreamingLLM, STREAMING, "1"),
        (Oracle, ORACLE, "0.1"),
        (Oracle, per_head, "0.1"),
        (StreamingLLM, STREAMING, "0.1"),
        (StreamingLLM, StreamingLLM.Params(4, "inside", "cache"), "0.2"),
        (Oracle, ORACLE, "0.3"),
    ]
    together = say(model, trace, *kinds)
    assert together == [say(model, trace, kind)[0] for kind in kinds]
    assert together[0] == together[1] == together[2]


def cell(out: Path, *words: str) -> Settings:
    grid = ["task.source=embedded", "task.lengths=[900]", "task.depths=[0,50,100]"]
    overrides = [*words, *grid, "dtype=float32", "device=cpu", f"out={out}"]
    method = words[0].removeprefix("method=")
    with composing(CONF):
        cfg = compose("config", overrides, return_hydra_config=True)
    return settings(cfg, {"method": method, "task": "needle"}, is_sweep=True)


def test_the_oracle_finds_what_full_attention_finds_and_streamingllm_only_the_ends(tmp_path: Path) -> None:
    cells = [cell(tmp_path, f"method={name}", "ratio=0.1") for name in ("full", "oracle", "streamingllm")]
    (_, full), (folder, oracle), (streamed, streaming) = run_cells(cells)
    assert full.score == oracle.score == 1
    assert [(row.fields["depth"], row.score) for row in read_samples(streamed)] == [(0, 0), (50, 0), (100, 1)]
    # Exactly the promised number of tokens: B and the current one for the oracle, whose window slides.
    for row in read_samples(folder):
        assert row.ledger["tokens_attended_mean"] == row.prompt_tokens // 10 + 1
    assert full.within_budget and oracle.within_budget and streaming.within_budget


@known_conversion
def test_a_run_that_earlier_code_began_goes_on_to_the_same_end(tmp_path: Path) -> None:
    """The folder is one that version 0.1.0 wrote at commit 4cea2e4, before plans, rooms and seals."""
    recorded, folder = RECORDED / "needle-snapkv", tmp_path / "begun"
    shutil.copytree(recorded, folder)
    (folder / "result.json").unlink()
    lines = (recorded / "samples.jsonl").read_text().splitlines(keepends=True)
    (folder / "samples.jsonl").write_text("".join(lines[:2]))
    words = (
        "method=snapkv task=needle task.source=embedded ratio=0.35 comm=1/16 limit=3 dtype=float32 device=cpu".split()
    )
    with composing(CONF):
        cfg = compose("config", [*words, f"out={folder}"], return_hydra_config=True)
    ((where, result),) = run_cells([settings(cfg, {"method": "snapkv", "task": "needle"})])
    expected, rows = read_run(recorded)
    written = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()[:2]]
    assert where == folder and all("crc32" in line for line in written)  # which they have since it went on
    assert [{key: x for key, x in line.items() if key != "crc32"} for line in written] == [*map(json.loads, lines[:2])]
    untimed = {"prefill_s": None, "decode_s": None, "tpot_s": None, "batch_rows": 1}
    begun = read_samples(folder)
    for row, before in zip(begun, rows, strict=True):  # but for what samples say only since
        then = {part: {key: getattr(row, part)[key] for key in getattr(before, part)} for part in ("ledger", "fields")}
        assert replace(row, **untimed, **then) == replace(before, **untimed)
    # The interval of hits and misses was the bootstrap's, and is Wilson's.
    same = ("score", "config_hash", "tokens_attended_mean", "bytes_resident_device")
    assert [getattr(result, key) for key in same] == [getattr(expected, key) for key in same]
