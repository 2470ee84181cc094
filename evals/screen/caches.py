"""`make clean-cache`: what the cache folder holds that this project made and can make again; `--yes` frees it.

Only what bears one of our names, belongs to this user and is no link counts as ours. Nobody's work is disturbed: what
another process converts or compiles is left to it. Downloaded data are listed and never removed, because a machine
without a network could not get them again; runs/ is elsewhere, and is not looked at.

Not here: leftovers of killed conversions and compilers, which the next start removes
(`engine/checkpoints/conversion.py`, `kernels/build.py`).
"""

import argparse
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from kvbench.engine.checkpoints.conversion import MAKING
from kvbench.engine.checkpoints.digests import cache_home
from kvbench.engine.terminal import say
from kvbench.evals.screen.room import size


@dataclass(frozen=True)
class Kind:
    """Something of ours in the cache folder."""

    name: str
    folder: str  # below the cache folder; {user} is this user's number
    pattern: str  # of the whole name
    remark: str


CONVERSION = r".+-[0-9a-f]{12}-transformers-\d+\.\d+\.\w+(\.dev\d+)?"
KINDS = (
    Kind("converted model", "models", CONVERSION, "made again by the next run with it, in a minute"),
    Kind("cut-off conversion", "models", CONVERSION + re.escape(MAKING), "of no use"),
    Kind("kernel", "kernels-{user}", r"[a-z_]+-[a-z0-9]+-[0-9a-f]{16}\.so", "made again by the next run, in seconds"),
    Kind("cut-off kernel", "kernels-{user}", r"\.making-[\w-]+", "of no use"),
    Kind(
        "note of a checkpoint's hash",
        "digests-{user}",
        r"[0-9a-f]{32}\.json|\.[0-9a-f]{32}\.json\.\d+",
        "made again by the next run with it",
    ),
    Kind(
        "calibration of a model",
        "calibrations-{user}",
        r"[a-z]+-[\w-]+\.npz|\.[a-z]+-[\w-]+\.npz\.\d+",
        "made again by the next run that needs it, in seconds",
    ),
    Kind(
        "rows of finished runs",
        "frames-{user}",
        r"[0-9a-f]{16}-(samples|runs)\.parquet",
        "read again from their folders",
    ),
    Kind("script of the report", ".", r"vega-v[\w.+-]+\.js|\.vega-v[\w.+-]+\.js\.\d+", "of older reports"),
)


@dataclass(frozen=True)
class Item:
    """A file or a folder of ours."""

    kind: Kind
    path: Path
    n_bytes: int
    in_use: bool  # another process is making it


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kvbench.evals.screen.caches", description="Say what of the cache folder can be freed."
    )
    parser.add_argument("--yes", action="store_true", help="free it")
    is_sure = parser.parse_args(arguments).yes
    home = cache_home()
    items = list(found(home))
    for line in [f"The cache folder is {home}", *listed(items)]:
        say(line)
    downloads = home / "data"
    if downloads.is_dir():
        say(f"Not freed: {size(weigh(downloads))} of data in {downloads}; remove what you do not need by hand")
    if not items:
        return 0
    if not is_sure:
        say("Nothing was freed; to free it: make clean-cache ARGS=--yes")
        return 0
    left = [item for item in items if not free(item)]
    freed = sum(item.n_bytes for item in items) - sum(item.n_bytes for item in left)
    say(f"Freed {size(freed)}")
    for item in left:
        why = "another process makes it" if item.in_use else "it cannot be removed; are its folder's permissions yours?"
        say(f"Left {item.path}: {why}", file=sys.stderr)
    return int(any(not item.in_use for item in left))


def found(home: Path) -> Iterator[Item]:
    """All cached items that are ours, kind by kind."""
    for kind in KINDS:
        folder = home / kind.folder.format(user=os.geteuid())
        if folder.is_symlink() or not os.path.isdir(folder) or not os.access(folder, os.R_OK | os.X_OK):  # noqa: PTH112
            continue
        for path in sorted(folder.iterdir()):
            if re.fullmatch(kind.pattern, path.name) and is_ours(path):
                yield Item(kind, path, weigh(path), is_locked(lock_of(path)))


def is_ours(path: Path) -> bool:
    return not path.is_symlink() and path.lstat().st_uid == os.geteuid()


def lock_of(path: Path) -> Path:
    """The lock under which it is made."""
    if path.parent.name == "models":
        return path.with_name(f"{path.name.removesuffix(MAKING)}.lock")
    return path.parent / ".lock"


def is_locked(lock: Path) -> bool:
    """Whether a living process holds it; a lock that nobody made is not made here."""
    if not lock.is_file():
        return False
    try:
        with FileLock(lock, timeout=0):
            return False
    except OSError:  # a Timeout is one; or it is another user's
        return True


def weigh(path: Path) -> int:
    """Bytes on disk of a file or of all files below a folder; links are not followed."""
    if not path.is_dir() or path.is_symlink():
        return path.lstat().st_size
    with suppress(OSError):
        return sum(weigh(one) for one in path.iterdir())
    return 0


def listed(items: Sequence[Item]) -> Iterator[str]:
    """One line per large item and one per kind of small ones, largest kind first."""
    for kind in KINDS:
        of_kind = [item for item in items if item.kind == kind]
        if not of_kind:
            continue
        names = of_kind[0].path.name if len(of_kind) == 1 else f"{len(of_kind)} in {of_kind[0].path.parent.name}"
        busy = ", in use" if any(item.in_use for item in of_kind) else ""
        total = sum(item.n_bytes for item in of_kind)
        yield f"  {size(total):>9}  {kind.name}: {names}{busy} ({kind.remark})"
    yield f"  {size(sum(item.n_bytes for item in items)):>9}  in all"


def free(item: Item) -> bool:
    """Remove one item under its lock; False where it is in use or cannot be removed."""
    if item.in_use or not is_ours(item.path):
        return False
    lock = lock_of(item.path)
    with suppress(OSError):
        if lock.is_file():
            with FileLock(lock, timeout=0):
                remove(item.path)
        else:
            remove(item.path)
    return not item.path.exists()


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
