"""Upstream's own files, downloaded into the data folder: pinned and checked.

Each benchmark is a tuple of `Piece`s: a file at a fixed commit of a hub dataset or of a GitHub repository, its place
below the data folder, and its checksum. Where no checksum is pinned, the hub's own is taken, which it states for every
large file at a commit.

Files of the hub come through its own client and lie in its cache, so that a download that broke off goes on, and what
has arrived is found without a network. The data folder has copies, an archive's members, or rows of Parquet as JSON
lines. Each has the time of the file that it is made of; what has another time is made anew.

The folder is $KVBENCH_DATA, or kvbench/data in the user's cache, where `tasks/sources.py` looks for files anyway.
$HF_ENDPOINT and $KVBENCH_GITHUB name mirrors of the two sites.

Not here: the command (`kvbench fetch`), what the files mean (each task), which of several folders is read
(`tasks/sources.py`).
"""

import hashlib
import json
import os
import shutil
import sys
import tempfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from kvbench.engine.errors import ConfigError, unknown_name
from kvbench.tasks.known import own_data

HUB = "https://huggingface.co"
GITHUB = "https://raw.githubusercontent.com"
PATIENCE = 5  # seconds until a hub that says nothing counts as unreachable
BLOCK = 1 << 20


@dataclass(frozen=True)
class Piece:
    """One file upstream, and where it goes."""

    repo: str  # owner/name
    revision: str  # a full commit
    path: str  # in the repository
    target: str  # below the data folder; of an archive the folder for its members, of a .parquet its rows as .jsonl
    sha256: str | None = None  # None: as the hub states it for this commit
    site: str = "hub"  # "hub" (a dataset) or "github"
    members: str | None = None  # of a .zip: which of its files, such as data/*.jsonl; None: no archive

    @property
    def name(self) -> str:
        return f"{self.repo}@{self.revision[:8]}/{self.path}"


def downloads() -> dict[str, tuple[Piece, ...]]:
    """What can be fetched, by the task that it is for."""
    return {name: each.pieces for name, each in own_data().items() if each.pieces}


def cache_root() -> Path:
    """Where downloads go."""
    if os.environ.get("KVBENCH_DATA"):
        return Path(os.environ["KVBENCH_DATA"]).expanduser()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "kvbench" / "data"


def fetch(
    name: str,
    root: Path | None = None,
    *,
    only: Sequence[str] = (),
    say: Callable[[str], None] = lambda line: None,
) -> list[Path]:
    """Find all files of a benchmark, or those whose targets match `only`, below `root`, downloaded where missing.

    `only` holds patterns such as `infinitebench/data/passkey.jsonl` or `longbench/config/*`.
    """
    known = downloads()
    if name not in known:
        raise unknown_name("benchmark", name, tuple(known))
    root = cache_root() if root is None else root
    try:
        return [path for piece in known[name] if wanted(piece, only) for path in have(piece, root, say)]
    except OSError as error:
        raise ConfigError(
            f"the files of {name} cannot be kept in {root} ({error.strerror or error}); name another folder with "
            "--into or $KVBENCH_DATA"
        ) from error


def wanted(piece: Piece, only: Sequence[str]) -> bool:
    """Whether a pattern names this piece, or for an archive something in its folder."""
    target = PurePosixPath(piece.target)
    return not only or any(
        fnmatchcase(str(target), one) or (piece.members and target in PurePosixPath(one).parents) for one in only
    )


def have(piece: Piece, root: Path, say: Callable[[str], None]) -> list[Path]:
    """The piece's files below `root`."""
    target = root / piece.target
    if is_here(piece, target):
        say(f"{piece.name}: here already, by its checksum")
        return [target]
    target.parent.mkdir(parents=True, exist_ok=True)
    if piece.site == "github":
        say(f"{piece.name}: downloading")
        with replaced(target) as file:
            download_github(piece, file)
            check(piece, file, None)
        return [target]
    source = hub_file(piece, say)
    time, files = source.stat().st_mtime_ns, dict(parts(piece, source, target))
    for one, write in files.items():
        if not one.exists() or one.stat().st_mtime_ns != time:
            one.parent.mkdir(exist_ok=True)
            with replaced(one) as file:
                write(file)
                os.utime(file, ns=(time, time))
    return [*files]


def is_here(piece: Piece, target: Path) -> bool:
    """Whether a file is the pinned one, or one of GitHub that nobody has pinned; they are small, and are read."""
    if piece.members or piece.path.endswith(".parquet") or not target.is_file():
        return False
    return piece.site == "github" if piece.sha256 is None else sha256_of(target) == piece.sha256


@contextmanager
def replaced(target: Path) -> Iterator[Path]:
    """A file that takes the target's place when it is whole."""
    with tempfile.TemporaryDirectory(prefix=".new-", dir=target.parent) as scratch:
        yield (file := Path(scratch) / target.name)
        file.replace(target)


def check(piece: Piece, file: Path, stated: str | None) -> None:
    """Raise `ConfigError` for another content than the pinned or stated one, which is fetched anew then."""
    found, expected = sha256_of(file), piece.sha256 or stated
    if expected is not None and found != expected:
        file.resolve().unlink()
        file.unlink(missing_ok=True)
        raise ConfigError(
            f"{piece.name} has arrived with the checksum {found[:12]}… instead of {expected[:12]}…, so it is damaged "
            "or another file; fetch it again, or from another mirror"
        )


def parts(piece: Piece, source: Path, target: Path) -> Iterator[tuple[Path, Callable[[Path], object]]]:
    """What is made of a file of the hub, and what writes it."""
    if piece.path.endswith(".parquet"):
        yield target, lambda file: write_lines(piece, source, file)
    elif piece.members is None:
        yield target, lambda file: shutil.copyfile(source, file)
    else:
        with zipfile.ZipFile(source) as archive:
            names = [one for one in archive.namelist() if fnmatchcase(one, piece.members) and "__MACOSX" not in one]
            if not names:
                raise ConfigError(f"{piece.name} holds no {piece.members}; its layout has changed upstream")
            for name in sorted(names):
                yield target / PurePosixPath(name).name, lambda file, name=name: unzip(source, name, file)


def unzip(source: Path, name: str, target: Path) -> None:
    with zipfile.ZipFile(source) as archive, archive.open(name) as member, target.open("wb") as file:
        shutil.copyfileobj(member, file, BLOCK)


def write_lines(piece: Piece, source: Path, target: Path) -> None:
    """The rows of a Parquet file as JSON lines."""
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(source) as file, target.open("w", encoding="utf-8") as lines:
            for batch in file.iter_batches(batch_size=16):  # rows of MRCR have megabytes
                lines.writelines(f"{json.dumps(row, default=str)}\n" for row in batch.to_pylist())
    except ArrowException as error:
        raise ConfigError(f"{piece.name} is no Parquet file that can be read ({error}); fetch it again") from None


# --- the two sites -----------------------------------------------------------------------------


def hub_file(piece: Piece, say: Callable[[str], None]) -> Path:
    """A file of a hub dataset in the hub's cache, downloaded by the hub's own client where it is not there."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RemoteEntryNotFoundError
    from huggingface_hub.utils import disable_progress_bars

    at, revision = (piece.repo, piece.path), piece.revision
    found = try_to_load_from_cache(*at, revision=revision, repo_type="dataset")
    if isinstance(found, str):
        say(f"{piece.name}: here already")
        return Path(found)
    say(f"{piece.name}: downloading")
    if not sys.stderr.isatty():
        disable_progress_bars()
    endpoint = os.environ.get("HF_ENDPOINT") or HUB
    try:
        url = hf_hub_url(*at, revision=revision, repo_type="dataset", endpoint=endpoint)
        stated = get_hf_file_metadata(url, endpoint=endpoint, timeout=PATIENCE).etag  # one try; a download tries long
        file = Path(hf_hub_download(*at, revision=revision, repo_type="dataset", endpoint=endpoint))
    except RemoteEntryNotFoundError as error:
        raise ConfigError(
            f"{piece.name} is not at {endpoint} any more; put the file into the data folder by hand ({piece.target})"
        ) from error
    except GatedRepoError as error:
        raise ConfigError(
            f"{piece.name} is gated: accept the terms at {endpoint}/datasets/{piece.repo}, set HF_TOKEN to a token of "
            f"that account and fetch it again, or put the file into the data folder by hand ({piece.target})"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise unreachable(piece, endpoint, error) from error
    except Exception as error:
        if not type(error).__module__.startswith(("httpx", "httpcore")):
            raise
        raise unreachable(piece, endpoint, error) from error
    check(piece, file, stated if stated and len(stated) == 64 else None)
    return file


def download_github(piece: Piece, file: Path) -> None:
    """A file of a GitHub repository; they are small."""
    site = os.environ.get("KVBENCH_GITHUB") or GITHUB
    url = f"{site.rstrip('/')}/{piece.repo}/{piece.revision}/{piece.path}"
    try:
        with urllib.request.urlopen(url, timeout=30) as answer, file.open("wb") as out:
            shutil.copyfileobj(answer, out, BLOCK)
    except urllib.error.HTTPError as error:
        error.close()
        raise unreachable(piece, site, error) from error
    except OSError as error:  # no network, no such host, a connection that broke
        raise unreachable(piece, site, error) from error


def unreachable(piece: Piece, site: str, error: Exception) -> ConfigError:
    reason = " ".join(str(error).split())[:120] or type(error).__name__
    return ConfigError(
        f"{piece.name} cannot be fetched from {site} ({reason}); check the network, or copy the file from elsewhere to "
        f"{piece.target} below a data folder and name that with data_dir=…"
    )


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
