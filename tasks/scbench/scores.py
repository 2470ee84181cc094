"""SCBench's scorers, with every quirk of the authors' own: published tables contain them.

Each takes an answer and the turn's reference as it is stored (types matter) and returns 0 to 1. Where the authors'
scorer raises, `turn_score` gives 0 and the name of what it raises. Means are over turns of one index first.

Not here: functions out of a repository (`functions.py`), KVzip's rules for the same data (`kvzip.py`).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import fsum
from typing import Any

from kvbench.tasks.infinitebench.scores import (
    FIRST_NUMBER,
    first_digits,
    first_of,
    longbook_choice_eng,
    longbook_qa_chn,
    longbook_sum_eng,
)

SUBTASKS = {  # of the mixed tasks, in the order of the official table
    "scbench_summary_with_needles": ("scbench_summary", "scbench_passkey"),
    "scbench_repoqa_and_kv": ("scbench_repoqa", "scbench_kv"),
}
RAISES = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError)


def substring(prediction: str, truth: Any) -> float:
    """kv, prefix_suffix: the reference stands somewhere in the answer, in the same case."""
    return float(truth in prediction)


def share_of_names(prediction: str, truth: Any) -> float:
    """vt: share of the references in the answer, whatever the case, to two decimals."""
    lowered = prediction.lower()
    return round(sum(one.lower() in lowered for one in truth) / len(truth), 2)


def any_inside(prediction: str, truth: Any) -> float:
    """qa_eng, many_shot: any reference in the answer, whatever the case; of a plain text any letter."""
    raised = prediction.strip().upper()
    return float(any(one.upper() in raised for one in truth))


def first_number(prediction: str, truth: Any) -> float:
    """mf: the first number, without its sign, cut to a whole one where the reference is whole."""
    truth = first_of(truth)
    if not isinstance(truth, int | float):
        raise TypeError(f"the reference {truth!r} is no number")
    match = FIRST_NUMBER.search(prediction)
    if match is None:
        return 0.0
    value = float(match.group())
    return float((int(value) if isinstance(truth, int) else value) == truth)


SCORERS: dict[str, Callable[[str, Any], float]] = {
    "scbench_kv": substring,
    "scbench_prefix_suffix": substring,
    "scbench_vt": share_of_names,
    "scbench_qa_eng": any_inside,
    "scbench_many_shot": any_inside,
    "scbench_qa_chn": longbook_qa_chn,
    "scbench_choice_eng": longbook_choice_eng,
    "scbench_mf": first_number,
    "scbench_passkey": first_digits,
    "scbench_summary": longbook_sum_eng,
}


def turn_score(task: str, prediction: str, truth: Any) -> tuple[float, str | None]:
    """The score of one turn, and what the authors' scorer raises on it, if anything; a mixed task by its subtask."""
    try:
        return SCORERS[task](prediction, truth), None
    except RAISES as error:
        return 0.0, type(error).__name__


# --- means -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TurnScore:
    """One answered turn."""

    sample: str
    turn: int  # from 0
    score: float
    task: str = ""  # the subtask, in a mixed task


def turn_means(scores: Iterable[TurnScore], task: str = "") -> dict[int, float]:
    """Mean over samples of each turn's index; without turns that nobody has."""
    by_turn: dict[int, list[float]] = {}
    for one in scores:
        if one.task == task:
            by_turn.setdefault(one.turn, []).append(one.score)
    return {turn: fsum(each) / len(each) for turn, each in by_turn.items()}


def official_by_turn(scores: Sequence[TurnScore], tasks: Sequence[str] = ("",)) -> str:
    """The line of the authors' file, in per cent: a mixed task has its subtasks side by side, and 0 for none."""
    turns = dict.fromkeys(one.turn for one in scores)
    means = {task: turn_means(scores, task) for task in tasks}
    return ",".join(percent(means[task].get(turn, 0.0)) for turn in turns for task in tasks)


def official_at_once(scores: Sequence[TurnScore], tasks: Sequence[str] = ("",)) -> str:
    """The official mean of independent questions, over all of them."""
    each = {task: [one.score for one in scores if one.task == task] for task in tasks}
    return ",".join(percent(sum(values) / len(values) if values else 0.0) for values in each.values())


def percent(share: float) -> str:
    return f"{100 * share:.3f}"
