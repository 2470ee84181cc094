"""Where benchmark data live, and the prose that every machine has without them.

Folders are searched in a fixed order; the first that holds a file wins. The embedded prose is made
from the topics that Python's own help shows, so that a needle can be hidden without any download.

Not here: downloads from the hub, and the reading of any benchmark's format (each in its task).
"""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from evals import foreign

HEADING = re.compile(r"^([*=\-~^]){3,}$")
BULLET = re.compile(r"^(?:[*\-]|\d+\.|\[\d+\])\s+")
EMPHASIS = re.compile(r"(?<!\w)(\*{1,2})([^*\s](?:[^*]*[^*\s])?)\1")
MIN_WORDS = 12  # shorter paragraphs are captions, signatures and "New in version …" remarks


def data_roots(data_dir: str | None) -> list[Path]:
    """The folders to search, best first; an explicit `data_dir` wins alone."""
    if data_dir:
        root = Path(data_dir).expanduser()
        if not os.path.isdir(root):  # noqa: PTH112 - Path.is_dir raises where a folder above cannot be entered
            raise ConfigError(
                f"data_dir={data_dir} is no folder; give an existing one, or null to search "
                "$KVBENCH_DATA, ../shared/data and the user cache"
            )
        return [root]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    candidates = [
        Path(__file__).resolve().parents[2].parent / "shared" / "data",
        cache / "kvbench" / "data",
    ]
    if os.environ.get("KVBENCH_DATA"):  # set on purpose, hence before the folder next door
        candidates.insert(0, Path(os.environ["KVBENCH_DATA"]).expanduser())
    return candidates


def find(relative: str, data_dir: str | None) -> Path | None:
    """The first existing file or folder of this name below the data roots."""
    paths = (root / relative for root in data_roots(data_dir))
    return next((path for path in paths if os.path.exists(path)), None)  # noqa: PTH110 - as above


def require(relative: str, data_dir: str | None, source: str) -> Path:
    """As `find`, but a missing file is an error that names its upstream `source`."""
    path = find(relative, data_dir)
    if path is None:
        looked = ", ".join(str(root) for root in data_roots(data_dir))
        raise ConfigError(
            f"{relative} is missing (looked in {looked}); get it from {source} and put it into "
            "one of these folders, or name another one with data_dir=…"
        )
    return path


def read_json(path: Path, source: str, like: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What a file of upstream's words holds; a damaged one is named, with its upstream `source`.

    `like` says by example which texts must stand in it under which keys.
    """
    remedy = f"get it again from {source}"
    found = foreign.read_json(path, remedy)
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds no JSON object; {remedy}")
    if (lacking := next(lacks(found, like or {}), None)) is not None:
        raise ConfigError(f"{path} has no usable {lacking}; {remedy}")
    return found


def lacks(found: Any, like: Any, key: str = "") -> Iterator[str]:
    """Dotted keys of what is there in `like` and not in `found`, or not of its kind; a `{context}` belongs to it."""
    if isinstance(like, Mapping):
        for name, example in like.items():
            below = found.get(name) if isinstance(found, Mapping) else None
            yield from lacks(below, example, f"{key}.{name}".lstrip("."))
    elif not isinstance(found, str) or ("{context}" in like and "{context}" not in found):
        yield key


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
    """One block of reStructuredText as a plain paragraph; None where it is not running text."""
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
