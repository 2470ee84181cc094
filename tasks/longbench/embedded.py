"""A set shaped like LongBench from text that every Python has: its help topics and the sources of its modules.

Seven datasets, one or two for each of LongBench's kinds of task, eight rows each, 1,500 to 6,000 tokens of SmolLM2 with
the prompt. With `task.rows` above eight, further rows of 1,650 tokens each are drawn from the same texts; only
docs_summary has no more. The same Python gives the same rows; another one has other text, so a result names the Python
and the hash of the first eight rows of each.

The seven are made for a model of 135M parameters, which copies well and reasons badly: answers stand in the text word
for word, and the prompt ends with the words that stand before them there. A method that drops those tokens cannot
answer. Three of the seven are hard for the model, as they are in LongBench: a summary, counting paragraphs, and finding
one by its last sentence.

An eighth, docs_facts, is asked by its name alone, and the hash names it where it is asked. Its rows all have 1,650
tokens, and its answers do not stand in the text.

Not here: what docs_facts states and asks (`facts.py` next to this file), how prompts are put together
(`prompts.py`), and their scores (`scores.py`).
"""

import ast
import hashlib
import json
import random
import re
import sys
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from kvbench.methods.calibration.prose import HEADING, as_prose
from kvbench.tasks.longbench.facts import FORMS, questions, scattered, statement_room

N_ROWS = 8  # of a dataset, a length for each
LENGTHS = (1_650, 3_000, 4_700, 2_000, 3_600, 5_500, 2_400, 4_100)  # tokens of SmolLM2 per context, about
KINDS = ("grammar", "example", "sentence", "title")
SENTENCE_END = re.compile(r"(?<=[a-z)]\.) (?=[A-Z])")
Row = dict[str, Any]


@dataclass(frozen=True)
class Embedded:
    """One dataset: how its rows are made, and what a prompt of it looks like."""

    make: Callable[[int, int], Row]  # number of the row, characters of its context
    template: str
    metric: str
    category: str
    max_new_tokens: int
    letters: float = 4.75  # characters per token of this dataset's contexts, as measured
    cue: str = ""  # stays after the context when the question moves before it; "": the question cannot move
    has_more: bool = True  # rows than `N_ROWS`
    lengths: Sequence[int] = LENGTHS  # tokens of the first rows' contexts
    is_in_set: bool = True  # else it is asked by its name alone


# --- the text ----------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def topics() -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Python's help topics, each with its paragraphs of prose; a paragraph stands in the first that has it."""
    from pydoc_data.topics import topics as texts

    seen: set[str] = set()
    found = []
    for name in sorted(texts):
        paragraphs = []
        for block in re.split(r"\n\s*\n", texts[name]):
            paragraph = as_prose(block)
            if paragraph and paragraph not in seen:
                seen.add(paragraph)
                paragraphs.append(paragraph)
        if paragraphs:
            found.append((name, tuple(paragraphs)))
    return tuple(found)


@lru_cache(maxsize=1)
def paragraphs() -> tuple[str, ...]:
    """All prose, in the topics' order."""
    return tuple(paragraph for _, found in topics() for paragraph in found)


@lru_cache(maxsize=1)
def sources() -> tuple[tuple[str, str], ...]:
    """Names and sources of the modules that are one file, public and of some length."""
    folder = Path(sysconfig.get_path("stdlib"))
    found = []
    for file in sorted(folder.glob("*.py")):
        if file.stem in sys.stdlib_module_names and not file.stem.startswith("_"):
            text = file.read_text(encoding="utf-8", errors="replace")
            if len(text) > 4_000 and text.isascii():
                found.append((file.stem, text))
    return tuple(found)


@lru_cache(maxsize=1)
def docstrings() -> tuple[tuple[str, str, str], ...]:
    """Name, first line and the rest of the docstring of each module whose first line says what it is for."""
    found = []
    for name, text in sources():
        match = re.match(r'(?:#[^\n]*\n|[ \t]*\n)*[rR]?("""|\'\'\')(.*?)\1', text, re.DOTALL)
        if match is None:
            continue
        first, _, rest = match.group(2).strip().partition("\n")
        rest = " ".join(rest.split())
        if 5 <= len(first.split()) <= 14 and len(rest) > 200 and not first.endswith(","):
            found.append((name, first.removesuffix("."), rest))
    return tuple(found)


def sentences(paragraph: str) -> list[str]:
    return SENTENCE_END.split(paragraph)


def shortened(text: str, length: int) -> str:
    """A text of at most so many characters, up to a full stop or a word's end."""
    if len(text) <= length:
        return text
    cut = text[:length]
    stop = cut.rfind(". ")
    return cut[: stop + 1] if stop > length // 2 else cut.rpartition(" ")[0]


def drawn(name: str, number: int) -> random.Random:
    return random.Random(f"{name} {number}")


def filled(parts: Sequence[str], length: int, joint: str = "\n\n") -> list[str]:
    """Parts from the first on, as many as so many characters hold."""
    taken: list[str] = []
    for part in parts:
        length -= len(part) + len(joint)
        if length < 0 and taken:
            break
        taken.append(part)
    return taken


def part_of_prose(rng: random.Random, length: int) -> list[str]:
    """A run of paragraphs from somewhere in the prose."""
    start = rng.randrange(len(paragraphs()))
    return filled(paragraphs()[start:] + paragraphs()[:start], length)


# --- the datasets ------------------------------------------------------------------------------


def make_qa(number: int, length: int) -> Row:
    """A row of one text: which words follow the first eight of a sentence that begins like no other."""
    rng = drawn("qa", number)
    text = part_of_prose(rng, length)
    whole = "\n\n".join(text)
    candidates = []
    for sentence in (one for paragraph in text for one in sentences(paragraph)):
        words = sentence.split()
        opening = " ".join(words[:8])
        if 14 <= len(words) <= 26 and whole.count(opening) == 1:
            candidates.append((opening, " ".join(words[8:])))
    opening, rest = rng.choice(candidates)
    return {"context": whole, "input": opening, "answers": [rest]}


def make_multi_qa(number: int, length: int) -> Row:
    """A passage per module; what one of them is for, which its first line says."""
    rng = drawn("multi_qa", number)
    modules = rng.sample(docstrings(), len(docstrings()))
    passages = filled([f"{name}: {first}\n{shortened(rest, 700)}" for name, first, rest in modules], length - 400)
    name, first, _ = rng.choice(modules[: len(passages)])
    text = "\n\n".join(f"Passage {i}\nThe module {one}" for i, one in enumerate(passages, start=1))
    return {"context": text, "input": name, "answers": [first]}


def make_summary(number: int, length: int) -> Row:
    """A topic without its first sentence, which is what the summary is held against."""
    by_length = sorted((found for _, found in topics()), key=lambda one: -sum(map(len, one)))
    text = list(by_length[N_ROWS - 1 - sorted(LENGTHS).index(LENGTHS[number])])
    first, *others = sentences(text[0])
    text[0] = " ".join(others)
    return {
        "context": "\n\n".join(filled([one for one in text if one], length)),
        "input": "",
        "answers": [first],
    }


def lines_by_kind() -> dict[str, list[str]]:
    """Single lines of the help topics, by what they are."""
    from pydoc_data.topics import topics as texts

    found: dict[str, dict[str, None]] = {kind: {} for kind in KINDS}
    for name in sorted(texts):
        lines = texts[name].splitlines()
        for line, below in zip(lines, [*lines[1:], ""], strict=True):
            bare = line.strip()
            if not 10 <= len(bare) <= 80:
                continue
            if "::=" in bare:
                found["grammar"].setdefault(bare)
            elif bare.startswith(">>> "):
                found["example"].setdefault(bare)
            elif HEADING.match(below) and not HEADING.match(bare):
                found["title"].setdefault(bare)
    for paragraph in paragraphs():
        for sentence in sentences(paragraph):
            if len(sentence) <= 80:
                found["sentence"].setdefault(sentence)
    return {kind: list(lines) for kind, lines in found.items()}


def make_classify(number: int, length: int) -> Row:
    """Lines of the help topics, each with its kind; the kind of one more."""
    rng = drawn("classify", number)
    lines = lines_by_kind()
    kinds = [kind for _ in range(length // 150) for kind in rng.sample(KINDS, len(KINDS))]
    pools = {kind: rng.sample(found, len(found)) for kind, found in lines.items()}
    kind = KINDS[number % len(KINDS)]
    asked = pools[kind].pop()
    shown = []
    for one in kinds:
        if pools[one]:
            shown.append(f"Line: {pools[one].pop()}\nKind: {one}")
    return {
        "context": "\n\n".join(filled(shown, length)),
        "input": f"Line: {asked}\nKind:",
        "answers": [kind],
        "all_classes": list(KINDS),
    }


def numbered(rng: random.Random, texts: Sequence[str]) -> tuple[str, list[int]]:
    """Paragraphs with numbers after them, in no order: a small model would count on."""
    numbers = rng.sample(range(100, 1000), len(texts))
    shown = (f"{one} [Paragraph {i}]" for one, i in zip(texts, numbers, strict=True))
    return "\n\n".join(shown), numbers


def make_retrieval(number: int, length: int) -> Row:
    """Paragraphs with their numbers below them; the number of the one that ends with a sentence."""
    rng = drawn("retrieval", number)
    long = [one for one in paragraphs() if 250 <= len(one) <= 900]
    texts = filled(rng.sample(long, len(long)), length - 20 * (length // 400))
    context, numbers = numbered(rng, texts)
    ends = [sentences(one)[-1] for one in texts]
    right = rng.choice([i for i, end in enumerate(ends) if 40 <= len(end) <= 160])
    return {
        "context": context,
        "input": ends[right],
        "answers": [f"Paragraph {numbers[right]}"],
    }


def make_facts(number: int, length: int) -> Row:
    """Paragraphs with made statements between them; one of these, asked in other words."""
    rng = drawn("facts", number)
    form = FORMS[number % len(FORMS)]
    text = part_of_prose(rng, length - statement_room(form))
    context = scattered(rng, form, text)
    return {"context": context, **rng.choice(questions(context))}


def make_count(number: int, length: int) -> Row:
    """Paragraphs, some of them more than once; how many different ones."""
    rng = drawn("count", number)
    long = [one for one in paragraphs() if 250 <= len(one) <= 900]
    texts = filled(rng.sample(long, len(long)), length - 20 * (length // 400))
    unique = rng.randrange(2, max(3, len(texts)))
    shown = texts[:unique] + [rng.choice(texts[:unique]) for _ in texts[unique:]]
    rng.shuffle(shown)
    return {"context": numbered(rng, shown)[0], "input": "", "answers": [str(unique)]}


def code_lines(text: str) -> list[int]:
    """Numbers of the lines that are a statement's first one, so that no text in quotes is asked for."""
    return sorted({node.lineno - 1 for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)})


def make_code(number: int, length: int) -> Row:
    """A module up to a line; that line, which has followed the same line once before."""
    rng = drawn("code", number)
    modules = [text for _, text in sources() if len(text) > length]
    for text in rng.sample(modules, len(modules)):
        lines = text.splitlines()
        found = []
        for i in code_lines(text):
            shown = whole_lines(lines, i, length)
            is_code = re.fullmatch(" {4,}[^ ][^#`]{24,70}", lines[i]) and "//" not in lines[i]
            if is_code and shown and (lines[i - 1], lines[i]) in pairwise(shown[:-12]):
                found.append((shown, lines[i]))
        if found:
            shown, line = rng.choice(found)
            rest = line.lstrip()
            return {
                "context": "\n".join(shown) + "\n",
                "input": " " * (len(line) - len(rest) - 1),  # tokens of code begin with a blank
                "answers": [f" {rest}"],
                "language": "python",
            }
    raise AssertionError(f"no module of this Python repeats a pair of lines over {length} characters")


def whole_lines(lines: Sequence[str], end: int, length: int) -> list[str] | None:
    """The lines before `end` that so many characters hold; None where there are not enough."""
    start = end
    while length > 0 and start > 0:
        start -= 1
        length -= len(lines[start]) + 1
    return list(lines[start:end]) if length <= 0 else None


DATASETS = {
    "docs_qa": Embedded(
        make_qa,
        "Read the text. Then say how one of its sentences ends.\n\n{context}\n\nThe sentence of the text that begins "
        "with the following words.\n{input}",
        "qa_f1", "single-doc QA", 32, cue="\n\nAnswer:",
    ),
    "docs_multi_qa": Embedded(
        make_multi_qa,
        "Read the passages. Then say what one of the modules is for.\n\n{context}\n\nWhat one of the modules is for, "
        "in the words of its passage.\nThe module {input}:",
        "qa_f1", "multi-doc QA", 32, 4.2, cue="\n\nAnswer:",
    ),
    "docs_summary": Embedded(
        make_summary,
        "Read the text. Then say in one sentence what it is about.\n\n{context}\n\nThe text in one sentence:",
        "rouge", "summarization", 48, has_more=False,
    ),
    "docs_classify": Embedded(
        make_classify,
        f"Lines of a manual, each with its kind: {', '.join(KINDS)}.\n\n{{context}}\n\n{{input}}",
        "classification", "few-shot", 8, 3.35,
    ),
    "docs_retrieval": Embedded(
        make_retrieval,
        "Paragraphs of a manual, each with a number behind it.\n\n{context}\n\nThe paragraph that ends with the "
        "following words, and its number.\n\n{input} [Paragraph",
        "retrieval", "synthetic", 8,
    ),
    "docs_count": Embedded(
        make_count,
        "Paragraphs of a manual. Some stand there more than once.\n\n{context}\n\nThe number of different paragraphs, "
        "each counted once, is",
        "count", "synthetic", 8,
    ),
    "code_next_line": Embedded(
        make_code,
        "A Python module that breaks off, and its next line.\n\n{context}{input}",
        "code_sim", "code", 48, 4.1,
    ),
    "docs_facts": Embedded(
        make_facts,
        "Read the text. Then answer questions about people in it.\n\n{context}\n\n{input}\nAnswer:",
        "fact", "single-doc QA", 12, cue="\nAnswer:", is_in_set=False, lengths=(min(LENGTHS),) * N_ROWS,
    ),
}  # fmt: skip
SET = tuple(name for name, dataset in DATASETS.items() if dataset.is_in_set)


@lru_cache
def first_rows(name: str) -> tuple[Row, ...]:
    """The rows of a dataset that every result names, with LongBench's fields."""
    return tuple(whole_row(name, number) for number in range(N_ROWS))


def rows_of(name: str, n: int | None) -> tuple[Row, ...]:
    """The first `n` rows of a dataset, where it has so many; None: as many as it has by default."""
    last = n or N_ROWS if DATASETS[name].has_more else N_ROWS
    return first_rows(name) + tuple(whole_row(name, number) for number in range(N_ROWS, last))


def whole_row(name: str, number: int) -> Row:
    """One row of a dataset; those after the first ones are the shortest."""
    dataset = DATASETS[name]
    tokens = dataset.lengths[number] if number < N_ROWS else min(dataset.lengths)
    length = round(tokens * dataset.letters)
    row = {"language": "en", "all_classes": None, **dataset.make(number, length)}
    words = " ".join([row["input"], row["context"], *row["answers"]]).split()
    return {**row, "dataset": name, "_id": f"{number:02d}", "length": len(words)}


def content_hash(names: Sequence[str] = ()) -> str:
    """16 hex digits that name this Python's set, by its first rows and templates, and those of `names` with it."""
    hashed = {*SET, *names}
    everything = [{name: first_rows(name) for name in hashed}, {name: DATASETS[name].template for name in hashed}]
    return hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()[:16]
