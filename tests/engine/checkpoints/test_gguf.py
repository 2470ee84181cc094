"""Whatever is done to a GGUF file, it is refused in a sentence and in milliseconds, or it is whole."""

import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.engine.checkpoints.gguf import check_gguf
from kvbench.engine.errors import ConfigError
from kvbench.tests.tiny_gguf import save_tiny_gguf


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return save_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf").read_bytes()


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scratch") / "some.gguf"


def refused(file: Path, content: bytes) -> str:
    file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        check_gguf(file)
    assert str(file) in str(caught.value)
    return str(caught.value)


def test_a_whole_file_is_measured(whole: bytes, scratch: Path) -> None:
    scratch.write_bytes(whole)
    numbers = check_gguf(scratch)
    assert 4 * numbers < len(whole) < 4 * numbers + 20_000


@pytest.mark.parametrize("content", [b"", b"GGU", b"PK\x03\x04" + bytes(100), b"GGML" + bytes(99)])
def test_another_kind_of_file_is_no_gguf(content: bytes, scratch: Path) -> None:
    assert "is no GGUF file" in refused(scratch, content)


@pytest.mark.parametrize("share", [0.0001, 0.01, 0.1, 0.5, 0.9999])
def test_a_file_that_was_cut_is_refused(whole: bytes, scratch: Path, share: float) -> None:
    cut = whole[: max(4, int(share * len(whole)))]
    assert "damaged or incomplete" in refused(scratch, cut)


@pytest.mark.parametrize(("at", "what"), [(8, "tensors"), (16, "fields"), (24, "letters")])
def test_counts_larger_than_the_file_are_refused(whole: bytes, scratch: Path, at: int, what: str) -> None:
    for count in (1 << 20, 1 << 40, (1 << 64) - 1):
        huge = whole[:at] + struct.pack("<Q", count) + whole[at + 8 :]
        assert what in refused(scratch, huge)


def test_more_layers_than_tensors_are_refused(whole: bytes, scratch: Path) -> None:
    for name in (b"llama.block_count", b"llama.embedding_length", b"llama.vocab_size"):
        at = whole.index(name) + len(name) + 4
        huge = whole[:at] + struct.pack("<I", 4_000_000_000) + whole[at + 4 :]
        assert f"{name.decode()}=4,000,000,000" in refused(scratch, huge)


def test_unreadable_names_and_versions_are_refused(whole: bytes, scratch: Path) -> None:
    assert "version is 9" in refused(scratch, whole[:4] + struct.pack("<I", 9) + whole[8:])
    assert "version is 1" in refused(scratch, whole[:4] + struct.pack("<I", 1) + whole[8:])


@settings(max_examples=150)
@given(data=st.data())
def test_flipped_bytes_raise_one_kind_of_error(whole: bytes, scratch: Path, data) -> None:
    changed = bytearray(whole)
    header = whole.index(b"blk.1.ffn_down.weight") + 60
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, header))
        changed[at] = data.draw(st.sampled_from([0, 1, 9, 0x7F, 0x80, 0xFF]))
    scratch.write_bytes(changed)
    try:
        check_gguf(scratch)
    except ConfigError as error:
        assert "\n" not in str(error)
