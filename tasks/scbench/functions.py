"""SCBench's function match: which function of a repository an answer repeats, and how closely.

The code of an answer is the first function in its first fenced block that has one. Its BLEU-4 on words decides which
of the repository's asked functions it is most like; the answer is right where that is the one that was asked for, and
the likeness is 0.8 or more.

Functions are found by tree-sitter's grammars. Without these packages a line that begins a function and its brackets or
indentation decide; results say which (`finder`), and the two are never mixed in one.

Not here: the other scorers (`scores.py`).
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

THRESHOLD = 0.8
FENCED = re.compile(r"^```(?:\w+)?\s*\n(.*?)(?=^```)```", re.DOTALL | re.MULTILINE)
GRAMMARS = {  # language: its package, the function that gives the grammar, the type of a function's node
    "python": ("tree_sitter_python", "language", "function_definition"),
    "java": ("tree_sitter_java", "language", "method_declaration"),
    "typescript": ("tree_sitter_typescript", "language_typescript", "function_declaration"),
    "rust": ("tree_sitter_rust", "language", "function_item"),
    "cpp": ("tree_sitter_cpp", "language", "function_definition"),
    "go": ("tree_sitter_go", "language", "function_declaration"),
}
PACKAGES = ("nltk", "tree-sitter", *(f"tree-sitter-{language}" for language in GRAMMARS))
BEGINNINGS = {  # of a function's first line, for the search without grammars
    "python": r"[ \t]*(?:async\s+)?def\s+\w+",
    "java": r"[ \t]*(?:[\w@<>\[\],.]+\s+)+\w+\s*\([^;{]*\)[^;{]*\{",
    "typescript": r"[ \t]*(?:export\s+)?(?:async\s+)?function\b",
    "rust": r"[ \t]*(?:pub(?:\([^)]*\))?\s+)?(?:async\s+|unsafe\s+|const\s+)*fn\s+\w+",
    "cpp": r"[ \t]*(?:[\w:<>*&,]+\s+)+[*&]*\w+\s*\([^;{]*\)[^;{]*\{",
    "go": r"func\s+\w+",
}


@dataclass(frozen=True)
class Match:
    """The function that an answer repeats."""

    code: str  # taken out of the answer
    name: str | None  # of the most similar function; None: nothing is similar
    similarity: float
    is_asked: bool  # whether that is the function which was asked for

    def is_right(self, threshold: float = THRESHOLD) -> bool:
        return self.is_asked and self.similarity >= threshold


def missing_grammars() -> list[str]:
    """Packages that the exact search lacks here."""
    packages = ("tree_sitter", *(package for package, _, _ in GRAMMARS.values()))
    return [package for package in packages if find_spec(package) is None]


def finder() -> str:
    """How functions are found here, for the result."""
    return "regular expressions" if missing_grammars() else "tree-sitter"


def match(prediction: str, language: str, asked: str, functions: Iterable[tuple[str, str]]) -> Match:
    """Compare an answer with the (name, code) of every function asked about in the same repository."""
    code = code_of(prediction, language)
    best, name = 0.0, None
    for other, text in functions:
        similarity = bleu(code, text)
        if similarity > best:
            best, name = similarity, other
    return Match(code, name, best, name == asked)


def bleu(candidate: str, reference: str) -> float:
    """Sentence BLEU-4 on words, smoothed by NLTK's method 4."""
    from nltk.translate.bleu_score import SmoothingFunction, sentence_bleu

    words = [re.split(r"\s+", text.strip()) for text in (reference, candidate)]
    found: Any = sentence_bleu([words[0]], words[1], smoothing_function=SmoothingFunction().method4)
    return float(found)


# --- the code of an answer ---------------------------------------------------------------------


def code_of(prediction: str, language: str) -> str:
    """The first function of the first fenced block that has one, else the first block, else the answer."""
    prediction = prediction.strip()
    blocks = FENCED.findall(prediction)
    if not blocks:
        return prediction
    search: Callable[[str, str], str | None] = without_grammar if missing_grammars() else by_grammar
    return next((found for block in blocks if (found := search(block, language)) is not None), blocks[0])


def by_grammar(code: str, language: str) -> str | None:
    """The first function in the text's tree."""
    content, kind = code.encode(), GRAMMARS[language][2]
    waiting = [parser(language).parse(content).root_node]
    while waiting:
        node = waiting.pop()
        if node.type == kind and is_named(node, language):
            return content[node.start_byte : node.end_byte].decode()
        waiting.extend(reversed(node.children))
    return None


def is_named(node: Any, language: str) -> bool:
    """Whether a function's node has a plain name; C++'s methods of classes have none."""
    if language != "cpp":
        return node.child_by_field_name("name") is not None
    declarator = node.child_by_field_name("declarator")
    if declarator is None or declarator.type != "function_declarator":
        return False
    name = declarator.child_by_field_name("declarator")
    return name is not None and name.type == "identifier"


@lru_cache
def parser(language: str) -> Any:
    package, function, _ = GRAMMARS[language]
    tree_sitter = import_module("tree_sitter")
    return tree_sitter.Parser(tree_sitter.Language(getattr(import_module(package), function)()))


def without_grammar(code: str, language: str) -> str | None:
    """The first function by its first line: to the end of its indentation, or to its closing brace."""
    begins = re.search(rf"^{BEGINNINGS[language]}", code, re.MULTILINE)
    if begins is None:
        return None
    rest = code[begins.start() :].lstrip("\n")
    if language == "python":
        return indented(rest)
    depth = 0
    for at, sign in enumerate(rest):
        depth += (sign == "{") - (sign == "}")
        if sign == "}" and depth <= 0:
            return rest[: at + 1].lstrip()
    return rest.strip()


def indented(text: str) -> str:
    """A first line and all deeper ones that follow."""
    first, *others = text.split("\n")
    depth = len(first) - len(first.lstrip())
    kept = [first]
    for line in others:
        if line.strip() and len(line) - len(line.lstrip()) <= depth:
            break
        kept.append(line)
    return "\n".join(kept).strip()
