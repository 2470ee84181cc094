"""What differs between two versions of the site, which is append-only: a run that is corrected stays readable.

Not here: how the site is made (`plots/site/build.py`).
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvbench.engine.errors import ConfigError
from kvbench.engine.foreign import NoJson, parse_json, read_bytes

LIST = "runs.json"


def read_list(site: Path) -> dict[str, dict[str, Any]]:
    """The runs of a site by their ids."""
    try:
        found = parse_json(read_bytes(site / LIST))
        return {str(id): dict(run) for id, run in found.items()}
    except (ConfigError, NoJson, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"{site} is no site that can be compared ({error})") from None


def changes(old: Mapping[str, Mapping[str, Any]], new: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Kind and words of each difference."""
    for id in old.keys() - new.keys():
        yield "gone", f"{id} {name(old[id])}"
    for id in new.keys() - old.keys():
        yield "added", f"{id} {name(new[id])}: {new[id].get('verdict')}"
    for id in old.keys() & new.keys():
        before, after = old[id], new[id]
        if after.get("superseded_by") and not before.get("superseded_by"):
            yield "superseded", f"{id} {name(before)}, by {after['superseded_by']}"
        for key in ("verdict", "score", "rank"):
            if before.get(key) != after.get(key):
                yield key, f"{id} {name(after)}: {before.get(key)} is now {after.get(key)}"


def name(run: Mapping[str, Any]) -> str:
    return f"{run.get('variant')} on {run.get('benchmark')}"
