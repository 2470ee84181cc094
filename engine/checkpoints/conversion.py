"""GGUF files as safetensors: dequantised once, and kept in the cache folder.

Not here: whether a GGUF file is whole (`engine/checkpoints/gguf.py`), which file a name means
(`engine/checkpoints/load.py`).
"""

import errno
import json
import os
import shutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path

from filelock import FileLock, Timeout

from kvbench.engine.checkpoints.digests import cache_home, digest_of
from kvbench.engine.checkpoints.gguf import check_gguf
from kvbench.engine.errors import ConfigError, first_line
from kvbench.engine.terminal import say

NO_ROOM = ("No space left", "quota exceeded", "File too large", "Read-only file system")  # as safetensors words it
MAKING = ".making"  # after the name of a folder that is not complete


def converted_folder(file: Path) -> Path:
    """Where the conversion of a GGUF file lies, or will."""
    # A new transformers may dequantise or convert the tokenizer differently, so it converts anew.
    key = f"{digest_of(str(file), None)}-transformers-{version('transformers')}"
    return cache_home() / "models" / f"{file.stem[:80]}-{key}"


def from_gguf(file: Path) -> Path:
    """The safetensors folder made from a GGUF file, made once: others wait, and a killed conversion leaves nothing.

    Whoever may look into the cache folder may use what others converted: weights are data, and the digest of a run says
    which they were.
    """
    folder = converted_folder(file)
    try:
        _remove_abandoned(folder.parent)
        if (folder / "config.json").is_file():
            return _shared(folder)
        n_numbers = check_gguf(file)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            if not (folder / "config.json").is_file():
                _convert_and_rename(file, folder, n_numbers)
    except OSError as error:
        raise ConfigError(
            f"the cache folder {folder.parent} cannot be read and written ({error.strerror or error}); free or unlock "
            "it, or set XDG_CACHE_HOME to another folder"
        ) from None
    return folder


def _convert_and_rename(file: Path, folder: Path, n_numbers: int) -> None:
    """Convert into a folder next to `folder` and rename it. The caller has the lock: what lies there is left over."""
    free, wanted = shutil.disk_usage(folder.parent).free, 4 * n_numbers  # float32
    if free < wanted:
        raise OSError(
            errno.ENOSPC,
            f"{file.name} takes {wanted / 1e9:.1f} GB there and {free / 1e9:.1f} GB are free",
        )
    say(f"Converting {file.name} to safetensors, once: {folder}", file=sys.stderr)
    work = Path(f"{folder}{MAKING}")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        _convert_gguf(file, work)
        changed = file.stat().st_mtime
        for path in work.iterdir():  # as old as what it was made of
            os.utime(path, (changed, changed))
        _shared(work).replace(folder)  # atomic: the folder is there as a whole or not at all
    except MemoryError:
        raise
    except Exception as error:  # a damaged file makes transformers raise whatever it may
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason = first_line(error)
        if any(words in reason for words in NO_ROOM):
            raise OSError(errno.ENOSPC, reason) from None
        raise ConfigError(
            f"the GGUF file {file} cannot be converted ({reason}); it may be damaged, or of an architecture that "
            "transformers does not read from GGUF: copy it again or give a folder in Hugging Face form"
        ) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Inside, no other process converts to this folder. The lock ends with its process, even a killed one."""
    # Whoever may write to the cache folder may take over from another user whose process is gone.
    lock = FileLock(f"{folder}.lock", mode=folder.parent.stat().st_mode & 0o666)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        say(f"Another process converts {folder.name}; waiting for it to end", file=sys.stderr)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _remove_abandoned(models: Path) -> None:
    """Remove what killed conversions left: folders with our mark whose lock nobody holds."""
    for work in models.glob(f"*{MAKING}"):
        # Held: at work. Not to be opened: of another user, whose next start removes the folder.
        lock = str(work).removesuffix(MAKING) + ".lock"
        with suppress(OSError), FileLock(lock, timeout=0):  # a Timeout is one
            shutil.rmtree(work, ignore_errors=True)


def _shared(folder: Path) -> Path:
    """The folder; if it is ours, all who can read its parent may read it, and only we may write to it."""
    if folder.stat().st_uid == os.geteuid():
        mode = folder.parent.stat().st_mode
        for path, bits in [(folder, 0o755), *((path, 0o644) for path in folder.iterdir())]:
            wanted = mode & bits | bits & 0o700
            if not path.is_symlink() and path.stat().st_mode & 0o777 != wanted:
                with suppress(OSError):  # on a disk that is only read
                    path.chmod(wanted)
    return folder


def _convert_gguf(file: Path, folder: Path) -> None:
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with quiet():
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    tied = getattr(model.config, "tie_word_embeddings", False)
    tensors = {
        key: value.contiguous() for key, value in model.state_dict().items() if not (tied and key == "lm_head.weight")
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict()
    config.pop("quantization_config", None)  # the tensors are not quantised any more
    config["_name_or_path"] = file.stem
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [type(model).__name__]}, indent=1))
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars and notices of the libraries while loading; ours are enough."""
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    level, hub_level = logging.get_verbosity(), hub_logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    hub_logging.set_verbosity_error()  # else every retry of an unreachable hub is a line of its own
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        hub_logging.set_verbosity(hub_level)
        if bars:
            logging.enable_progress_bar()
