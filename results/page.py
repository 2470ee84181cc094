"""The tables of runs/README.md: every key of samples.jsonl, its ledger and result.json, with type, unit and meaning.

    python -m kvbench.results.page          writes them again, between the page's marks

Not here: what the keys mean (`results/keys.py`, `results/schema.py`).
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from kvbench.engine.terminal import say
from kvbench.results.keys import FIELDS, LEDGER
from kvbench.results.schema import OPTIONAL_KEYS, RunResult, SampleRow

PAGE = Path(__file__).resolve().parents[1] / "runs" / "README.md"
MARK = re.compile(r"(<!-- keys of (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
WORDS = {str: "text", int: "whole number", float: "number", bool: "true or false", list: "list", dict: "object"}


def rows_of(kind: str) -> Iterator[tuple[str, str, str, str]]:
    """Key, type, unit and meaning."""
    if kind == "ledger":
        for name, key in LEDGER.items():
            yield name, "true or false" if name == "within_budget" else "number or null", key.unit, key.about
    elif kind == "fields":
        for name, (key, hint) in FIELDS.items():
            yield name, type_words(hint), key.unit, key.about
    else:
        row = {"samples": SampleRow, "result": RunResult}[kind]
        hints = get_type_hints(row, include_extras=True)
        for spec in fields(row):
            if hasattr(hints[spec.name], "__metadata__"):
                key = hints[spec.name].__metadata__[0]
                absent = ", or absent" if kind == "result" and spec.name in OPTIONAL_KEYS else ""
                yield spec.name, type_words(get_args(hints[spec.name])[0]) + absent, key.unit, key.about


def type_words(hint: Any) -> str:
    if isinstance(hint, UnionType):
        every = [type_words(one) for one in get_args(hint) if one is not NoneType]
        every = ["number"] if {*every} == {"number", "whole number"} else every
        return " or ".join(dict.fromkeys([*every, *(["null"] if NoneType in get_args(hint) else [])]))
    kind = get_origin(hint) or hint
    inner = [type_words(one) for one in get_args(hint) if one is not Any]
    if kind is list and inner:
        return f"list of {inner[0]}s"
    return WORDS.get(kind, "anything")


def table(kind: str) -> str:
    lines = ["| key | type | unit | meaning |", "|---|---|---|---|"]
    lines += [f"| `{name}` | {words} | {unit} | {about} |" for name, words, unit, about in rows_of(kind)]
    return "\n".join(lines) + "\n"


def page(text: str) -> str:
    """The page with its tables as they are now."""
    return MARK.sub(lambda found: found[1] + table(found[2]) + found[3], text)


def main() -> int:
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    say(PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
