"""LongProc's scores of a procedure: is all of it right, and how far is it before the first mistake.

The official scorer evaluates an equation of the model's as Python; here it is read as `integer operation integer`. What
makes the official scorer raise gets 0 and is flagged.

Not here: prompts (`task.py`), the reference of countdown (`countdown.py`).
"""

import ast
import operator
import re
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvbench.tasks.longproc.countdown import FOUND, HEADING, Search

OPERATIONS: dict[str, Callable[[int, int], float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}
ARITHMETIC = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.Constant, ast.operator, ast.unaryop)
LONGEST_EQUATION = 200  # characters
FILLERS = (
    *("a", "an", "the", "on", "in", "at", "step", "thinks", "think", "believes", "believe", "is", "are", "of"),
    *("location", "know", "knows", "belief"),
)
FILLER = re.compile(rf"\b({'|'.join(FILLERS)})\b")
PUNCTUATION = str.maketrans("", "", string.punctuation + "’")  # noqa: RUF001 - an apostrophe


@dataclass(frozen=True)
class Procedure:
    """What an answer is worth."""

    accuracy: float
    partial: float
    extracted: float  # whether its result could be taken out
    raises: bool = False  # the official scorer does


def tagged(text: str, tag: str) -> str | None:
    """The text between the first opening and the first closing tag."""
    start, end = text.find(f"<{tag}>"), text.find(f"</{tag}>")
    return None if start < 0 or end < 0 else text[start + len(tag) + 2 : end].strip()


# --- path_traversal ----------------------------------------------------------------------------


def path_traversal(prediction: str, reference: str) -> Procedure:
    """The route, line by line; the line that differs counts as reached."""
    route = tagged(prediction, "Route")
    if route is None:
        return Procedure(0.0, 0.0, 0.0)
    if route == (reference := reference.strip()):
        return Procedure(1.0, 1.0, 1.0)
    theirs, mine = reference.split("\n"), route.split("\n")
    pairs = list(zip(theirs, mine, strict=False))
    reached = next((i for i, (one, other) in enumerate(pairs) if one != other), len(pairs) - 1)
    return Procedure(0.0, (reached + 1) / len(theirs), 1.0)


# --- tom_tracking ------------------------------------------------------------------------------


def tom_tracking(prediction: str, reference: str) -> Procedure:
    """Steps of a belief, compared without their small words."""
    mine, theirs = beliefs(prediction), beliefs(reference)
    if mine == theirs:
        return Procedure(1.0, 1.0, 1.0)
    shorter = min(len(mine), len(theirs))
    differs = (i for i in range(shorter) if mine[i] != theirs[i])
    return Procedure(0.0, next(differs, shorter) / len(theirs), 1.0)


def beliefs(text: str) -> list[str]:
    """The text after the hyphen of lines that begin with one, normalised; an indented line is none."""
    lines = [line.split("-", 1)[1] for line in text.strip().split("\n") if line.startswith("-")]
    plain = (FILLER.sub(" ", line.lower().translate(PUNCTUATION)) for line in lines)
    return [" ".join(words) for line in plain if (words := line.split())]


# --- countdown ---------------------------------------------------------------------------------


def countdown(prediction: str, numbers: Sequence[int], target: int) -> Procedure:
    """The solution in its tags; where it is wrong, how far the log follows the search."""
    solution = tagged(prediction, "Solution")
    extracted = float(solution is not None)
    try:
        if solution is not None and solves(solution, numbers, target):
            return Procedure(1.0, 1.0, 1.0)
        if HEADING not in prediction:
            return Procedure(0.0, 0.0, extracted)
        reference = Search(numbers, target).text().split(HEADING)[-1].split(FOUND)[0].strip()
        return Procedure(0.0, followed(prediction.split(HEADING)[-1].strip(), reference), extracted)
    except Unscorable:
        return Procedure(0.0, 0.0, extracted, raises=True)


class Unscorable(ValueError):
    """The official scorer raises here."""


def solves(solution: str, numbers: Sequence[int], target: int) -> bool:
    """Whether three equations use up the numbers and end at the target."""
    left = list(numbers)
    lines = solution.split("\n")
    if len(lines) != 3:
        return False
    for line in lines:
        found = equation(line.strip())
        if found is None:
            return False
        first, second, result = found
        for number in (first, second):
            if number not in left:
                return False
            left.remove(number)
        left.append(result)
    return left[0] == target


def equation(line: str) -> tuple[int, int, int] | None:
    """Both operands and the result of a line that is a right equation of two whole numbers."""
    sides = line.split("=")
    if len(sides) != 2:
        return None
    refuse_code(sides[0])
    sign = next((sign for sign in OPERATIONS if sign in sides[0]), None)
    try:
        first, second = (int(part) for part in sides[0].split(sign))
        result = int(sides[1])
    except ValueError:
        return None
    if sign == "/" and second == 0:
        raise Unscorable("a division by zero")
    assert sign is not None, "int() takes no text without a sign for two numbers"
    return (first, second, result) if OPERATIONS[sign](first, second) == result else None


def refuse_code(text: str) -> None:
    """Raise `Unscorable` for what is no arithmetic: Python would raise on most of it, and run the rest."""
    if len(text) > LONGEST_EQUATION:
        raise Unscorable(f"an equation of {len(text)} characters")
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Unscorable(str(error)) from None
    for node in ast.walk(tree):
        is_number = not isinstance(node, ast.Constant) or type(node.value) in (int, float)
        if not isinstance(node, ARITHMETIC) or not is_number:
            raise Unscorable(f"{type(node).__name__} is no arithmetic")


def followed(log: str, reference: str) -> float:
    """Position of the last pair of lines that was looked at, as a share; the first line must be the same."""
    mine, theirs = log.split("\n"), reference.split("\n")
    if mine[0] != theirs[0]:
        return 0.0
    pairs = list(zip(mine[1:], theirs[1:], strict=False))
    stop = (at for at, (one, other) in enumerate(pairs) if not passes(one, other))
    return next(stop, len(pairs) - 1) / (len(theirs) - 1)


def passes(line: str, reference: str) -> bool:
    """Whether a line of the log does what the reference's does."""
    if line == reference or "|- Try" not in reference or "Pick two numbers" in reference:
        return line == reference
    drops = "drop this branch"
    return line.split("=")[0] == reference.split("=")[0] and (drops in line) == (drops in reference)
