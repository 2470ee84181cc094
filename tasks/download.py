"""Upstream's own files, downloaded into the data folder: pinned and checked.

Each benchmark is a tuple of `Piece`s in `SOURCES`: a file at a fixed commit of a hub dataset or of a GitHub repository,
its place below the data folder, and its checksum. Where no checksum is pinned, the hub's own is taken, which it states
for every large file at a commit. What has arrived is noted in `<benchmark>/fetched.json`, so that a second call finds
it; a download that broke off is resumed.

The folder is $KVBENCH_DATA, or kvbench/data in the user's cache, where `tasks/sources.py` looks for files anyway.
$HF_ENDPOINT and $KVBENCH_GITHUB name mirrors of the two sites.

To add a benchmark: a line in `SOURCES`.

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from filelock import FileLock

from kvbench.engine.errors import ConfigError, unknown_name
from kvbench.tasks.known import own_data

HUB = "https://huggingface.co"
GITHUB = "https://raw.githubusercontent.com"
RECORD = "fetched.json"
UNZIPPING = ".unzip-"  # before the names of folders that members are unpacked in
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
    pieces = [one for one in known[name] if wanted(one, only)]
    folder = root / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock"):
            return [path for piece in pieces for path in have(piece, root, folder / RECORD, say)]
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


def have(piece: Piece, root: Path, record: Path, say: Callable[[str], None]) -> list[Path]:
    """The piece's files below `root`; what an earlier call has written down is not checked again."""
    done = read_record(record, say)
    known = done.get(piece.name)
    if known and known["files"] and all((root / file).is_file() for file in known["files"]):
        say(f"{piece.name}: here already")
        return [root / file for file in known["files"]]
    target = root / piece.target
    if piece.members is None and piece.sha256 and target.is_file() and sha256_of(target) == piece.sha256:
        say(f"{piece.name}: here already, by its checksum")
        return write_down(piece, piece.sha256, True, [target], root, record, done)
    say(f"{piece.name}: downloading")
    unfinished = record.parent / ".downloads" / piece.revision
    unfinished.mkdir(parents=True, exist_ok=True)
    load = download_hub if piece.site == "hub" else download_github
    file, stated = load(piece, unfinished)
    found, expected = sha256_of(file), piece.sha256 or stated
    if expected is not None and found != expected:
        file.unlink()
        raise ConfigError(
            f"{piece.name} has arrived with the checksum {found[:12]}… instead of {expected[:12]}…, so it is damaged "
            "or another file; fetch it again, or from another mirror"
        )
    files = put(piece, file, root)
    file.unlink(missing_ok=True)  # an archive; a plain file was moved
    return write_down(piece, found, expected is not None, files, root, record, done)


def read_record(record: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """What earlier calls have written down; of a damaged record nothing, which fetches again what cannot be checked."""
    if not record.exists():
        return {}
    try:
        done = json.loads(record.read_text(encoding="utf-8"))
        is_sound = all(is_below(file) for known in done.values() for file in known["files"])
    except (ValueError, RecursionError, AttributeError, LookupError, TypeError):
        is_sound, done = False, {}
    if not is_sound:
        say(f"{record} is damaged and is made again")
    return done if is_sound else {}


def is_below(name: str) -> bool:
    """Whether a path stays in the folder that it is taken from."""
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts


def write_down(
    piece: Piece, sha256: str, pinned: bool, files: list[Path], root: Path, record: Path,
    done: dict[str, Any],
) -> list[Path]:  # fmt: skip
    """Note the piece's files for the next call, and return them."""
    names = [file.relative_to(root).as_posix() for file in files]
    done[piece.name] = {"sha256": sha256, "pinned": pinned, "files": names}
    replace_text(record, json.dumps(done, indent=1) + "\n")
    return files


def write_lines(piece: Piece, source: Path, target: Path) -> None:
    """The rows of a Parquet file as JSON lines."""
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    scratch = target.with_name(f".{target.name}.new")
    try:
        with ParquetFile(source) as file, scratch.open("w", encoding="utf-8") as lines:
            for batch in file.iter_batches(batch_size=16):  # rows of MRCR have megabytes
                lines.writelines(f"{json.dumps(row, default=str)}\n" for row in batch.to_pylist())
    except ArrowException as error:
        raise ConfigError(f"{piece.name} is no Parquet file that can be read ({error}); fetch it again") from None
    scratch.replace(target)


def put(piece: Piece, source: Path, root: Path) -> list[Path]:
    """Move a file, or an archive's members, to their place; nothing half written is ever seen there."""
    target = root / piece.target
    if piece.members is None:
        target.parent.mkdir(parents=True, exist_ok=True)
        if piece.path.endswith(".parquet"):
            write_lines(piece, source, target)
        else:
            source.replace(target)
        return [target]
    target.mkdir(parents=True, exist_ok=True)
    files = []
    for rest in target.glob(f"{UNZIPPING}*"):  # of a call that was killed: this one holds the lock
        shutil.rmtree(rest, ignore_errors=True)
    with zipfile.ZipFile(source) as archive:
        for member in sorted(archive.namelist()):
            if not fnmatchcase(member, piece.members) or "__MACOSX" in member:
                continue
            file = target / PurePosixPath(member).name
            with tempfile.TemporaryDirectory(prefix=UNZIPPING, dir=target) as scratch:
                archive.extract(member, scratch)
                (Path(scratch) / member).replace(file)
            files.append(file)
    if not files:
        raise ConfigError(f"{piece.name} holds no {piece.members}; its layout has changed upstream")
    return files


# --- the two sites -----------------------------------------------------------------------------


def download_hub(piece: Piece, folder: Path) -> tuple[Path, str | None]:
    """A file of a hub dataset through the hub's own client, which goes on where it stopped; its stated checksum."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError, RemoteEntryNotFoundError
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    endpoint = os.environ.get("HF_ENDPOINT") or HUB
    try:
        url = hf_hub_url(piece.repo, piece.path, repo_type="dataset", revision=piece.revision, endpoint=endpoint)
        stated = get_hf_file_metadata(url, endpoint=endpoint, timeout=PATIENCE).etag
        file = hf_hub_download(
            piece.repo, piece.path, repo_type="dataset", revision=piece.revision, endpoint=endpoint,
            local_dir=folder,
        )  # fmt: skip
    except RemoteEntryNotFoundError as error:
        raise ConfigError(
            f"{piece.name} is not at {endpoint} any more; put the file into the data folder by hand ({piece.target})"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise unreachable(piece, endpoint, error) from error
    except Exception as error:
        if not type(error).__module__.startswith(("httpx", "httpcore")):
            raise
        raise unreachable(piece, endpoint, error) from error
    return Path(file), stated if stated and len(stated) == 64 else None


def download_github(piece: Piece, folder: Path) -> tuple[Path, str | None]:
    """A file of a GitHub repository; they are small."""
    site = os.environ.get("KVBENCH_GITHUB") or GITHUB
    url = f"{site.rstrip('/')}/{piece.repo}/{piece.revision}/{piece.path}"
    file = folder / "file"
    try:
        with urllib.request.urlopen(url, timeout=30) as answer, file.open("wb") as out:
            while block := answer.read(BLOCK):
                out.write(block)
    except urllib.error.HTTPError as error:
        error.close()
        raise unreachable(piece, site, error) from error
    except OSError as error:  # no network, no such host, a connection that broke
        raise unreachable(piece, site, error) from error
    return file, None


def unreachable(piece: Piece, site: str, error: Exception) -> ConfigError:
    reason = " ".join(str(error).split())[:120] or type(error).__name__
    return ConfigError(
        f"{piece.name} cannot be fetched from {site} ({reason}); check the network, or copy the file from elsewhere to "
        f"{piece.target} below a data folder and name that with data_dir=…"
    )


# --- files -------------------------------------------------------------------------------------


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def replace_text(path: Path, text: str) -> None:
    scratch = path.with_name(f".{path.name}.new")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(path)
