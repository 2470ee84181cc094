"""Traces: files that say when requests came, how long they were, and what they shared.

    ours          JSON lines  arrival_s, prompt_tokens, new_tokens
    Mooncake      JSON lines  timestamp (ms), input_length, output_length, hash_ids (of 512 tokens each)
    timed_trace   JSON lines  of `vllm bench serve`: the same keys, seconds, hash_ids of 16 tokens each, or none
    Azure         CSV         TIMESTAMP (a date), ContextTokens, GeneratedTokens
    BurstGPT      CSV         Timestamp (s), Model, Request tokens, Response tokens

A file is recognised by the keys of its first line, and the size of a block by how many hashes its prompts have. A hash
stands for a block and all that is before it. Of BurstGPT the rows of GPT-4 that were answered are read, as vLLM does.
Published traces begin with their first request; what they ask that cannot be served is left out and counted.

Not here: the text of prompts (`prompts.py`).
"""

import csv
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from kvbench.engine.errors import ConfigError
from kvbench.engine.foreign import numbered_lines

SHORTEST = 300  # tokens of a prompt, so that it has room for a needle
HASHED = {512: 0.001, 16: 1.0}  # tokens of a hash: seconds of a unit of its trace's times
Row = Mapping[str, Any]
Block = tuple[str, int]  # which text, and its tokens: a name stands for the same ones in every prompt


@dataclass(frozen=True)
class Arrival:
    """A request before it is written."""

    at_s: float
    n_prompt: int
    n_new: int
    blocks: tuple[Block, ...] = ()  # of its text; (): nobody shares it


@dataclass(frozen=True)
class Trace:
    """Requests by arrival."""

    arrivals: list[Arrival]
    left_out: Mapping[str, int]  # how many, by why


@dataclass(frozen=True)
class Format:
    """Keys of a line, and what makes a request of it; None: it was never served."""

    keys: tuple[str, ...]
    read: Callable[[Row], Arrival | None]
    is_ours: bool = False


def of_burst(row: Row) -> Arrival | None:
    n_new = int(row["Response tokens"])
    if row["Model"] != "GPT-4" or n_new <= 0:
        return None
    return Arrival(float(row["Timestamp"]), int(row["Request tokens"]), n_new)


def of_azure(row: Row) -> Arrival:
    at = datetime.fromisoformat(row["TIMESTAMP"].strip())
    at_s = (at - datetime(2000, 1, 1, tzinfo=at.tzinfo)).total_seconds()
    return Arrival(at_s, int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def of_timed(row: Row) -> Arrival:
    """Its blocks have no sizes yet."""
    blocks = tuple((str(one), 0) for one in row.get("hash_ids") or ())
    return Arrival(float(row["timestamp"]), int(row["input_length"]), int(row["output_length"]), blocks)


OURS = ("arrival_s", "prompt_tokens", "new_tokens")
OF_JSON = (
    Format(OURS, lambda row: Arrival(float(row[OURS[0]]), int(row[OURS[1]]), int(row[OURS[2]])), is_ours=True),
    Format(("timestamp", "input_length", "output_length"), of_timed),
)
OF_CSV = (
    Format(("TIMESTAMP", "ContextTokens", "GeneratedTokens"), of_azure),
    Format(("Timestamp", "Model", "Request tokens", "Response tokens"), of_burst),
)


def read_trace(path: Path, sec_multiplier: float | None = None) -> Trace:
    """The requests of a file; `sec_multiplier`: seconds of a unit of its times, in place of the format's."""
    lines = [*filled_lines(path)]
    if not lines:
        raise ConfigError(f"task.trace={path} holds no request")
    form, header = recognised(path, *lines[0])
    read = [(number, read_line(path, form, header, number, line)) for number, line in lines[header is not None :]]
    asked = [(number, one) for number, one in read if one is not None]
    size = block_size(path, asked)
    unit = sec_multiplier or (1.0 if size is None else HASHED[size])
    every = [replace(one, at_s=one.at_s * unit, blocks=sized(one, size, number)) for number, one in asked]
    served = [one for one in every if form.is_ours or (one.n_prompt >= SHORTEST and one.n_new > 0)]
    if not served:
        raise ConfigError(f"task.trace={path} holds no request that can be served")
    start = 0.0 if form.is_ours else min(one.at_s for one in served)
    arrivals = [replace(one, at_s=one.at_s - start) for one in served]
    left_out = {"of another model than GPT-4, or without an answer": len(read) - len(asked)}
    left_out |= {f"of less than {SHORTEST} tokens, or without an answer": len(every) - len(served)}
    return Trace(sorted(arrivals, key=lambda one: one.at_s), left_out)


def recognised(path: Path, number: int, line: str) -> tuple[Format, list[str] | None]:
    """A file's format, by its first line, and the header of one with columns."""
    is_json = line.lstrip().startswith("{")
    header = None if is_json else [name.strip() for name in line.split(",")]
    known, keys = (OF_JSON, parsed(line)) if is_json else (OF_CSV, header or ())
    for one in known:
        if {*one.keys} <= {*keys}:
            return one, header
    wanted = ", or with ".join(", ".join(one.keys) for one in known)
    kind = "JSON object" if is_json else "header of columns"
    raise ConfigError(f"task.trace={path}, line {number} is no {kind} with {wanted}")


def read_line(path: Path, form: Format, header: list[str] | None, number: int, line: str) -> Arrival | None:
    try:
        row = parsed(line) if header is None else dict(zip(header, next(csv.reader([line])), strict=True))
        one = form.read(row)
        if one is not None and not math.isfinite(one.at_s):
            raise ValueError
    except (ValueError, KeyError, TypeError, OverflowError, csv.Error):
        kind = "JSON object" if header is None else "row"
        raise ConfigError(f"task.trace={path}, line {number} is no {kind} with {', '.join(form.keys)}") from None
    if one is not None and form.is_ours and (one.at_s < 0 or one.n_prompt < SHORTEST or one.n_new < 1):
        raise ConfigError(f"task.trace={path}, line {number} asks for less than {SHORTEST} tokens, none, or too early")
    return one


def filled_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines with something in them, by number."""
    for number, line in numbered_lines(path):
        try:
            text = "\0" if line is None else line.decode()
        except UnicodeDecodeError:
            text = "\0"
        if "\0" in text:
            raise ConfigError(f"task.trace={path}, line {number} is no line of text in UTF-8")
        if text.strip():
            yield number, text


def parsed(line: str) -> dict[str, Any]:
    """A JSON object; {} of anything else."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return row if isinstance(row, dict) else {}


def block_size(path: Path, asked: Sequence[tuple[int, Arrival]]) -> int | None:
    """Tokens of a hash, by how many all prompts have; None without any."""
    sizes = [*HASHED]
    for number, one in asked:
        n = len(one.blocks)
        sizes = [size for size in sizes if not n or abs(n - one.n_prompt / size) <= 1]
        if not sizes:
            raise ConfigError(
                f"task.trace={path}, line {number} has {n} hash_ids for {one.n_prompt} tokens; a hash is of "
                f"{' or '.join(map(str, HASHED))} tokens, the same in all lines"
            )
    return sizes[0] if any(one.blocks for _, one in asked) else None


def sized(one: Arrival, size: int | None, number: int) -> tuple[Block, ...]:
    """A prompt's blocks with their tokens; what its hashes do not cover is its own."""
    if size is None:
        return ()
    names = [name for name, _ in one.blocks[: math.ceil(one.n_prompt / size)]]
    found = [(f"hash {name}", min(size, one.n_prompt - i * size)) for i, name in enumerate(names)]
    own = one.n_prompt - sum(n for _, n in found)
    return (*found, (f"line {number}", own)) if own > 0 else tuple(found)
