"""R-KV's equality of two cleaned answers: as texts, as numbers, part by part, as formulas.

Its oddities are kept, since published numbers hang on them: a number counts as right at a hundredth and at the
hundredfold of the reference (73 and 7300); where both are numbers nothing else is asked; formulas are read as far as
they can be, so that what follows a comma or a closing bracket is not compared.

The script reads formulas with three readers in turn, one of which evaluates them as Python. Ours are those of
`latex.py`, which agree with them on how far a broken answer can be read; equality of the results is sympy's.

Not here: extraction and clean-up (`rkv_extract.py`), the time limit (`judge.py`).
"""

import re
from collections.abc import Callable
from math import isclose
from typing import Any

import sympy

from kvbench.tasks.reasoning.latex import read_expression, read_first_line, read_latex

OPEN, CLOSE = "\\begin{pmatrix}", "\\end{pmatrix}"
LIST = re.compile(r"(\(|\[).+(\)|\])")


def is_equal(predicted: str | None, reference: str | None) -> bool:
    """Whether an answer is the reference."""
    if predicted is None or reference is None:
        return False
    if predicted.strip().lower() == reference.strip().lower():
        return True
    if reference in tuple("ABCDE") and choice(predicted) == reference:
        return True
    numbers = number(predicted), number(reference)
    if numbers[0] is not None and numbers[1] is not None:
        return any(is_close(numbers[0], numbers[1] * factor) for factor in (0.01, 1, 100))
    if not predicted:
        return False
    predicted, reference = predicted.strip(), reference.strip()
    if "pmatrix" in predicted and "pmatrix" not in reference:
        reference = as_matrices(reference)
    if without_brackets(predicted, reference):
        return True
    if LIST.match(predicted) and LIST.match(reference):
        return same_parts(predicted[1:-1].split(","), reference[1:-1].split(","))
    if is_matrix(predicted) and is_matrix(reference):
        return same_matrix(predicted, reference)
    if predicted.count("=") == 1 and reference.count("=") == 1:
        left, right = difference(predicted), difference(reference)
        return is_same_formula(left, right) or is_same_formula(f"-({left})", right)
    if is_short_equation(predicted) and "=" not in reference:
        return is_equal(predicted.split("=")[1], reference)
    if is_short_equation(reference) and "=" not in predicted:
        return is_equal(predicted, reference.split("=")[1])
    return is_same_formula(predicted, reference)


# --- texts and numbers -------------------------------------------------------------------------


def choice(text: str) -> str:
    """The last letter from A to E that stands alone."""
    text = text.strip("\n").rstrip(".").rstrip("/").strip(" ").lstrip(":")
    letters = re.findall(r"\b(A|B|C|D|E)\b", text.upper())
    return (letters[-1] if letters else text.strip().strip(".")).rstrip(".").rstrip("/")


def number(text: str) -> float | None:
    """A text as Python's `float` reads it, commas left out and a per cent sign taken as a hundredth."""
    text = text.replace(",", "")
    try:
        return float(text)
    except ValueError:
        pass
    if not text.endswith("%"):
        return None
    try:
        return float(text[:-1].removesuffix("\\")) / 100
    except ValueError:
        return None


def is_close(one: float, other: float) -> bool:
    return isclose(other, one, rel_tol=1e-4)


def without_brackets(predicted: str, reference: str) -> bool:
    """Whether both are one text once their brackets are gone."""
    is_square, is_round = framed(predicted, "[]"), framed(predicted, "()")
    if (is_square and not framed(reference, "()")) or (is_round and not framed(reference, "[]")):
        predicted, reference = predicted.strip("[]()"), reference.strip("[]()")
    bare = str.maketrans("", "", "{}()")
    return predicted.translate(bare).lower() == reference.translate(bare).lower()


def framed(text: str, ends: str) -> bool:
    return text.startswith(ends[0]) and text.endswith(ends[1])


# --- lists, matrices, equations ----------------------------------------------------------------


def same_parts(predicted: list[str], reference: list[str]) -> bool:
    return len(predicted) == len(reference) and all(map(is_equal, predicted, reference))


def is_matrix(text: str) -> bool:
    return text.startswith((OPEN, "\\begin{bmatrix}")) and text.endswith((CLOSE, "\\end{bmatrix}"))


def same_matrix(predicted: str, reference: str) -> bool:
    mine, theirs = rows_of(predicted), rows_of(reference)
    return len(mine) == len(theirs) and all(map(same_parts, mine, theirs))


def rows_of(matrix: str) -> list[list[str]]:
    lines = matrix[len(OPEN) : -len(CLOSE)].split("\\\\")
    return [line.strip().split("&") for line in lines if line.strip()]


def as_matrices(text: str) -> str:
    """Sets in braces as matrices of one column."""
    sets = re.findall(r"\{.*,.*\}", text.strip())
    return ", ".join(OPEN + one.strip("{}").replace(",", "\\") + CLOSE for one in sets)


def difference(equation: str) -> str:
    left, right = equation.split("=")
    return f"{left.strip()} - ({right.strip()})"


def is_short_equation(text: str) -> bool:
    """Whether a text has one equals sign, after a name of up to two characters."""
    return text.count("=") == 1 and len(text.split("=")[0].strip()) <= 2


# --- formulas ----------------------------------------------------------------------------------


def is_same_formula(predicted: str, reference: str) -> bool:
    """Whether both mean the same, as far as they can be read; what cannot be read is compared as text."""
    a: Any = read(predicted)
    b: Any = read(reference)
    if not all(isinstance(one, sympy.Basic) for one in (a, b)):
        return str(a) == str(b) or (type(a) is type(b) and a == b)  # sympy would evaluate a text as Python
    tests: tuple[Callable[[], Any], ...] = (
        lambda: str(a) == str(b) or a == b,
        lambda: a.equals(b) or sympy.simplify(a - b) == 0,
        lambda: abs(a.lhs - a.rhs).equals(abs(b.lhs - b.rhs)),
        lambda: is_close(float(sympy.N(a)), float(sympy.N(b))),
    )
    return any(map(holds, tests))


def holds(test: Callable[[], Any]) -> bool:
    """A test's answer; no, where sympy has none for such objects."""
    try:
        return bool(test())
    except (TypeError, ValueError, AttributeError, ArithmeticError, NotImplementedError, RecursionError):
        return False


def read(text: str) -> Any:
    """A text as a formula by the first reader that can, else as it is."""
    for reader in (read_latex, read_expression, read_first_line):
        for form in (text.replace("\\\\", "\\"), text):
            try:
                return reader(form)
            except (TypeError, ValueError, AttributeError, ArithmeticError, NotImplementedError, RecursionError):
                continue
    return text
