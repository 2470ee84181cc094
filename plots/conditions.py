"""Conditions of all runs of docs/results.md, docs/which-method.md and docs/cited.md, said before their first number.

    second_budget   what `comm` left of an index, where it was on
    collapse        at which budget KVzip fails on documents

Not here: what `comm` means (docs/fair-budgets.md), scores (`plots/evidence.py`), questions on one context
(`plots/cited.py`).
"""

from collections.abc import Collection, Sequence
from fractions import Fraction
from math import ceil, floor
from statistics import median

from kvbench.plots.evidence import HIDDEN, SHOWN, WORDS, Scores, mean, title

HEADS = {"qwen2.5-coder-0.5b": 64, "smollm2-135m": 64}  # channels of a head's keys, by model
BY_CHANNELS = ("sparq", "loki", "infinigen", "double_sparsity")  # look at so many channels as `comm` pays for
TWICE, BESIDE = "kvzip", "snapkv"
HEAD = """\
> Before a number is believed:
>
{lines}"""


def head(lines: Collection[str]) -> str:
    """A page's first lines; "" where nothing is to be said."""
    said = "\n".join(f"> - {line}" for line in lines if line)
    return HEAD.format(lines=f"{said}\n\n") if said else ""


def pages(comm: Fraction, prompt: int) -> tuple[int, int]:
    """How many pages of a prompt Quest has whose bounds `comm` pays for, and their tokens."""
    length = max(round(2 / comm), ceil(prompt / max(1, floor(comm * prompt / 2))))
    return ceil(prompt / length), length


def second_budget(comms: Collection[str], models: Collection[str], sets: Sequence[Scores] = ()) -> str:
    """What `comm` left of an index; with lengths of prompts, where scores have them."""
    on = sorted({comm for comm in comms if comm and Fraction(comm)}, key=Fraction)
    if not on:
        return ""
    named = " and ".join(f"`comm={comm}`" for comm in on)
    words = [
        f"**A second budget was on, {named}**, wherever a method fetches: in order to find tokens a step may read that "
        "share of the bytes of the prompt's keys."
    ]
    least = Fraction(on[0])
    heads = {HEADS[model] for model in models if model in HEADS}
    if len(heads) == 1:
        (n,) = heads
        channels = floor(least * n)
        names = ", ".join(map(title, BY_CHANNELS))
        words.append(f"Of a head's {n} channels it pays for {channels} ({names}).")
    words.append(f"{title('quest')}'s pages have {of_pages(least, sets)}; the published ones have 16.")
    words.append(
        "These scores are under both budgets, and another `comm` ranks such methods otherwise: "
        "[register.md](register.md) asks them under bytes alone, with their published index."
    )
    return " ".join(words)


def of_comm(sets: Sequence[Scores]) -> str:
    """The second budget of these tasks."""
    return second_budget({comm for one in sets for comm in one.comms}, {one.model for one in sets}, sets)


def of_pages(comm: Fraction, sets: Sequence[Scores]) -> str:
    """Their length, of prompts where there are fewest of them."""
    asked = [
        (pages(comm, prompt), prompt, max(Fraction(place[1]) for place in one.variants if place[2] == "quest"))
        for one in sets
        if any(place[2] == "quest" for place in one.variants) and (prompt := typical(one))
    ]
    if not asked:
        return f"{round(2 / comm)} tokens or more"
    (n, length), prompt, memory = min(asked, key=lambda one: one[0][0])
    chosen = max(1, floor(memory * prompt) // length)
    where = f"{length} tokens where a prompt has {prompt}"
    return f"{where}: {n} pages, of which a head gets {chosen} at {memory} of the bytes"


def typical(scores: Scores) -> int:
    """The median of its prompts' tokens; 0 where they are not known."""
    return round(median(scores.prompts)) if scores.prompts else 0


def collapse(sets: Sequence[Scores]) -> str:
    """Where KVzip answers documents at the smallest budget less than half as well as at the next larger one."""
    docs = next((one for one in sets if one.asked.key == "docs"), None)
    if docs is None or len(docs.memories) < 2:
        return ""
    (larger, least), found = docs.memories[-2:], list[str]()
    for scope in (SHOWN, HIDDEN):
        ours, before, theirs = (
            docs.of.get(place) for place in ((scope, least, TWICE), (scope, larger, TWICE), (scope, least, BESIDE))
        )
        if ours and before and theirs and mean(ours) < mean(before) / 2:
            a, b, c = (round(100 * mean(one)) for one in (ours, before, theirs))
            found.append(f"{a} with the {WORDS[scope]} ({b} at {Fraction(larger)}; {title(BESIDE)} {c})")
    if not found:
        return ""
    return f"**{title(TWICE)} collapses at {Fraction(least)} on documents**: it scores {', and '.join(found)}."
