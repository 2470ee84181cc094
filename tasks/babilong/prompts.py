"""How BABILong asks: the authors' words from the data folder, or words of our own.

A prompt is `TEMPLATE`, trimmed. Parts that are switched off leave their blank lines until then.

Not here: what an answer is worth (`scores.py`).
"""

import ast
from collections.abc import Mapping
from pathlib import Path

from kvbench.engine.errors import ConfigError
from kvbench.engine.foreign import read_text
from kvbench.tasks.sources import missing_keys, read_json

TEMPLATE = "{instruction}\n\n{examples}\n\n{post_prompt}\n\n<context>\n{context}\n</context>\n\nQuestion: {question}"
PARTS = ("instruction", "examples", "post_prompt")
END = "</context>"  # what is asked stands after it
HIDDEN = (
    "The context below is a long text in which a few facts are hidden. Answer the question behind it from these facts "
    "alone. Where facts contradict each other, the later one holds."
)
FORMS: dict[str, tuple[str, str, str]] = {  # by task: a worked example's facts and question, its answer, what to reply
    "qa1": ("Emma went to the hallway. Emma moved to the balcony. Where is Emma?", "balcony", "one place"),
    "qa2": ("Emma took the lamp there. Emma went to the attic. Where is the lamp?", "attic", "one place"),
    "qa3": (
        "Emma took the lamp there. Emma went to the attic. Emma went to the cellar. "
        "Where was the lamp before the cellar?", "attic", "one place",
    ),
    "qa4": ("The attic is north of the cellar. What is north of the cellar?", "attic", "one place"),
    "qa5": ("Emma took the lamp there. Emma gave the lamp to Paul. Who gave the lamp?", "Emma", "one person or thing"),
    "qa6": ("Emma went to the attic. Is Emma in the cellar?", "no", "yes or no"),
    "qa7": ("Emma took the lamp there. How many objects is Emma carrying?", "one", "none, one, two or three"),
    "qa8": ("Emma took the lamp there. What is Emma carrying?", "lamp", "the things, between commas, or nothing"),
    "qa9": ("Emma is not in the attic. Is Emma in the attic?", "no", "yes or no"),
    "qa10": ("Emma is either in the attic or the cellar. Is Emma in the attic?", "maybe", "yes, no or maybe"),
    "qa11": ("Emma went to the attic. Then she went to the cellar. Where is Emma?", "cellar", "one place"),
    "qa12": ("Emma and Paul went to the attic. Where is Paul?", "attic", "one place"),
    "qa13": ("Emma and Paul went to the attic. Then they went to the cellar. Where is Paul?", "cellar", "one place"),
    "qa14": (
        "This morning Emma went to the library. Yesterday Emma went to the shop. "
        "Where was Emma before the library?", "shop", "one place",
    ),
    "qa15": ("Foxes are afraid of bears. Ada is a fox. What is Ada afraid of?", "bear", "one animal"),
    "qa16": ("Ada is a fox. Ada is red. Tom is a fox. What color is Tom?", "red", "one color"),
    "qa17": ("The cube is above the ball. Is the ball below the cube?", "yes", "yes or no"),
    "qa18": ("The chest fits inside the car. Does the car fit in the chest?", "no", "yes or no"),
    "qa19": (
        "The attic is north of the cellar. The cellar is west of the porch. How do you go from the attic to the porch?",
        "s,e", "the two directions by their letters, as s,e",
    ),
    "qa20": ("Emma is tired. Where will Emma go?", "bedroom", "one place or reason"),
}  # fmt: skip
OWN = {
    task: {
        "instruction": HIDDEN,
        "examples": f"<example>\n{facts}\nAnswer: {answer}\n</example>",
        "post_prompt": f"Reply with {reply} and nothing else.",
    }
    for task, (facts, answer, reply) in FORMS.items()
}
UPSTREAM = "GitHub booydar/babilong (babilong/prompts.py)"
THEIRS = "DEFAULT_PROMPTS"  # what prompts.py calls them


def official(path: Path, tasks: tuple[str, ...]) -> Mapping[str, Mapping[str, str]]:
    """The authors' words for these tasks: from their prompts.py, or put into JSON by task and part."""
    wanted = {task: OWN[task] for task in tasks}
    if path.suffix == ".json":
        return read_json(path, UPSTREAM, wanted)
    try:
        statements = [node for node in ast.parse(read_text(path)).body if isinstance(node, ast.Assign)]
        (value,) = [node.value for node in statements if ast.unparse(node.targets[0]) == THEIRS]
        words = ast.literal_eval(value)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise ConfigError(f"{path} holds no {THEIRS} ({error}); get it again from {UPSTREAM}") from None
    if (missing := next(missing_keys(words, wanted), None)) is not None:
        raise ConfigError(f"{path} has no usable {missing}; get it again from {UPSTREAM}")
    return words


def filled(words: Mapping[str, str], context: str, question: str) -> str:
    """The whole prompt; `words` has the parts that are used."""
    parts = {part: words.get(part, "") for part in PARTS}
    return TEMPLATE.format(**parts, context=context.strip(), question=question).strip()
