"""Triton's interpreter says the same before and after it was made quicker, of numbers and of mistakes."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvbench.kernels.jit import triton

ROOT = Path(__file__).resolve().parents[1]
CODE = '''
"""In a process of its own, where the interpreter is still as Triton has it."""
import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from kvbench.tests.interpreter import quicken


@triton.jit
def double(x):
    return x * 2


@triton.jit
def mixed(out, numbers, whole, n, scale, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    is_in = at < n
    given = tl.load(numbers + row * n + at, mask=is_in, other=0.5)
    x = (given + given).to(tl.float32) + (given / (given * given)).to(tl.float32)
    i = tl.load(whole + row * n + at, is_in, other=7)
    pairs = x[:, None] * x[None, :] + i[:, None]
    y = tl.sum(pairs, 1) / (1 + tl.max(tl.abs(x), 0)) - scale
    y += tl.where((i > 3) & ((i % 4) != 1), -i, 2 - i // 3).to(tl.float32)
    y = tl.where(is_in | (row == 1), y, tl.exp(-tl.abs(x))) + (i.to(tl.int64) << 2).to(tl.float32)
    y += ((i + 2147483647) >> 28).to(tl.float32) + (3.5 - n) + double(row)
    y += (i.to(tl.uint8) // tl.full((), 5, tl.uint8)).to(tl.float32)
    y += (tl.dot(pairs, pairs.to(tl.bfloat16).to(tl.float32)) * (row + 0.5)).sum(0) * 1e-6
    best = tl.argmax(y, 0)
    tl.store(out + row * (BLOCK + 1) + at, tl.cumsum(y, 0))
    tl.store(out + row * (BLOCK + 1) + BLOCK, best)


@triton.jit
def adds_pointers(x):
    tl.store(x + x, 1.0)


@triton.jit
def moves_by_a_fraction(x):
    tl.store(x + 0.5, 1.0)


@triton.jit
def is_beyond_its_type(x):
    tl.store(x, tl.program_id(0) + 2**40)


@triton.jit
def is_negative_without_a_sign(x):
    tl.store(x, tl.program_id(0).to(tl.uint32) + -1)


@triton.jit
def has_other_shapes(x):
    tl.store(x + tl.arange(0, 4), tl.arange(0, 8))


@triton.jit
def says_what_is_not_so(x, SIZE: tl.constexpr):
    tl.store(x + tl.multiple_of(tl.program_id(0) + 12, SIZE), 1.0)


@triton.jit
def shifts_a_float(x):
    tl.store(x, tl.load(x) << 1)


@triton.jit
def has_no_power_of_2(x):
    tl.store(x + tl.arange(0, 4), tl.zeros((3,), tl.float32))


@triton.jit
def counts(x, n):
    for i in range(0, n, 2):
        tl.store(x + i, i + 1.0)


def found():
    draw = torch.Generator().manual_seed(0)
    numbers, whole = torch.randn(3, 13, generator=draw), torch.randint(0, 300, (3, 13), generator=draw)
    seen = []
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        out = torch.full((3, 17), -1.0)
        mixed[(3,)](out, numbers.to(dtype), whole.to(torch.int32), 13, 0.25, 16)
        seen.append(out.tolist())
    for wrong in (adds_pointers, moves_by_a_fraction, is_beyond_its_type, is_negative_without_a_sign, has_other_shapes,
                  shifts_a_float, has_no_power_of_2):
        try:
            wrong[(1,)](torch.zeros(8))
            seen.append(f"{wrong.fn.__name__} passes")
        except interpreter.InterpreterError as error:
            seen.append(str(error))
    return seen


before = found()
quicken()
assert interpreter.is_quick
for _ in range(2):
    after = found()
    assert repr(after) == repr(before), (before, after)
assert "nan" not in repr(before[:2]), before[:2]  # bfloat16 is computed with as its bits
assert not any("passes" in seen for seen in before[3:]), before[3:]
counted = torch.zeros(5)
counts[(1,)](counted, 5)  # by itself Triton 3.6 makes no such loop with numpy 2.4
assert counted.tolist() == [1, 0, 3, 0, 5], counted
says_what_is_not_so[(1,)](torch.zeros(16), 4)
try:
    says_what_is_not_so[(1,)](torch.zeros(16), 8)
except interpreter.InterpreterError as error:
    assert "no multiples of [8]" in str(error), error
else:
    raise AssertionError("12 passes for a multiple of 8")
'''


def test_numbers_and_mistakes_are_as_triton_has_them(tmp_path: Path) -> None:
    if triton is None:
        pytest.skip("Triton is not installed")
    (tmp_path / "both.py").write_text(CODE)  # kernels are read from their file
    done = subprocess.run(
        [sys.executable, tmp_path / "both.py"], env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
