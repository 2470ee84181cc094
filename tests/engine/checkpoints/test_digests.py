"""Whole files name a checkpoint, each is read once, and nobody else's note about one is believed."""

import json
import os
import time
from pathlib import Path

import pytest

from kvbench.engine.checkpoints import digests
from kvbench.engine.errors import ConfigError

LONG_AGO = time.time() - 3600


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose weights are larger than the two ends that were read once, and an hour old."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(digests, "END", 16)
    monkeypatch.setattr(digests, "SETTLED_S", -1.0)  # the times of inodes cannot be set back
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    write(folder / "model.safetensors", b"a" * 100)
    return folder


def write(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    os.utime(file, (LONG_AGO, LONG_AGO))


def digest(where: Path) -> str:
    return digests.digest_of(str(where), None)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of files that are read from end to end."""
    names: list[str] = []
    hash_file = digests.hashlib.file_digest

    def file_digest(handle, kind):
        names.append(Path(handle.name).name)
        return hash_file(handle, kind)

    monkeypatch.setattr(digests.hashlib, "file_digest", file_digest)
    return names


def test_a_change_between_the_ends_is_another_checkpoint(checkpoint: Path) -> None:
    before = digest(checkpoint)
    write(checkpoint / "model.safetensors", b"a" * 50 + b"b" + b"a" * 49)  # its old time and size
    assert digest(checkpoint) != before


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer.model", "modeling.py"])
def test_templates_tokenizers_and_code_belong_to_the_checkpoint(checkpoint: Path, name: str) -> None:
    seen = {digest(checkpoint)}
    for content in (b"one", b"two"):
        write(checkpoint / name, content)
        seen.add(digest(checkpoint))
    assert len(seen) == 3


def test_files_are_read_once(checkpoint: Path, reads: list[str]) -> None:
    first = digest(checkpoint)
    assert sorted(reads) == ["config.json", "model.safetensors"]
    assert digest(checkpoint) == first
    assert len(reads) == 2
    (checkpoint / "config.json").write_text("[]")
    digest(checkpoint)
    assert reads[2:] == ["config.json"]


def test_a_file_written_a_moment_ago_is_read_again(
    checkpoint: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "SETTLED_S", 60.0)
    digest(checkpoint)
    digest(checkpoint)
    assert len(reads) == 4


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"sha256": 5}'])
def test_a_damaged_note_is_made_again(checkpoint: Path, reads: list[str], content: bytes) -> None:
    before = digest(checkpoint)
    notes = list((digests.cache_home() / f"digests-{os.geteuid()}").iterdir())
    assert len(notes) == 2
    for note in notes:
        note.write_bytes(content)
    assert digest(checkpoint) == before
    assert digest(checkpoint) == before
    assert len(reads) == 4


@pytest.mark.parametrize("how", ["writable by all", "a link"])
def test_a_note_that_others_could_have_written_is_not_believed(checkpoint: Path, how: str, tmp_path: Path) -> None:
    before = digest(checkpoint)
    for note in (digests.cache_home() / f"digests-{os.geteuid()}").iterdir():
        planted = json.loads(note.read_text()) | {"sha256": "0" * 64}
        if how == "a link":
            note.replace(tmp_path / note.name)
            note.symlink_to(tmp_path / note.name)
        note.write_text(json.dumps(planted))
        if how != "a link":
            note.chmod(0o666)
    assert digest(checkpoint) == before


def test_without_a_cache_folder_digests_are_the_same(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = digest(checkpoint)
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert digest(checkpoint) == before


def test_a_file_that_is_still_being_copied_is_refused(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hash_file = digests.hashlib.file_digest

    def file_digest(handle, kind):
        found = hash_file(handle, kind)
        with Path(handle.name).open("ab") as other:
            other.write(b"more")
        return found

    monkeypatch.setattr(digests.hashlib, "file_digest", file_digest)
    with pytest.raises(ConfigError, match="changes while it is read"):
        digest(checkpoint)


def test_a_known_file_is_named_by_its_ends_as_a_small_one_is(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    by_its_whole = digest(checkpoint)
    monkeypatch.setattr(digests, "KNOWN", {digests.hashlib.sha256(b"a" * 100).hexdigest()})
    assert digest(checkpoint) != by_its_whole


def test_a_folder_or_pipe_named_like_weights_is_not_read(checkpoint: Path) -> None:
    before = digest(checkpoint)
    (checkpoint / "odd.bin").mkdir()
    os.mkfifo(checkpoint / "pipe.bin")  # reading it would wait for ever
    assert digest(checkpoint) == before


def test_hashing_that_takes_long_is_said_once(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(digests, "LONG", 50)
    digest(checkpoint)
    assert "Hashing" in capsys.readouterr().err
    digest(checkpoint)
    assert capsys.readouterr().err == ""


def test_what_takes_long_to_hash_is_read_once_though_it_was_just_written(
    checkpoint: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "LONG", 50)
    monkeypatch.setattr(digests, "SETTLED_S", 0.3)
    (checkpoint / "config.json").write_text("[]")
    digest(checkpoint)
    digest(checkpoint)
    assert len(reads) == 2


def test_the_embedded_model_keeps_the_digest_that_runs_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvbench.engine.checkpoints.header import embedded_file

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert digest(embedded_file()) == "f398b721a399"


# --- what the environment writes -----------------------------------------------------------------


def noted(offline: str, more: str = "") -> bytes:
    return f'{{\n  "is_local": true,\n  "local_files_only": {offline},\n  "unk_token": "<u>{more}"\n}}'.encode()


def test_what_the_environment_noted_is_no_part_of_a_checkpoint(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "END", 1 << 20)
    file, names = checkpoint / "tokenizer_config.json", {}
    for offline in ("false", "true"):
        write(file, noted(offline))
        names[offline] = digests.digests_of(str(checkpoint), None)
    assert names["true"] == names["false"] and len({*names["true"]}) == 2


@pytest.mark.parametrize("end", [16, 1 << 20])
def test_what_else_stands_beside_the_note_belongs_to_the_checkpoint(
    checkpoint: Path, end: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "END", end)
    seen = set()
    for more in ("", "a", "b", "a" * 200 + "b" + "a" * 200, "a" * 200 + "c" + "a" * 200):
        write(checkpoint / "tokenizer_config.json", noted("true", more))
        seen |= {*digests.digests_of(str(checkpoint), None)}
    assert len(seen) == 10
    write(checkpoint / "tokenizer_config.json", rb'{"text": "\"local_files_only\": true"}')
    assert len(digests.digests_of(str(checkpoint), None)) == 1, "a text that says so is no note"


# --- weights that an index names -------------------------------------------------------------------


def index(folder: Path, *shards: object) -> None:
    weight_map = {f"layer.{i}": name for i, name in enumerate(shards)}
    text = json.dumps({"metadata": {}, "weight_map": weight_map})
    write(folder / "model.safetensors.index.json", text.encode())


@pytest.mark.parametrize("name", ["sub/one.safetensors", "./sub//one.safetensors", "sub/one.weights", "one.weights"])
def test_weights_that_an_index_names_belong_to_the_checkpoint_wherever_they_lie(checkpoint: Path, name: str) -> None:
    (checkpoint / "sub").mkdir()
    index(checkpoint, "model.safetensors", name)
    seen = {digest(checkpoint)}  # without the file, which transformers would refuse
    for content in (b"a" * 100, b"a" * 50 + b"b" + b"a" * 49):
        write(checkpoint / name, content)
        seen.add(digest(checkpoint))
    assert len(seen) == 3


def test_weights_that_a_configuration_names_belong_to_the_checkpoint(checkpoint: Path) -> None:
    (checkpoint / "sub").mkdir()
    write(checkpoint / "config.json", b'{"transformers_weights": "sub/my.safetensors.index.json"}')
    write(checkpoint / "sub" / "my.safetensors.index.json", b'{"weight_map": {"a": "sub/one.safetensors"}}')
    seen = {digest(checkpoint)}
    write(checkpoint / "sub" / "one.safetensors", b"a")
    seen.add(digest(checkpoint))
    write(checkpoint / "sub" / "my.safetensors.index.json", b'{"weight_map": {"b": "sub/one.safetensors"}}')
    seen.add(digest(checkpoint))
    assert len(seen) == 3


@pytest.mark.parametrize("name", ["../one.safetensors", "sub/../../one.safetensors", "/one.safetensors", ""])
def test_weights_outside_of_the_folder_are_refused(checkpoint: Path, name: str) -> None:
    (checkpoint.parent / "one.safetensors").write_bytes(b"a")
    index(checkpoint, name)
    with pytest.raises(
        ConfigError, match=r"model\.safetensors\.index\.json names the weights .* outside of its folder"
    ):
        digest(checkpoint)


def test_shards_beside_their_index_are_hashed_as_they_were(checkpoint: Path) -> None:
    index(checkpoint, "model.safetensors")
    whole = digests.hashlib.sha256
    text = (checkpoint / "model.safetensors.index.json").read_bytes()
    facts = [
        ("config.json", 2, whole(b"{}{}").hexdigest()),  # both ends of a small file
        ("model.safetensors", 100, whole(b"a" * 100).hexdigest()),
        ("model.safetensors.index.json", len(text), whole(text).hexdigest()),
    ]
    assert digest(checkpoint) == whole(repr(facts).encode()).hexdigest()[:12]


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{", b'{"weight_map": [1]}', b'{"weight_map": {"a": 1}}', b"[" * 9999]
)
def test_an_index_that_is_none_names_nothing(checkpoint: Path, content: bytes) -> None:
    write(checkpoint / "model.safetensors.index.json", content)
    digest(checkpoint)
