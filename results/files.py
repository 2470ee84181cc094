"""How a run's folder is read and written: nothing of the user's is touched, nothing damaged is believed.

- A folder is a run's if its config.yaml is; any other must be empty. `check_place` looks and touches nothing.
- Inside it no symbolic link is followed, and only files with our names are replaced or removed.
- What is read may hold anything: `parse_json` of `engine/foreign.py` and `read_yaml` raise `ValueError` alone.
- A sealed text starts with the CRC of what follows, so a byte that changed is noticed.

Not here: what the files mean (`results/schema.py`, `scores.py`).
"""

import errno
import hashlib
import os
import re
import shutil
import zlib
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import yaml

from kvbench.engine.errors import ConfigError, RunError
from kvbench.engine.foreign import parse_json

LOCK, HOLDER = ".lock", ".lock.holder"
FILES = (
    *("config.yaml", "samples.jsonl", "scores.jsonl", "scores.jsonl.part", "ledger.parquet", "env.json"),
    *("result.json", "result.json.corrupt", LOCK, HOLDER),
)
FOLDERS = ("ledger", "shards")
MARK = ".kvbench-tmp"  # ends the name of every temporary file; alone it is a folder of them
STEM = r"[A-Za-z0-9_-]{1,41}-[0-9a-f]{12}"  # see `file_stem`
REMEDY = "choose another folder with out=DIR"
YAML = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where it was compiled
MOST_BYTES_OF_CONFIG = 2**20  # a run's takes a few thousand; YAML is slow to read


def file_stem(id: str) -> str:
    """The stem of one sample's file names: readable, and different for different ids of any length."""
    readable = re.sub(r"[^A-Za-z0-9_]+", "-", id)[:40]
    return f"{readable}-{hashlib.sha256(ascii(id).encode()).hexdigest()[:12]}"


def temporary(path: Path) -> Path:
    """Where a file is written before it is renamed to `path`."""
    return path.with_name(f".{path.name}{MARK}")


# --- reading what may be damaged ---


def sealed(text: str) -> str:
    """A JSON object with the CRC of the rest as its first key."""
    return f'{{"crc32": "{zlib.crc32(text[1:].encode()):08x}",{text[1:]}'


def unsealed(text: str) -> str:
    """The object that was sealed, or `text` if it was not; ValueError if it was changed since."""
    seal = re.match(r'\{"crc32": "([0-9a-f]{8})",', text)
    if seal is None:
        return text
    rest = text[seal.end() :]
    if f"{zlib.crc32(rest.encode()):08x}" != seal[1]:
        raise ValueError("it was changed after it was written: its crc32 is another one")
    return "{" + rest


def read_yaml(path: Path) -> dict[Any, Any]:
    """A mapping from a YAML file; OSError where it cannot be opened, ValueError where it is no mapping."""
    if path.stat().st_size > MOST_BYTES_OF_CONFIG:
        raise ValueError("it is too large")
    content = path.read_bytes()
    try:
        mapping: Any = yaml.load(content, Loader=YAML)
    except Exception as error:  # PyYAML lets out KeyError, AttributeError, RecursionError and more
        raise ValueError(f"it is no YAML ({type(error).__name__})") from None
    if not isinstance(mapping, dict):
        raise ValueError("it is no mapping")
    return cast(dict[Any, Any], mapping)


def crc_of(path: Path) -> str:
    """CRC of a file's content, a part of it in memory at once."""
    crc = 0
    with path.open("rb") as file:
        while part := file.read(2**20):
            crc = zlib.crc32(part, crc)
    return f"{crc:08x}"


def is_file(path: Path) -> bool:
    """Whether this is a plain file, and no link to one."""
    return path.is_file() and not path.is_symlink()


def is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


# --- whose a folder is ---


def check_place(path: Path, check_config: Callable[[Path], None]) -> bool:
    """Refuse a folder that is neither empty nor a run's; whether it has a config.yaml, which `check_config` accepts."""
    with os.scandir(path) as listing:
        entries = sorted(listing, key=lambda entry: entry.name)
    for entry in entries:
        is_right = entry.is_file if entry.name in FILES else entry.is_dir
        if entry.name in (*FILES, *FOLDERS, MARK) and not is_right(follow_symlinks=False):
            kind = "file" if entry.name in FILES else "folder"
            is_link = "a symbolic link" if entry.is_symlink() else f"no plain {kind}"
            raise ConfigError(
                f"{path / entry.name} is {is_link}, and a run writes into plain files and folders of its own alone; "
                f"{REMEDY}"
            )
    # Looked for after the others: a process that has just begun writes it before them.
    if os.path.lexists(path / "config.yaml"):
        check_config(path / "config.yaml")
        return True
    strange = [entry.name for entry in entries if not _has_just_begun(path / entry.name)]
    if strange:
        more = f" and {len(strange) - 1} more" if len(strange) > 1 else ""
        raise ConfigError(
            f"{path} is not empty and is no folder of a run: it has {strange[0]!r}{more} and no config.yaml; {REMEDY}"
        )
    return False


def _has_just_begun(path: Path) -> bool:
    """Whether a file is one of those that a process leaves which was killed before it wrote config.yaml."""
    if path.name == temporary(Path("config.yaml")).name:
        return not path.is_symlink() and not path.is_dir()
    if path.name == LOCK:
        return size_of(path) == 0
    if path.name != HOLDER:
        return False
    content = path.read_bytes() if size_of(path) < 1000 else b"more"
    try:
        return not content or parse_json(content, is_ours=True).keys() == {"pid", "host"}
    except (ValueError, AttributeError):
        return False


def size_of(path: Path) -> int:
    """Size of a file that another process may have removed just now."""
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return 0


# --- writing ---


def sync_folder(path: Path) -> None:
    """Let renames and new names in a folder survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def naming(path: Path) -> Generator[None]:
    """An OSError of a write, such as that of a full disk, does not know its file."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


@contextmanager
def replacing(path: Path) -> Generator[BinaryIO]:
    """A file written next to `path` and renamed when whole; killed before, `path` is as it was."""
    beside = temporary(path)
    beside.unlink(missing_ok=True)
    # x: what somebody puts there meanwhile is not written to.
    with naming(path), beside.open("xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())  # else a power cut could leave the new name with half a content
    beside.replace(path)
    sync_folder(path.parent)


def write(path: Path, text: str) -> None:
    with replacing(path) as file:
        file.write(text.encode())


def open_own(path: Path, flags: int) -> BinaryIO:
    """A file opened for writing, made where there is none; OSError where it is a link."""
    descriptor = os.open(path, flags | os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    return os.fdopen(descriptor, "wb", buffering=0)


def write_whole(file: BinaryIO, line: bytes) -> None:
    """Write a line to an unbuffered file; OSError where the disk takes a part of it only."""
    if file.write(line) != len(line):
        raise OSError(errno.ENOSPC, "it took only a part of a line")


@contextmanager
def scratch(folder: Path) -> Generator[Path]:
    """A new folder whose files are renamed into `folder` when all are written."""
    path = folder / MARK
    remove_scratch(folder)
    path.mkdir()
    yield path
    for file in sorted(path.iterdir()):
        file.replace(folder / file.name)
    path.rmdir()


def remove_scratch(folder: Path) -> None:
    """Remove what a killed process left of `scratch`."""
    if is_folder(folder / MARK):
        shutil.rmtree(folder / MARK)


@contextmanager
def going_on(folder: Path) -> Generator[None]:
    """`RunError` in place of an OSError, while a run writes into its folder."""
    try:
        yield
    except OSError as error:
        where, why = error.filename or folder, error.strerror or error
        if not folder.is_dir():
            raise RunError(
                f"{folder} was removed or renamed while its run went on ({where}: {why}); put it back to go on with "
                "what was done, or give the same command again to begin anew"
            ) from None
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            remedy = "free space on that disk"
        else:
            remedy = "see to that file"
        raise RunError(
            f"{where} cannot be written ({why}); {remedy} and give the same command again, which goes on with what "
            "was done"
        ) from None


def refuse_closed(folder: Path) -> None:
    """Raise `ConfigError` where this user can neither write to a run's folder nor make it; nothing is touched."""
    there = next(one for one in (folder, *folder.absolute().parents) if os.path.lexists(one))
    if not os.path.isdir(there):  # noqa: PTH112 - Path.is_dir raises below a closed folder
        raise unusable(folder, NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(there)))
    if not os.access(there, os.W_OK | os.X_OK):
        raise unusable(folder, PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(there)))


def unusable(path: Path, error: OSError) -> ConfigError:
    where = error.filename or path
    return ConfigError(
        f"the run's folder {path} cannot be used ({where}: {error.strerror or error}); choose another one with out=DIR"
    )
