"""The GPU's benchmark runs from end to end without one, on small shapes and in Triton's interpreter."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvbench.benchmarks.gpu.__main__ import main, small_or_llama
from kvbench.benchmarks.gpu.models import bytes_of, goals, hardware_of, method_of, sample_of
from kvbench.benchmarks.gpu.results import Result, collect, recorded
from kvbench.engine.budget import EVERYTHING
from kvbench.kernels.jit import triton
from kvbench.tasks.latency import Timed, run_pass

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.skipif(triton is None, reason="Triton is not installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="python -m kvbench.benchmarks.gpu itself runs")
def test_kernels_agree_with_their_references(capsys) -> None:
    assert main(["--device", "cpu", "--small", "--only", "copies", "kernels"]) == 0
    shown = capsys.readouterr().out
    for op in (
        "attend_rows",
        "attend_codes",
        "page_bounds",
        "page_keys",
        "kmeans",
        "cluster_tokens",
        "pq_fit",
        "pq_keys",
    ):
        assert op in shown
    assert "WRONG" not in shown


def test_a_method_that_runs_out_of_memory_is_a_result(capsys, monkeypatch) -> None:
    from kvbench.tasks import latency

    read = latency.read

    def short_of_memory(model, timed, ids, n_new):
        if timed.variant.observations:
            raise MemoryError("too many")
        return read(model, timed, ids, n_new)

    monkeypatch.setattr(latency, "read", short_of_memory)
    words = ["--device", "cpu", "--small", "--only", "methods", "--methods", "streamingllm", "snapkv"]
    assert main([*words, "--lengths", "128", "--batches", "1", "2", "--n-new", "4", "--hardware", "h200"]) == 0
    shown = capsys.readouterr().out
    assert "StreamingLLM: decode" in shown and "TT2T" in shown and "oom" in shown and "batch of 2" in shown


def test_figures_stand_beside_what_they_were_meant_to_be() -> None:
    def decode(name: str, s: int, ms: float, tt2t: float) -> Result:
        return Result(f"{name}: decode", f"m, {s:,} tokens, ratio 0.2", True, None, ms, 8.0, None, "", tt2t, 2.0)

    found = [decode("Full", 8192, 8.0, 2.0), decode("PQCache", 8192, 10.0, 2.0), decode("PQCache", 131000, 15.0, 2.4)]
    found.append(Result("transformers, static cache", "m, 8,192 tokens", True, ms=8.0))
    found.append(Result("sweep against Full alone", "20 variants, 8,192 tokens, 20 new", True, None, 50.0, 20.0))
    said = {each.what.removeprefix("goal: "): each.note for each in goals(found)}
    assert said == {
        "time to the second token, PQCache to Full": "1.20, MISSED",
        "time per token, PQCache, longest to shortest": "1.50, MISSED",
        "time per token, Full to transformers at its fastest": "1.00, met",
        "sweep of twenty variants to Full alone": "2.50, met",
    }
    assert not [*goals([])], "of what was not measured nothing is said"


def test_as_many_requests_as_fit_are_decoded(capsys) -> None:
    words = ["--device", "cpu", "--small", "--only", "memory", "--lengths", "128", "--n-new", "4"]
    assert main([*words, "--methods", "full", "snapkv"]) == 0
    shown = capsys.readouterr().out
    assert "SnapKV: largest batch" in shown and "3 of " in shown and "tokens a second" in shown
    assert main([*words, "--methods", "full", "--memory-gb", "0.001"]) == 0
    assert "leaves nothing beside them" in capsys.readouterr().out


def test_times_are_held_to_what_the_card_can_move() -> None:
    def decode(name: str, s: int, ms: float, batch: int = 1, gb_s: float = 2000.0) -> Result:
        shape = f"m, {s:,} tokens, budget 2048" + f", batch of {batch}" * (batch > 1)
        return Result(f"{name}: decode", shape, True, ms=ms, gb_s=gb_s)

    found = [decode("Full", 32768, 8.5), decode("Full", 32768, 20.0, 8), decode("SnapKV", 131000, 7.0)]
    assert not [each for each in goals(found) if "ms per token" in each.what], "without a copy there is no measure"
    # A card of 2.68 TB/s moves four fifths of what the goals are for.
    copy = Result("copy, device", "1", True, ms=1.0, gb_s=2680.0)
    said = {each.what.removeprefix("goal: "): (each.shape, each.note) for each in goals([copy, *found])}
    assert said == {
        "ms per token, Full, batch of 1, 32,768 tokens": ("at most 10", "8.50, met"),
        "share of a copy's bytes per second, Full, 32,768 tokens": ("at least 0.7", "0.75, met"),
        "ms per token, Full, batch of 8, 32,768 tokens": ("at most 23.75", "20.00, met"),
        "ms per token, SnapKV, batch of 1, 131,000 tokens": ("at most 8.5", "7.00, met"),
    }


def test_a_step_reads_the_weights_and_what_it_attends_to() -> None:
    model, _ = small_or_llama(True, "cpu")
    sample = sample_of(model, 128, 6, 2)
    kind, params = method_of("full")
    with model.hooked():
        rows, _ = run_pass(model, Timed(kind.variant_for(params, EVERYTHING, model.shape, 128)), sample)
    table = model.hf.get_input_embeddings().weight  # the head too
    weights = sum(x.numel() for x in model.hf.parameters()) * table.element_size()
    token = 3 * 2 * model.shape.h_kv * model.shape.d_h * table.element_size()  # of three layers
    tokens = 2 * sum(range(129, 129 + 5)) / 5
    found = bytes_of(model, rows)
    assert found.brought == 0 and found.read == pytest.approx(weights + tokens * token)


def test_the_hardware_that_is_simulated_is_the_gpus(monkeypatch) -> None:
    for name, file in (("NVIDIA H200", "h200"), ("NVIDIA GeForce RTX 4090", "rtx4090-pcie1"), ("Tesla T4", None)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert hardware_of(torch.device("cuda")) == file
    assert hardware_of(torch.device("cpu")) is None


def test_a_wrong_word_is_refused_before_anything_is_measured(capsys) -> None:
    for words, said in (
        (["--methods", "pqcahce"], "pqcache"),
        (["--hardware", "h300"], "h200"),
        (["--repeats", "0"], "at least 1"),
    ):
        try:
            code = main(["--device", "cpu", "--small", *words])
        except SystemExit as ended:
            code = ended.code
        assert code == 2 and said in capsys.readouterr().err


def test_without_a_gpu_it_says_so(capsys) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert main([]) == 2
    assert "no GPU" in capsys.readouterr().err


def test_the_gpu_tests_fail_where_torch_cannot_use_the_gpu(tmp_path: Path) -> None:
    """A driver is there, and torch is built without CUDA: skipped tests would look like passed ones."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU that torch can use")
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "gpu",
        "-p",
        "no:cacheprovider",
        "tests/kernels/test_select_attend.py",
    ]
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, done.stdout
    assert "nvidia-smi is there, but torch" in done.stderr


def test_goals_are_held_to_what_other_commands_measured(tmp_path: Path) -> None:
    path, cpu = tmp_path / "gpu.csv", torch.device("cpu")
    found = [Result("copy, device", "1", True, ms=1.0), Result("join", "2", False, 0.5, note="x, y")]
    collect(found, path, cpu)
    assert recorded(path, cpu) == found


def test_a_part_leaves_the_lines_of_the_others(tmp_path: Path) -> None:
    path, cpu = tmp_path / "gpu.csv", torch.device("cpu")
    collect([Result("copy, device", "1", True, ms=1.0), Result("join", "1", True, ms=2.0)], path, cpu)
    collect([Result("join", "1", True, ms=3.0), Result("join", "2", True, ms=4.0)], path, cpu)
    with path.open(newline="") as handle:
        lines = [(line["what"], line["shape"], line["ms"]) for line in csv.DictReader(handle)]
    assert lines == [("copy, device", "1", "1.0"), ("join", "1", "3.0"), ("join", "2", "4.0")]
