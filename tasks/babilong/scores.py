"""What an answer to BABILong is worth: the leaderboard's rule with its quirks, and ours.

Labels are found as parts of words. So `no` is found in `not known`, and of qa7 the answer `none` is never right, as it
holds `one`. `is_right(…, whole_words=True)` finds whole words only.

Not here: the prompts (`prompts.py`).
"""

import re

PLACES = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
THINGS = ("apple", "football", "milk")
LABELS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("qa1", "qa2", "qa3", "qa4", "qa11", "qa12", "qa13"), PLACES),
    "qa5": ("Bill", "Fred", "Jeff", "Mary", *THINGS),
    **dict.fromkeys(("qa6", "qa9", "qa17", "qa18"), ("no", "yes")),
    "qa7": ("none", "one", "three", "two"),
    "qa8": (*THINGS, "nothing"),
    "qa10": ("maybe", "no", "yes"),
    "qa14": ("bedroom", "cinema", "kitchen", "office", "park", "school"),
    "qa15": ("cat", "mouse", "sheep", "wolf"),
    "qa16": ("gray", "green", "white", "yellow"),
    "qa19": tuple(f"{a},{b}" for a, ends in (("e", "ens"), ("n", "enw"), ("s", "esw"), ("w", "nsw")) for b in ends),
    "qa20": ("bedroom", "bored", "garden", "hungry", "kitchen", "thirsty", "tired"),
}
MADE = {"qa5": ("Daniel", "John", "Mary", "Sandra", *THINGS)}  # labels of made worlds, where people have other names
CUTS = (".", "<context>", "<example>")  # an answer ends before the first of each


def shortened(prediction: str) -> str:
    """The part of an answer that is looked at."""
    text = prediction.lower()
    for cut in CUTS:
        text = text.partition(cut)[0]
    return text


def is_right(labels: tuple[str, ...], target: str, prediction: str, question: str, whole_words: bool = False) -> bool:
    """Whether the target is the only label of the task in the answer, but for those in the question."""
    target, question, text = target.lower(), question.lower(), shortened(prediction)
    small = {label.lower() for label in labels}
    found = {label for label in small if is_in(label, text, whole_words)} - {one for one in small if one in question}
    wanted = target.split(",") if "," in target and len(target) > 3 else [target]
    return found >= {*wanted} and len(found) == len(wanted)


def is_in(label: str, text: str, whole_words: bool) -> bool:
    return bool(re.search(rf"\b{re.escape(label)}\b", text)) if whole_words else label in text
