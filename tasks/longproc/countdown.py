"""The search that LongProc's countdown asks for: four numbers to a target, depth first, written down line by line.

Pairs are tried in the order of the list; of a pair the larger number comes first, and the operations are + - * /. A
fraction or a number from 2,000 on ends a branch.

Not here: what an answer is worth (`scores.py`).
"""

from collections.abc import Iterator, Sequence
from itertools import combinations

HIGHEST = 2000
HEADING = "# Search Procedure"
FOUND = "Now we have found the target"
WORKED = (((40, 19, 23, 7), 29), ((9, 16, 6, 18), 12))  # the two examples in front of every problem


class Search:
    """One search: its log, and the equations of the way to the target."""

    def __init__(self, numbers: Sequence[int], target: int) -> None:
        self.target, self.log, self.way = target, list[str](), list[str]()
        numbers = list(numbers)
        self.log.append(f"Initial number set: {numbers}, target: {target}. {self._options(numbers)}")
        self.is_found = self._pairs(numbers, 1)

    def text(self) -> str:
        """The log, then the way back and the solution in its tags, as the examples show it."""
        first, second, third = self.way
        return (
            f"{HEADING}\n" + "\n".join(self.log) + f"\n\n{FOUND}, let's trace back the solution:\nFinal step: {third}\n"
            f"The step before: {second}\nThe first step: {first}\n\nOutput the solution in the required format:\n"
            f"<Solution>\n{first}\n{second}\n{third}\n</Solution>\n"
        )

    def _options(self, numbers: list[int]) -> str:
        return f"Options for choosing two numbers: {list(combinations(numbers, 2))}."

    def _pairs(self, numbers: list[int], depth: int) -> bool:
        """Try all pairs; whether the target is reached."""
        for i, j in combinations(range(len(numbers)), 2):
            rest = [number for k, number in enumerate(numbers) if k not in (i, j)]
            if len(numbers) > 2:
                pair = f"({numbers[i]}, {numbers[j]})"
                self._write(depth, f"Pick two numbers {pair} (numbers left: {rest}). Try possible operations.")
            large, small = max(numbers[i], numbers[j]), min(numbers[i], numbers[j])
            for equation, value in results(large, small):
                if self._step(equation, value, rest, depth + 1):
                    self.way.insert(0, equation)
                    return True
        return False

    def _step(self, equation: str, value: float | None, rest: list[int], depth: int) -> bool:
        """One operation: its line, and all that follows from it."""
        outcome = self._verdict(value, rest)
        self._write(depth, f"Try {equation}. {outcome}")
        if outcome.endswith("drop this branch."):
            return False
        if not rest:
            return True
        numbers = [int(value or 0), *rest]
        more = " just two numbers left." if len(numbers) == 2 else ""
        tail = f",{more}" if more else f". {self._options(numbers)}"
        self.log[-1] += f" Current number set: {numbers}, target: {self.target}{tail}"
        return self._pairs(numbers, depth + (len(numbers) > 2))

    def _verdict(self, value: float | None, rest: list[int]) -> str:
        if value is None:
            return "drop this branch."
        if value % 1:
            return f"{value:.1f} is a decimal, drop this branch."
        if value >= HIGHEST:
            return f"{value} exceeds the maximum intermediate result, drop this branch."
        if rest:
            return f"Add {value} to the number set."
        if value == self.target:
            return f"Evaluate {value} == {self.target}, target found!"
        return f"Evaluate {value} != {self.target}, drop this branch."

    def _write(self, depth: int, text: str) -> None:
        self.log.append(f"{' ' * depth}|- {text}")


def results(large: int, small: int) -> Iterator[tuple[str, float | None]]:
    """The four operations on a pair; None where there is no result."""
    yield f"{large} + {small} = {large + small}", large + small
    yield f"{large} - {small} = {large - small}", large - small
    yield f"{large} * {small} = {large * small}", large * small
    if small == 0:
        yield f"{large} / {small} (invalid operation)", None
    elif large % small == 0:
        yield f"{large} / {small} = {large // small}", large // small
    else:
        yield f"{large} / {small} = {large / small:.1f}", large / small


def examples() -> str:
    """The worked examples of the prompt."""
    return "\n\n".join(
        f"# Example\nNumbers: {list(numbers)}\nTarget: {target}\n\n{Search(numbers, target).text()}"
        for numbers, target in WORKED
    )
