"""BibTeX of methods' papers, as their cards name them.

    kvbench cite snapkv,quest     their entries, each paper once
    kvbench cite                  all of them

A card is the docstring of a method's file. Its line `Paper` has the paper's number at arXiv, the year, the first author
and the title, or says that there is none:

    Paper     arXiv:2404.14469, 2024; Li, Yuhong; SnapKV: LLM Knows What You are Looking for Before Generation

A file of your own is named by its path. Nothing is imported, so torch is not needed.

Not here: where a method differs from its paper (its card, docs/methods.md).
"""

import ast
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

import yaml

from kvbench.engine.errors import ConfigError
from kvbench.engine.terminal import say

ROOT = Path(__file__).resolve().parents[1]
CONF = ROOT / "conf" / "method"
PAPER = re.compile(r"arXiv:(\d{4}\.\d{4,5}), (\d{4}); ([^;]+); (.+)")


@dataclass(frozen=True)
class Paper:
    arxiv: str
    year: str
    author: str  # the first
    title: str

    @property
    def link(self) -> str:
        return f"https://arxiv.org/abs/{self.arxiv}"

    def bibtex(self, key: str) -> str:
        return "\n".join(
            [
                f"@misc{{{key},",
                f"  title = {{{{{self.title}}}}},",
                f"  author = {{{self.author} and others}},",
                f"  year = {{{self.year}}},",
                f"  eprint = {{{self.arxiv}}},",
                "  archivePrefix = {arXiv},",
                f"  url = {{{self.link}}},",
                "}",
            ]
        )


def file_of(name: str) -> Path:
    """The file of a method, whose name may be that of a preset, or a path."""
    if name.endswith(".py"):
        return Path(name)
    path = CONF / f"{name}.yaml"
    if not path.is_file():
        near = get_close_matches(name, [file.stem for file in CONF.glob("*.yaml")], 1)
        raise ConfigError(f"no method {name!r}; " + (f"did you mean {near[0]!r}?" if near else f"{CONF} has them all"))
    said = yaml.safe_load(path.read_text(encoding="utf-8"))
    if "_target_" not in said:
        return file_of(next(base for base in said["defaults"] if base != "_self_"))
    module, _, _ = said["_target_"].rpartition(".")
    return ROOT.joinpath(*module.split(".")[1:]).with_suffix(".py")


def card(file: Path) -> str:
    """What a card says after `Paper`, on one line; "" where it says nothing."""
    try:
        text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    except (OSError, SyntaxError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read ({error}); give a Python file") from None
    found = re.search(r"^Paper +(.*(?:\n +\S.*)*)", text, re.MULTILINE)
    return " ".join(found[1].split()) if found else ""


def paper_of(name: str) -> Paper | None:
    """The paper of a method; None where its card names none."""
    found = PAPER.fullmatch(card(file_of(name)).rstrip("."))
    return Paper(*found.groups()) if found else None


def main(words: Sequence[str]) -> int:
    names = [name for word in words for name in word.split(",") if name]
    if any(name.startswith("-") for name in names):
        say((__doc__ or "").partition("\nNot here")[0])
        return 0 if {"-h", "--help"} & {*names} else 2
    try:
        found = {name: paper_of(name) for name in names or sorted(file.stem for file in CONF.glob("*.yaml"))}
    except ConfigError as error:
        say(f"kvbench cite: {error}", file=sys.stderr)
        return 2
    entries: dict[Paper, str] = {}
    for name, paper in found.items():
        if paper is not None:
            entries.setdefault(paper, file_of(name).stem)
        elif names:
            say(f"% {name}: {card(file_of(name)) or 'its card names no paper'}")
    say("\n\n".join(paper.bibtex(name) for paper, name in entries.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
