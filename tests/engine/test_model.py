"""Finding, converting and naming checkpoints, without loading one."""

import threading
import time
from pathlib import Path

import pytest

from engine import model
from engine.errors import ConfigError


@pytest.fixture
def gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "some.gguf"
    file.write_bytes(b"weights")
    return file


def converter(calls: list[Path], seconds: float = 0.2) -> object:
    """Stands in for a conversion: the folder is incomplete for a while."""

    def convert(file: Path, folder: Path) -> None:
        calls.append(folder)
        (folder / "model.safetensors").write_text("half")
        time.sleep(seconds)
        (folder / "model.safetensors").write_text("whole")
        (folder / "config.json").write_text("{}")

    return convert


def test_two_at_once_convert_a_file_once_and_see_it_whole(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Path] = []
    monkeypatch.setattr(model, "_convert_gguf", converter(calls))
    seen: list[str] = []
    threads = [
        threading.Thread(target=lambda: seen.append((model.from_gguf(gguf) / "model.safetensors").read_text()))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == ["whole"] * 3
    assert len(calls) == 1


def test_a_conversion_that_fails_leaves_nothing_behind(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(file: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_text("half")
        raise OSError("no space left")

    monkeypatch.setattr(model, "_convert_gguf", broken)
    with pytest.raises(OSError, match="no space left"):
        model.from_gguf(gguf)
    calls: list[Path] = []
    monkeypatch.setattr(model, "_convert_gguf", converter(calls, 0))
    folder = model.from_gguf(gguf)
    assert (folder / "model.safetensors").read_text() == "whole"
    assert [path for path in folder.parent.iterdir() if path.is_dir()] == [folder]


def test_another_file_under_the_same_name_is_converted_anew(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Path] = []
    monkeypatch.setattr(model, "_convert_gguf", converter(calls, 0))
    first = model.from_gguf(gguf)
    gguf.write_bytes(b"WEIGHTS")
    assert model.from_gguf(gguf) != first
    assert len(calls) == 2


def test_a_digest_follows_weights_and_revision(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"a" * 100)
    before = model.digest_of(str(tmp_path), None)
    assert model.digest_of(str(tmp_path), None) == before
    (tmp_path / "model.safetensors").write_bytes(b"b" * 100)
    assert model.digest_of(str(tmp_path), None) != before
    assert model.digest_of("org/name", "v1") != model.digest_of("org/name", "v2")


def test_code_of_a_checkpoint_runs_only_when_asked(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert model.locate(str(tmp_path), None, False) == (str(tmp_path), {"trust_remote_code": False})
    assert model.locate("org/name", "v1", True) == (
        "org/name",
        {"trust_remote_code": True, "revision": "v1"},
    )


@pytest.mark.parametrize(
    ("flags", "kind"),
    [("avx2 avx512f", "float32"), ("avx512_bf16", "bfloat16"), ("amx_bf16", "bfloat16")],
)
def test_auto_is_bfloat16_only_where_the_cpu_multiplies_it(
    flags: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "read_text", lambda self, *_, **__: f"flags\t\t: fpu {flags}")
    assert model.resolve_dtype("auto", "cpu") == kind
    assert model.resolve_dtype("float16", "cpu") == "float16"


def test_a_missing_embedded_model_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="make setup"):
        model.embedded_file()


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        model.locate(str(tmp_path), None, False)
