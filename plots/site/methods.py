"""What the site says of a method: the parts of its card, its paper, its command, and traits that its file declares.

Not here: how it scored (`plots/site/boards.py`).
"""

import ast
import re
from functools import cache
from pathlib import Path
from typing import Any

from kvbench.engine.errors import ConfigError
from kvbench.methods.cite import paper_of
from kvbench.results.names import known, own_methods

GOLDEN = Path(__file__).resolve().parents[2] / "tests" / "golden"
PART = re.compile(r"^(Paper|Symbols|Per step|Differs|Fails|Figures) +(.*(?:\n +\S.*)*)", re.MULTILINE)
TRAITS = {  # of a class, as its file or those that it builds on declare them
    "prunes_prompt": "own prefill",
    "of_answers": "compresses while it answers",
    "is_question_free": "never sees the question",
}


@cache
def card(name: str) -> dict[str, Any]:
    """The card of a method of ours; {} of any other."""
    method = known(name)
    if method is None:
        return {}
    path = own_methods()[method]
    source = path.read_text(encoding="utf-8")
    text = ast.get_docstring(ast.parse(source)) or ""
    parts = {key: " ".join(words.split()) for key, words in PART.findall(text)}
    about = PART.split(text)[0].strip()
    title, _, idea = about.partition("\n")
    try:
        paper = paper_of(method)
    except ConfigError:
        paper = None
    family = parts.pop("Figures", "").partition(":")[0]
    return {
        "name": method,
        "title": title,
        "idea": " ".join(idea.split()),
        "parts": {key: words for key, words in parts.items() if key != "Paper"},
        "paper": parts.get("Paper", ""),
        "link": None if paper is None else paper.link,
        "bibtex": None if paper is None else paper.bibtex(method),
        "command": f"python run.py method={method} task=needle ratio=0.2",
        "golden": (GOLDEN / method).is_dir(),
        "family": family,
        "traits": [words for key, words in TRAITS.items() if re.search(rf"^\s+{key}\b.*= True", source, re.MULTILINE)],
    }
