"""Finding, converting and naming checkpoints, without loading one."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine import model
from engine.errors import ConfigError
from tests.tiny_gguf import save_tiny_gguf
from tests.tiny_run import save_tiny

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "some.gguf"
    file.write_bytes(b"weights")
    monkeypatch.setattr(model, "check_gguf", lambda file: 0)  # it is none
    return file


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small GGUF file that can be converted."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return save_tiny_gguf(tmp_path / "tiny.gguf")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small checkpoint in Hugging Face form."""
    return save_tiny(tmp_path / "checkpoint")


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
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(model, "_convert_gguf", broken)
    with pytest.raises(ConfigError, match=r"models cannot be .*No space left.* XDG_CACHE_HOME"):
        model.from_gguf(gguf)
    assert [path for path in (model.cache_home() / "models").iterdir() if path.is_dir()] == []
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


def test_a_disk_that_fills_while_safetensors_writes_is_a_sentence(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers.modeling_utils  # noqa: F401 - which would keep the function of the test
    from safetensors import SafetensorError

    def full(tensors: object, file: Path, metadata: object) -> None:
        file.write_bytes(b"half")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(ConfigError, match=r"No space left.*XDG_CACHE_HOME"):
        model.from_gguf(tiny)
    assert [path for path in (model.cache_home() / "models").iterdir() if path.is_dir()] == []


def test_a_conversion_that_will_not_fit_is_not_begun(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tiny.parent)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(model, "_convert_gguf", lambda *_: pytest.fail("begun"))
    with pytest.raises(ConfigError, match=r"takes 0\.0 GB .* are free"):
        model.from_gguf(tiny)


def test_a_cache_folder_that_cannot_be_made_is_a_sentence(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    with pytest.raises(ConfigError, match="XDG_CACHE_HOME"):
        model.from_gguf(tiny)


def test_all_who_can_read_the_cache_folder_can_read_a_conversion(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = model.cache_home() / "models"
    models.mkdir(parents=True)
    models.chmod(0o755)
    before = os.umask(0o077)
    try:
        folder = model.from_gguf(tiny)
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o755
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o644}
    folder.chmod(0o700)  # as conversions were
    (folder / "model.safetensors").chmod(0o600)
    assert model.from_gguf(tiny) == folder
    assert folder.stat().st_mode & 0o777 == 0o755
    assert (folder / "model.safetensors").stat().st_mode & 0o777 == 0o644
    models.chmod(0o700)
    model.from_gguf(tiny)
    assert folder.stat().st_mode & 0o077 == 0


def test_files_with_equal_ends_do_not_share_a_conversion(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.checkpoints.digests.END", 2)
    calls: list[Path] = []
    monkeypatch.setattr(model, "_convert_gguf", converter(calls, 0))
    other = gguf.with_name("other") / gguf.name
    other.parent.mkdir()
    other.write_bytes(b"weXghts")
    assert model.from_gguf(gguf) != model.from_gguf(other)


def test_a_shape_is_read_without_a_conversion(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(model, "_convert_gguf", lambda *_: pytest.fail("converted"))
        shape = model.read_shape("tiny", str(tiny))
    assert (shape.n_layers, shape.h, shape.h_kv, shape.d_h, shape.window) == (2, 4, 2, 8, 256)
    model.from_gguf(tiny)
    assert model.read_shape("tiny", str(tiny)) == shape


def test_a_killed_conversion_is_taken_over_by_who_waits_for_it(tiny: Path) -> None:
    code = """
import sys, time
from pathlib import Path
from engine import model
convert = model._convert_gguf
def slow(file, folder):
    (folder / "model.safetensors").write_text("half")
    time.sleep(600)
if sys.argv[2] == "slow":
    model._convert_gguf = slow
print(model.from_gguf(Path(sys.argv[1])))
"""
    command = [sys.executable, "-c", code, str(tiny)]
    first = subprocess.Popen([*command, "slow"], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert first.stderr is not None
    models = model.cache_home() / "models"
    while not list(models.glob("*.making/*")):
        assert first.poll() is None
        time.sleep(0.05)
    second = subprocess.Popen([*command, "quick"], cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert second.stderr is not None
    said = second.stderr.readline()
    assert "waiting" in said
    assert list(models.glob("*.making/*"))  # of a process that lives
    first.send_signal(signal.SIGKILL)
    first.communicate()
    out, _ = second.communicate(timeout=120)
    assert second.returncode == 0
    assert (Path(out.strip()) / "model.safetensors").stat().st_size > 1000
    assert [path for path in models.iterdir() if path.is_dir()] == [Path(out.strip())]


def test_what_dead_conversions_left_is_removed_and_nothing_else(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "_convert_gguf", converter([], 0))
    models = model.cache_home() / "models"
    for name in ("dead.making", "alive.making", "mine", "x.making.kept"):
        (models / name).mkdir(parents=True)
        (models / name / "file").write_text("")
    (models / "link.making").symlink_to(models / "mine")
    with model.FileLock(models / "alive.lock"):
        folder = model.from_gguf(gguf)
    assert {path.name for path in models.iterdir() if path.is_dir()} == {
        "alive.making", "mine", "x.making.kept", "link.making", folder.name,
    }  # fmt: skip
    assert (models / "mine" / "file").exists()


# --- damaged checkpoints: a sentence each ------------------------------------------------------


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def without_a_layer(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    kept = {key: value for key, value in tensors.items() if "layers.1." not in key}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def with_config(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


DAMAGES: dict[str, Callable[[Path], object]] = {
    "weights cut": lambda folder: cut(folder / "model.safetensors"),
    "weights empty": lambda folder: (folder / "model.safetensors").write_bytes(b""),
    "weights with a huge header": lambda folder: (folder / "model.safetensors").write_bytes(
        b"\xff" * 7 + b"\x00" + bytes(100)
    ),
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "a layer lost": without_a_layer,
    "config cut": lambda folder: cut(folder / "config.json"),
    "config no object": lambda folder: (folder / "config.json").write_text("[]"),
    "config no text": lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe\x00"),
    "config deep": lambda folder: (folder / "config.json").write_text('{"a":' * 100_000),
    "config less deep": lambda folder: (folder / "config.json").write_text('{"a":' * 900 + "1" + "}" * 900),
    "config empty": lambda folder: (folder / "config.json").write_text("{}"),
    "a billion layers": with_config(num_hidden_layers=10**9),
    "no heads": with_config(num_attention_heads=0),
    "heads in words": with_config(num_attention_heads="six"),
    "no number of layers": with_config(num_hidden_layers=None),
    "another size": with_config(hidden_size=96),
    "an unknown architecture": with_config(model_type="unheard-of"),
    "a nameless architecture": with_config(model_type=[1]),
    "tokenizer cut": lambda folder: cut(folder / "tokenizer.json"),
    "tokenizer of another kind": lambda folder: (folder / "tokenizer.json").write_text("[]"),
    "tokenizer deep": lambda folder: (folder / "tokenizer.json").write_text("[" * 100_000),
    "tokenizer settings cut": lambda folder: cut(folder / "tokenizer_config.json"),
}


@pytest.mark.filterwarnings("ignore")  # of libraries that look at damaged files
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_is_one_sentence(folder: Path, damage: Callable[[Path], object]) -> None:
    damage(folder)
    with pytest.raises(ConfigError) as caught:
        model.read_shape("tiny", str(folder))
        model.load("tiny", str(folder), dtype="float32", device="cpu")
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_a_huge_configuration_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (folder / "config.json").open("r+b") as file:
        file.truncate(model.MAX_CONFIG + 1)
    with pytest.raises(ConfigError, match=r"config\.json is no model's configuration"):
        model.read_shape("tiny", str(folder))


@pytest.mark.parametrize("name", ["notes.txt", "model.gguf", "model.safetensors"])
def test_a_plain_file_that_is_no_gguf_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"nothing of the kind" * 100)
    with pytest.raises(ConfigError, match="is no GGUF file"):
        model.read_shape("x", str(tmp_path / name))


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="is no file"):
        model.read_shape("x", str(tmp_path / "pipe"))


def test_a_damaged_conversion_says_what_to_delete(tiny: Path) -> None:
    folder = model.from_gguf(tiny)
    cut(folder / "model.safetensors")
    with pytest.raises(ConfigError, match=f"delete {folder}, which is made anew"):
        model.load("tiny", str(tiny), dtype="float32", device="cpu")


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.filterwarnings("ignore")
def test_a_gguf_file_with_flipped_bytes_is_converted_or_refused(tiny: Path, data) -> None:
    changed = bytearray(save_tiny_gguf(tiny).read_bytes())
    header = changed.index(b"blk.1.ffn_down.weight")
    for at in data.draw(st.lists(st.integers(0, header), min_size=1, max_size=3)):
        changed[at] ^= data.draw(st.sampled_from([1, 0x10, 0x80]))
    tiny.write_bytes(changed)
    try:
        model.load("tiny", str(tiny), dtype="float32", device="cpu")
    except ConfigError as error:
        assert "\n" not in str(error)
    assert not list((model.cache_home() / "models").glob("*.making"))
