"""Running prose that every machine has: Python's own help topics, without code, grammar, headings and markup.

Tasks hide needles in it, and models are calibrated on it, with no download.

Not here: texts of the user's (`tasks/texts.py`).
"""

import re
from functools import cache
from sys import version_info

HEADING = re.compile(r"^([*=\-~^]){3,}$")
BULLET = re.compile(r"^(?:[*\-]|\d+\.|\[\d+\])\s+")
EMPHASIS = re.compile(r"(?<!\w)(\*{1,2})([^*\s](?:[^*]*[^*\s])?)\1")
MIN_WORDS = 12  # shorter paragraphs are captions, signatures and "New in version …" remarks


def prose_name() -> str:
    """What tables call the embedded prose; it changes with Python's version."""
    return f"pydoc-{version_info.major}.{version_info.minor}"


@cache  # 0.1 s, asked for by each run of a process
def embedded_prose() -> str:
    """The running prose in Python's help topics: no code, no grammar, no headings, no markup."""
    from pydoc_data.topics import topics  # 0.5 MB of text, wanted by embedded tasks only

    seen: dict[str, None] = {}  # a dict keeps order; some paragraphs stand in several topics
    for name in sorted(topics):
        for block in re.split(r"\n\s*\n", topics[name]):
            paragraph = as_prose(block)
            if paragraph:
                seen.setdefault(paragraph)
    return "".join(f"{paragraph}\n\n" for paragraph in seen)


def as_prose(block: str) -> str | None:
    """A block of reStructuredText as a plain paragraph; None where it is not running text."""
    lines = [line.strip() for line in block.strip().splitlines()]
    if any(HEADING.match(line) or "::=" in line for line in lines):
        return None
    text = BULLET.sub("", " ".join(lines))
    text = re.sub(r"(?<=\w)- (?=\w)", "-", text)  # a hyphen at the end of a line
    text = EMPHASIS.sub(r"\2", text).replace('"', "")
    text = re.sub(r"\s+", " ", text).strip()
    words = text.split()
    plain = sum(bool(re.fullmatch(r"[A-Za-z\u2019'\-]+[.,;:!?)]*", word)) for word in words)
    is_prose = (
        len(words) >= MIN_WORDS
        and text[0].isupper()
        and text.endswith(".")
        and plain >= 0.8 * len(words)  # code and tables are mostly punctuation and digits
    )
    return text if is_prose else None
