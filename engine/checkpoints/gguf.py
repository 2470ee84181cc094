"""The header of a GGUF file, checked before anything believes its counts.

Sizes that the header states are compared with the file's own, so that a cut or damaged file is refused in milliseconds,
where a library would allocate what the header asks for.

Not here: what tensors and metadata mean, and their conversion (`conversion.py`, which leaves both to
transformers).
"""

import mmap
import struct
from functools import cache
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from kvbench.engine.errors import ConfigError

SCALARS = "BbHhIif?"  # by the number of their type; then 8 string, 9 array and three of 8 bytes
LONG_SCALARS = {10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
MAX_DIMS = 8
SIZES = (  # metadata that a model's tensors are made as large as
    ".embedding_length", ".feed_forward_length", ".vocab_size", ".attention.head_count",
    ".attention.head_count_kv", ".attention.key_length", ".attention.value_length",
)  # fmt: skip


class Broken(Exception):
    """Why a header cannot be right."""


def check_gguf(file: Path) -> int:
    """How many numbers the file's tensors hold; `ConfigError` where it is no GGUF file, cut or damaged."""
    try:
        with file.open("rb") as handle:
            if handle.read(4) != b"GGUF":
                raise ConfigError(
                    f"{file} is no GGUF file (it does not begin with GGUF); give a .gguf file, a folder in Hugging "
                    "Face form or a hub name"
                )
            with mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as content:
                header = Header(content)
                header.check()
                return header.n_numbers
    except OSError as error:
        raise ConfigError(f"{file} cannot be read ({error.strerror}); make it readable or give another file") from None
    except Broken as error:
        raise ConfigError(
            f"the GGUF file {file} is damaged or incomplete ({error}); copy or download it again"
        ) from None


class Header:
    """A place in the file that moves forward, never past its end."""

    def __init__(self, content: mmap.mmap) -> None:
        self.content, self.at, self.order = content, 4, "<"
        self.fields: dict[str, Any] = {}
        self.n_numbers = 0  # of all tensors

    def check(self) -> None:
        """Walk through metadata and the table of tensors, and compare both with the file's size."""
        version = self.number("I")
        if version & 0xFFFF == 0:  # of the other byte order
            self.order, version = ">", version >> 24
        if version not in (2, 3):
            raise Broken(f"its version is {version} instead of 2 or 3")
        n_tensors, n_fields = self.number("Q"), self.number("Q")
        self.room(n_tensors, 24, "tensors")
        self.room(n_fields, 12, "fields")
        fields = self.fields
        for _ in range(n_fields):
            name = self.text()
            fields[name] = self.value(self.number("I"))
        tensors = [self.tensor() for _ in range(n_tensors)]
        self.check_sizes(fields, tensors)
        alignment = fields.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise Broken(f"general.alignment={alignment} is no power of two")
        start = -(-self.at // alignment) * alignment
        for name, dims, kind, offset in tensors:
            end = start + offset + n_bytes(name, dims, kind)
            if end > len(self.content):
                raise Broken(f"tensor {name!r} ends at byte {end:,} of {len(self.content):,}, so the file was cut")
        self.n_numbers = sum(product(dims) for _, dims, _, _ in tensors)

    def check_sizes(self, fields: dict[str, Any], tensors: list[Any]) -> None:
        """No more layers than tensors, and nothing wider than the widest tensor."""
        widest = max((size for _, dims, _, _ in tensors for size in dims), default=0)
        for name, value in fields.items():
            most = len(tensors) if name.endswith(".block_count") else widest
            if name.endswith((".block_count", *SIZES)) and isinstance(value, int) and value > most:
                raise Broken(f"{name}={value:,} does not fit its tensors")

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, dimensions, type and offset."""
        name, n_dims = self.text(), self.number("I")
        if n_dims > MAX_DIMS:
            raise Broken(f"tensor {name!r} has {n_dims:,} dimensions")
        dims = tuple(self.number("Q") for _ in range(n_dims))
        return name, dims, self.number("I"), self.number("Q")

    def value(self, kind: int, depth: int = 0) -> Any:
        """A number or text; of an array only that it fits."""
        if kind == STRING:
            return self.text()
        if kind == ARRAY and depth < 2:
            inner, count = self.number("I"), self.number("Q")
            if letter := scalar(inner):
                self.room(count, struct.calcsize(letter), "entries of an array")
                self.at += count * struct.calcsize(letter)
                return None
            self.room(count, 8, "entries of an array")
            if inner == STRING:
                self.skip_texts(count)
                return None
            for _ in range(count):
                self.value(inner, depth + 1)
            return None
        if letter := scalar(kind):
            return self.number(letter)
        raise Broken(f"it has a field of the unknown type {kind}")

    def number(self, letter: str) -> Any:
        self.room(1, struct.calcsize(letter), "bytes")
        (found,) = struct.unpack_from(self.order + letter, self.content, self.at)
        self.at += struct.calcsize(letter)
        return found

    def text(self) -> str:
        length = self.number("Q")
        self.room(length, 1, "letters")
        found = self.content[self.at : self.at + length]
        self.at += length
        return found.decode(errors="replace")

    def skip_texts(self, count: int) -> None:
        """Past so many texts unread: a vocabulary and its merges are 100,000."""
        length_at, end = struct.Struct(self.order + "Q").unpack_from, len(self.content)
        for _ in range(count):
            if self.at + 8 > end:
                self.room(1, 8, "bytes")
            (length,) = length_at(self.content, self.at)
            self.at += 8
            if self.at + length > end:
                self.room(length, 1, "letters")
            self.at += length

    def room(self, count: int, size: int, what: str) -> None:
        """Whether so many things can still come."""
        left = len(self.content) - self.at
        if count * size > left:
            raise Broken(
                f"its header promises {count:,} {what} where {left:,} bytes are left"
                if size > 1 or count > 1
                else "it ends within its header"
            )


def scalar(kind: int) -> str | None:
    return SCALARS[kind] if kind < len(SCALARS) else LONG_SCALARS.get(kind)


def product(dims: tuple[int, ...]) -> int:
    n = 1
    for size in dims:
        n *= size
    return n


@cache
def type_sizes() -> dict[int, tuple[int, int]]:
    """Numbers and bytes of a block by the number of a tensor's type, from gguf's constants.

    Of that file alone: the package imports numpy, which takes longer than all else that a refusal does here.
    """
    package = find_spec("gguf")
    assert package is not None and package.submodule_search_locations, "gguf is one of the dependencies"
    file = Path(package.submodule_search_locations[0]) / "constants.py"
    spec = spec_from_file_location("gguf_constants", file)
    assert spec is not None and spec.loader is not None, file
    constants = module_from_spec(spec)
    spec.loader.exec_module(constants)
    return {int(kind): sizes for kind, sizes in constants.GGML_QUANT_SIZES.items()}


def n_bytes(name: str, dims: tuple[int, ...], kind: int) -> int:
    """Bytes that a tensor takes in the file."""
    try:
        block, size = type_sizes()[kind]
    except KeyError:
        raise Broken(f"tensor {name!r} has the unknown type {kind}") from None
    n = product(dims)
    if n == 0 or n % block:
        raise Broken(f"tensor {name!r} has {n:,} numbers, no multiple of {block}")
    return n // block * size
