"""Where benchmark data live.

Folders are searched in a fixed order; the first that holds a file wins. `obtain` downloads what none of them holds,
where the user allows that.

A benchmark is never another one in silence: where a set of our own can stand in for published rows, it is asked with
`task.source=embedded` alone. Without the files, `auto` is then refused with a sentence that names both ways
(`instead`), and downloads nothing, since either can be meant.

Not here: the download itself (`tasks/download.py`), the reading of any benchmark's format (each in its task), the
prose that every machine has without data (`methods/calibration/prose.py`).
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvbench.engine import foreign
from kvbench.engine.errors import ConfigError
from kvbench.tasks import download


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
        Path(__file__).resolve().parents[1].parent / "shared" / "data",
        cache / "kvbench" / "data",
    ]
    if os.environ.get("KVBENCH_DATA"):  # set on purpose, hence before the folder next door
        candidates.insert(0, Path(os.environ["KVBENCH_DATA"]).expanduser())
    return candidates


def find(relative: str, data_dir: str | None) -> Path | None:
    """The first existing file or folder of this name below the data roots."""
    paths = (root / relative for root in data_roots(data_dir))
    return next((path for path in paths if os.path.exists(path)), None)  # noqa: PTH110 - as above


def find_all(folder: str, data_dir: str | None, *patterns: str) -> list[Path]:
    """The files of the first existing folder of this name, sorted pattern by pattern; none without the folder."""
    path = find(folder, data_dir)
    return [file for pattern in patterns for file in sorted(path.glob(pattern))] if path else []


def obtain(
    names: Sequence[str],
    source: str,
    data_dir: str | None,
    upstream: str,
    *,
    only: Sequence[str] | None = None,
    instead: str = "",
) -> list[Path]:
    """The files that `task.source` asks for: found, or downloaded, or an error that names their `upstream`.

    hub     as upstream has them, downloaded where they are missing, into `data_dir` or the cache
    local   below a data folder
    auto    below a data folder; else downloaded, unless `data_dir` names the folder that should hold them, or a set
            of our own could be meant `instead`

    A name begins with its benchmark's folder. `only` says which files to download, in place of the missing ones: some
    benchmarks need others next to them (patterns as in `download.fetch`; none: all).
    """
    is_hub = source == "hub"
    paths = dict.fromkeys(names) if is_hub else {name: find(name, data_dir) for name in names}
    missing = [name for name, path in paths.items() if path is None]
    if missing and (is_hub or (source == "auto" and data_dir is None and not instead)):
        root = Path(data_dir).expanduser() if data_dir else download.cache_root()
        benchmark = missing[0].partition("/")[0]
        arrived = download.fetch(benchmark, root, only=missing if only is None else only)
        paths |= {name: path for name in missing for path in arrived if path.as_posix().endswith(f"/{name}")}
        data_dir = str(root)
    return [path or require(name, data_dir, upstream, instead=instead) for name, path in paths.items()]


def require(relative: str, data_dir: str | None, source: str, *, instead: str = "") -> Path:
    """Find a file as `find` does; a missing one is an error that names its `source`, and what can be asked instead."""
    path = find(relative, data_dir)
    if path is None:
        looked = ", ".join(str(root) for root in data_roots(data_dir))
        raise ConfigError(
            f"{relative} is missing (looked in {looked}); get it from {source}, put it into "
            "one of these folders, or name another one with data_dir=…"
            + (f", or ask {instead} with task.source=embedded" if instead else "")
        )
    return path


def wanted(relative: str, prompts: str, data_dir: str | None, source: str) -> Path | None:
    """The file of upstream's wording by `task.prompts`: auto where it is there, official in any case, own never."""
    if prompts == "official":
        return require(relative, data_dir, source)
    return find(relative, data_dir) if prompts == "auto" else None


def read_json(path: Path, source: str, like: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The content of a JSON file of upstream; an error names a damaged file and its upstream `source`.

    `like` shows by example which texts the file must have, and under which keys.
    """
    remedy = f"get it again from {source}"
    content = foreign.read_json(path, remedy)
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds no JSON object; {remedy}")
    if (missing := next(missing_keys(content, like or {}), None)) is not None:
        raise ConfigError(f"{path} has no usable {missing}; {remedy}")
    return content


def missing_keys(content: Any, like: Any, key: str = "") -> Iterator[str]:
    """Dotted keys of texts that `like` has and `content` lacks; a text with `{context}` must have it there too."""
    if isinstance(like, Mapping):
        for name, example in like.items():
            below = content.get(name) if isinstance(content, Mapping) else None
            yield from missing_keys(below, example, f"{key}.{name}".lstrip("."))
    elif not isinstance(content, str) or ("{context}" in like and "{context}" not in content):
        yield key
