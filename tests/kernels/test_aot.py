"""Kernels compile for GPUs that are not there; only Triton's compiler says so, which its interpreter shuts out."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvbench.kernels import aot
from kvbench.kernels.jit import triton

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(triton is None, reason="Triton is not installed")


def compiled(*words: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-m", "kvbench.kernels.aot", *words],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )


def test_attention_reads_keys_in_loads_of_128_bits() -> None:
    words = ["--arch", "90", "--shapes", "llama-3.1-8b", "--dtypes", "bfloat16", "--lengths", "32768"]
    done = compiled(*words, "--only", "attention", "--sass")
    assert done.returncode == 0, done.stdout + done.stderr
    (line, *_) = [line for line in done.stdout.splitlines() if line.startswith("attend_items sm_90 bfloat16 G=4")]
    assert "no spill" in line
    # A tile of 64 keys of 128 numbers in bfloat16 is 1,024 loads of 128 bits: 8 for each of 128 threads. Values are
    # read alike, and two tiles at once.
    wide = int(line.partition(" loads of 128 bits")[0].rpartition(" ")[2])
    assert wide >= 32, line
    assert "16 bits" not in line


@pytest.mark.parametrize(
    ("site", "of_query"),
    [
        ("rows", {"fetch_tokens": 0, "fill": 0}),
        pytest.param("landmarks", {"score_landmarks": 1}, marks=pytest.mark.slow),
        pytest.param("search", {"weigh": 1, "multiply_tokens": 1, "multiply_blocks": 1}, marks=pytest.mark.slow),
    ],
)
def test_keys_that_a_table_says_the_place_of_are_read_in_loads_of_128_bits(
    site: str, of_query: dict[str, int]
) -> None:  # fmt: skip
    """Of 16 bits are at most those of a query, a number for each thread."""
    words = ["--arch", "90", "--shapes", "llama-3.1-8b", "--dtypes", "bfloat16", "--lengths", "4096"]
    done = compiled(*words, "--only", site, "--sass")
    assert done.returncode == 0, done.stdout + done.stderr
    for kernel, n_narrow in of_query.items():
        lines = [line for line in done.stdout.splitlines() if line.startswith(f"{kernel} sm_90")]
        assert lines, done.stdout
        for line in lines:
            assert f", {n_narrow} loads of 16 bits" in f"{line}, 0 loads of 16 bits", line
            assert "loads of 128 bits" in line, line


@pytest.mark.parametrize(
    ("arch", "shape", "dtype"),
    [
        ("86", "deepseek-v3", "bfloat16"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("86", "gemma-2-9b", "bfloat16"), ("90", "37-heads-of-272", "float32"))
        ),
    ],
)
def test_attention_of_wide_heads_compiles(arch: str, shape: str, dtype: str) -> None:
    """For programs with 99 KB of shared memory, and in float32."""
    words = ["--arch", arch, "--shapes", shape, "--dtypes", dtype, "--lengths", "700", "--only", "attention"]
    done = compiled(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "attend_items" in done.stdout and "0 failed, 0 spill" in done.stdout


@pytest.mark.slow
def test_every_kernel_compiles_without_spills() -> None:
    done = compiled()
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert "0 failed, 0 spill" in done.stdout and "no launch site" not in done.stdout
    for arch in aot.ARCHITECTURES:
        assert f"sm_{arch}" in done.stdout


def test_a_kernel_that_no_launch_site_reaches_is_found() -> None:
    found = aot.kernels()
    assert {"attend_items", "join_items", "fill_slots", "key_pages", "assign_points"} <= found
    assert not {"codes_of", "store_codes"} & found  # functions that kernels call


def test_what_ptxas_says_is_read() -> None:
    made = aot.Compiled("kernel", 90, {}, "bfloat16", "here")
    aot.read_ptxas(
        made, "ptxas info : Used 255 registers\n 16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads"
    )
    assert (made.registers, made.spilled) == (255, 20)
    assert made.spills and "SPILLS 20 bytes" in aot.line_of(made)
    made.registers, made.warps = 128, 4
    assert not made.spills and "20 bytes elsewhere with registers left" in aot.line_of(made)
    made.registers, made.spilled = 64, 4840
    assert made.spills  # which no few bytes are
    made.registers, made.spilled, made.warps = 128, 20, 16  # of which each thread has 128
    assert made.spills
    made.shared = 232_448
    aot.check_shared(made)
    assert not made.error
    made.shared += 16
    aot.check_shared(made)
    assert "FAILED 232464 bytes of shared memory" in aot.line_of(made)
    aot.read_ptxas(made, "")
    assert "FAILED ptxas did not say" in aot.line_of(made)
