"""Whether a checkpoint's tokenizer and chat template come to an end: tried out in a limited worker, once.

Both are files of others that are run: a normaliser can double a text forty times, an expression can look for ever, a
template can loop in loops. The worker loads the tokenizer, renders the conversations that prompts are made of, and
tokenises a text; what takes too long, too much memory or ends the process is refused, before this process meets it.
What came to an end is noted in the cache folder under a hash of the files, and not tried again.

A tokenizer that only some text of a benchmark sends astray passes here. Code of a checkpoint (`trust_remote_code`) is
trusted already, and not tried out.

Not here: what an error of a template means for a prompt (`tasks/prompt.py`).
"""

import hashlib
import json
import os
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kvbench.engine.checkpoints.digests import cache_home, files_of, read_own, whole_hashes, write_note
from kvbench.engine.errors import ConfigError, first_line, is_panic
from kvbench.engine.workers.limited import Limited
from kvbench.engine.workers.serve import serve

LOAD_S, TRY_S = 60.0, 10.0  # on a processor; the largest tokenizers load in two seconds, slow ones convert in ten
MEMORY_BYTES = 2 << 30
LONGEST = 1_000_000  # characters of a rendered conversation of a few words; the longest templates say 10,000
MOST_TOKENS = 16  # of a character; the bytes of the longest one are four
WORDS = ("<<the user's words>>", "<<what the model answers>>", "<<what the user asks then>>")
ROLES = (("user",), ("system", "user"), ("user", "assistant", "user"))
TEXT = "".join(
    (
        'The quick brown fox jumps over the lazy dog. It wasn\'t there, he said; "Why not?"\n\n' * 10,
        "def f(x):\n\treturn x ** 2  # 3.14159, 1,234,567\n" * 5,
        *("Ein Dachs übt Größe. ", "Съешь ещё этих мягких булок. ", "敏捷的棕色狐狸。", "🦊🐕 ", "é\u0301 "),
        *(sign * 80 for sign in ("a", " ", "\n", "0", "=", ".", "Z", "\u00a0")),
        "aaaabbbbccccZ" * 10,
        " ".join(WORDS),
    )
)
NAMES = ("config.json", "generation_config.json", "preprocessor_config.json")  # say nothing of text
SUFFIXES = (".json", ".jinja", ".model", ".txt")


def check_tokenizer(where: str, options: Mapping[str, Any], id: str) -> None:
    """Raise `ConfigError` for a tokenizer or a chat template that does not come to an end."""
    if options.get("trust_remote_code"):
        return
    if (note := note_of(where, options)) is not None and is_noted(note):
        return
    worker = Limited(__name__, TRY_S)
    try:
        try_out(worker, where, options, id)
    finally:
        worker.close()
    if (note := note_of(where, options)) is not None:  # a model of the hub is there by now
        write_note(note, {"ended": True})


def try_out(worker: Limited, where: str, options: Mapping[str, Any], id: str) -> None:
    """Load, render and tokenise."""
    what = f"the tokenizer of the model {id}"
    if not asked(worker, what, "load", {"where": where, "options": {**options}}, LOAD_S)["ended"]:
        return  # whoever loads it next says what is wrong with it
    for roles in ROLES:
        turns = [{"role": role, "content": text} for role, text in zip(roles, WORDS, strict=False)]
        for thinks in (False, True):
            found = asked(
                worker, f"the chat template of the model {id}", "render", {"turns": turns, "thinks": thinks}, TRY_S
            )
            if found["n"] > LONGEST:
                raise refused(f"the chat template of the model {id}", f"{found['n']:,} characters around a few words")
    found = asked(worker, what, "encode", {"text": TEXT}, TRY_S)
    if not found["ended"]:
        raise refused(what, found["reason"])
    if found["n"] > MOST_TOKENS * len(TEXT):
        raise refused(what, f"{found['n']:,} tokens of {len(TEXT):,} characters")


def asked(worker: Limited, what: str, step: str, question: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
    """The reply to one step."""
    status, found = worker.ask({"step": step, **question}, limit_s)
    if found is None:
        ended = f"it did not come to an end within {limit_s:g} s" if status == "timeout" else "it ended its process"
        raise refused(what, f"{ended}, with {MEMORY_BYTES >> 30} GiB of memory")
    if found.get("fatal"):
        raise refused(what, found["reason"])
    return found


def refused(what: str, reason: str) -> ConfigError:
    return ConfigError(f"{what} cannot be used ({reason}); copy or download its files again, or give another one")


# --- notes of what was tried -------------------------------------------------------------------


def note_of(where: str, options: Mapping[str, Any]) -> Path | None:
    """Where it is noted that this tokenizer came to an end; None where its files are not here yet."""
    folder = folder_of(where, options)
    if folder is None:
        return None
    try:
        files = [file for file in files_of(str(folder), SUFFIXES) if is_read(file)]
        facts = [(file.name, whole) for file, whole in zip(files, whole_hashes(files), strict=True)]
        config = json.loads((folder / "config.json").read_bytes())
        kinds = [config.get(key) for key in ("model_type", "tokenizer_class")]
    except (OSError, ValueError, RecursionError, AttributeError):
        return None
    text = repr((facts, kinds, version("transformers"), version("tokenizers"), LOAD_S, TRY_S, MEMORY_BYTES, TEXT))
    return cache_home() / f"tokenizers-{os.geteuid()}" / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def folder_of(where: str, options: Mapping[str, Any]) -> Path | None:
    """The folder of a checkpoint, in the hub's cache where it is one of the hub."""
    if Path(where).is_dir():
        return Path(where)
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(where, "config.json", revision=options.get("revision"))
    return Path(found).parent if isinstance(found, str) else None


def is_read(file: Path) -> bool:
    return file.name not in NAMES and not file.name.endswith(".index.json")


def is_noted(note: Path) -> bool:
    try:
        return json.loads(read_own(note, 1 << 10)) == {"ended": True}
    except (OSError, ValueError, RecursionError):
        return False


# --- in the worker -------------------------------------------------------------------------------


@cache
def held() -> dict[str, Any]:
    """The tokenizer that was loaded."""
    return {}


def reply(question: Mapping[str, Any]) -> dict[str, Any]:
    """How one step ended; what it raises is an end."""
    try:
        return {"ended": True, "n": STEPS[question["step"]](question)}
    except BaseException as error:  # a panic of a tokenizer is no Exception
        return {"ended": False, "n": 0, "reason": first_line(error), "fatal": is_fatal(error)}


def load(question: Mapping[str, Any]) -> int:
    from transformers import AutoTokenizer

    held()["tokenizer"] = AutoTokenizer.from_pretrained(question["where"], **question["options"])
    return 0


def render(question: Mapping[str, Any]) -> int:
    tokenizer = held()["tokenizer"]
    if not tokenizer.chat_template:
        return 0
    options = {"date_string": "26 Jul 2024", "enable_thinking": question["thinks"]}
    text = tokenizer.apply_chat_template(question["turns"], tokenize=False, add_generation_prompt=True, **options)
    return len(text)


def encode(question: Mapping[str, Any]) -> int:
    tokenizer = held()["tokenizer"]
    ids = tokenizer.encode(question["text"])
    tokenizer.decode(ids[: len(question["text"])], skip_special_tokens=True)
    return len(ids)


STEPS = {"load": load, "render": render, "encode": encode}


def is_fatal(error: BaseException) -> bool:
    """Whether it would go otherwise, and worse, in a process that has more memory or no limit."""
    return is_panic(error) or isinstance(error, MemoryError)


def warm_up() -> None:
    """Import what the first reply needs, before its clock starts."""
    import transformers

    _ = transformers.AutoTokenizer


if __name__ == "__main__":
    serve(reply, warm_up, MEMORY_BYTES)
