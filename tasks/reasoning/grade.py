"""The worker of `judge.py`: reads answers as lines of JSON and writes verdicts; `GRADERS` has what judges by name.

math_verify   the library of this name with its box first: the last box, else what follows an answer phrase, else the
              last number or formula; equality by sympy. `gold` is wrapped into a box as the authors do.
rkv           the script that R-KV, TriAttention and many before them use (`rkv_extract.py`, `rkv_equal.py`).
kvpress       the first box up to its first brace (AIME: the last one), compared as text. Every nested brace fails;
              only for comparisons with that project's numbers.

Nothing a model wrote is ever evaluated as Python. Formulas are read by parsers: of the library, which hands on to
sympy's own reader nothing but digits and operators, and `latex.py` next to this file.

Not here: limits of time and memory (`engine/workers`), prompts and references (`task.py`).
"""

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

from kvbench.engine.workers.serve import serve

STOPS = ("</s>", "<|im_end|>", "<|endoftext|>", "\n题目\N{FULLWIDTH COLON}")  # R-KV's script cuts there
Verdict = tuple[bool, str | None]


def math_verify(text: str, gold: str, more: Mapping[str, str]) -> Verdict:
    """The default."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    box = LatexExtractionConfig(boxed_match_priority=0)
    # Their own limits use signals and raise in places that then keep half-made objects; the process is limited here.
    reference = parse(f"$\\boxed{{{gold}}}$", [box], parsing_timeout=None)  # type: ignore[arg-type]
    prediction = parse(text, [box, ExprExtractionConfig()], parsing_timeout=None)  # type: ignore[arg-type]
    if not prediction:
        return False, None
    correct = bool(reference) and verify(reference, prediction, timeout_seconds=None)  # type: ignore[arg-type]
    return bool(correct), str(prediction[-1])


def rkv(text: str, gold: str, more: Mapping[str, str]) -> Verdict:
    """R-KV's; `solution` holds the reference where it is taken from there."""
    from kvbench.tasks.reasoning.rkv_equal import is_equal
    from kvbench.tasks.reasoning.rkv_extract import clean, extract

    for stop in STOPS:
        if stop in text:
            text = text.split(stop)[0].strip()
    predicted = clean(extract(text)) if text else None
    reference = extract(more["solution"]) if "boxed" in more.get("solution", "") else gold
    return is_equal(predicted, clean(reference)), predicted or None


def kvpress(text: str, gold: str, more: Mapping[str, str]) -> Verdict:
    """kvpress': text against text."""
    pieces = text.split("boxed{")
    if more.get("dataset") == "aime":
        return (found := pieces[-1].split("}")[0]) == gold, found
    if len(pieces) < 2:
        return False, None
    found = pieces[1].split("}")[0]
    return found == gold, found


GRADERS: dict[str, Callable[[str, str, Mapping[str, str]], Verdict]] = {
    "math_verify": math_verify,
    "rkv": rkv,
    "kvpress": kvpress,
}


def reply(question: Mapping[str, Any]) -> dict[str, Any]:
    """The verdict on one answer; what the grader raises is one."""
    text, gold, grader = question["text"], question["gold"], GRADERS[question["grader"]]
    try:
        correct, predicted = grader(text, gold, question)
    except Exception:  # sympy raises what it likes, MemoryError and RecursionError included
        return {"correct": False, "predicted": None, "status": "failed"}
    return {"correct": correct, "predicted": predicted, "status": "ok"}


def warm_up() -> None:
    """Import and compile all that the first answer needs, before its clock starts."""
    rkv("\\boxed{\\frac12}", "0.5", {})
    if find_spec("math_verify"):
        math_verify("\\boxed{\\frac12}", "0.5", {})


if __name__ == "__main__":
    serve(reply, warm_up)
