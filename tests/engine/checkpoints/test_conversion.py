"""A GGUF file is converted once, whole or not at all, whoever else converts it."""

import errno
import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from kvbench.engine.checkpoints import conversion
from kvbench.engine.checkpoints.digests import cache_home, digest_of
from kvbench.engine.errors import ConfigError
from kvbench.tests.tiny_gguf import save_tiny_gguf
from kvbench.tests.warm import Started, python


@pytest.fixture
def gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "some.gguf"
    file.write_bytes(b"weights")
    monkeypatch.setattr(conversion, "check_gguf", lambda file: 0)  # it is none
    return file


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small GGUF file that can be converted."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return save_tiny_gguf(tmp_path / "tiny.gguf")


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
    monkeypatch.setattr(conversion, "_convert_gguf", converter(calls))
    seen: list[str] = []
    threads = [
        threading.Thread(target=lambda: seen.append((conversion.from_gguf(gguf) / "model.safetensors").read_text()))
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

    monkeypatch.setattr(conversion, "_convert_gguf", broken)
    with pytest.raises(ConfigError, match=r"models cannot be .*No space left.* XDG_CACHE_HOME"):
        conversion.from_gguf(gguf)
    assert [path for path in (cache_home() / "models").iterdir() if path.is_dir()] == []
    calls: list[Path] = []
    monkeypatch.setattr(conversion, "_convert_gguf", converter(calls, 0))
    folder = conversion.from_gguf(gguf)
    assert (folder / "model.safetensors").read_text() == "whole"
    assert [path for path in folder.parent.iterdir() if path.is_dir()] == [folder]


def test_another_file_under_the_same_name_is_converted_anew(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Path] = []
    monkeypatch.setattr(conversion, "_convert_gguf", converter(calls, 0))
    first = conversion.from_gguf(gguf)
    gguf.write_bytes(b"WEIGHTS")
    assert conversion.from_gguf(gguf) != first
    assert len(calls) == 2


def test_a_disk_that_fills_while_safetensors_writes_is_a_sentence(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers.modeling_utils  # noqa: F401 - which would keep the function of the test
    from safetensors import SafetensorError

    def full(tensors: object, file: Path, metadata: object) -> None:
        file.write_bytes(b"half")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(ConfigError, match=r"No space left.*XDG_CACHE_HOME"):
        conversion.from_gguf(tiny)
    assert [path for path in (cache_home() / "models").iterdir() if path.is_dir()] == []


def test_a_conversion_that_will_not_fit_is_not_begun(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tiny.parent)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(conversion, "_convert_gguf", lambda *_: pytest.fail("begun"))
    with pytest.raises(ConfigError, match=r"takes 0\.0 GB .* are free"):
        conversion.from_gguf(tiny)


def test_a_disk_that_takes_no_more_is_a_sentence_and_nothing_is_left(tiny: Path) -> None:
    """The system itself refuses to write, as it does beyond a quota: no file may grow over 20 kB."""
    code = """
import resource, sys
from pathlib import Path
import torch, transformers  # which may write caches of their own
from kvbench.engine.checkpoints import conversion
from kvbench.engine.errors import ConfigError
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    conversion.from_gguf(Path(sys.argv[1]))
except ConfigError as error:
    print(error)
"""
    done = python("-c", code, str(tiny))
    assert b"models cannot be read and written" in done.stdout and b"XDG_CACHE_HOME" in done.stdout, done.stderr
    assert [path for path in (cache_home() / "models").iterdir() if path.is_dir()] == []


def test_a_cache_folder_that_cannot_be_made_is_a_sentence(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    with pytest.raises(ConfigError, match="XDG_CACHE_HOME"):
        conversion.from_gguf(tiny)


def test_all_who_can_read_the_cache_folder_can_read_a_conversion(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = cache_home() / "models"
    models.mkdir(parents=True)
    models.chmod(0o755)
    before = os.umask(0o077)
    try:
        folder = conversion.from_gguf(tiny)
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o755
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o644}
    folder.chmod(0o700)  # as conversions were
    (folder / "model.safetensors").chmod(0o600)
    assert conversion.from_gguf(tiny) == folder
    assert folder.stat().st_mode & 0o777 == 0o755
    assert (folder / "model.safetensors").stat().st_mode & 0o777 == 0o644
    models.chmod(0o700)
    conversion.from_gguf(tiny)
    assert folder.stat().st_mode & 0o077 == 0


def test_files_with_equal_ends_do_not_share_a_conversion(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbench.engine.checkpoints.digests.END", 2)
    calls: list[Path] = []
    monkeypatch.setattr(conversion, "_convert_gguf", converter(calls, 0))
    other = gguf.with_name("other") / gguf.name
    other.parent.mkdir()
    other.write_bytes(b"weXghts")
    assert conversion.from_gguf(gguf) != conversion.from_gguf(other)


def test_a_killed_conversion_is_taken_over_by_who_waits_for_it(tiny: Path) -> None:
    code = """
import sys, time
from pathlib import Path
from kvbench.engine.checkpoints import conversion
convert = conversion._convert_gguf
def slow(file, folder):
    (folder / "model.safetensors").write_text("half")
    time.sleep(600)
if sys.argv[2] == "slow":
    conversion._convert_gguf = slow
print(conversion.from_gguf(Path(sys.argv[1])))
"""
    command = ["-c", code, str(tiny)]
    first = Started([*command, "slow"])
    models = cache_home() / "models"
    while not list(models.glob("*.making/*")):
        assert first.poll() is None
        time.sleep(0.05)
    second = Started([*command, "quick"])
    assert b"waiting" in second.stdout.readline()
    assert list(models.glob("*.making/*"))  # of a process that lives
    first.kill()
    first.wait()
    assert second.wait(120) == 0
    out = second.stdout.read().decode().splitlines()[-1]
    assert (Path(out) / "model.safetensors").stat().st_size > 1000
    assert [path for path in models.iterdir() if path.is_dir()] == [Path(out)]


def test_what_a_killed_conversion_left_is_removed_at_the_next_start_of_any_other(tiny: Path) -> None:
    """A real `kill -9`, and nobody who waits: the next start may be one of another file, whose conversion is there."""
    code = """
import sys, time
from pathlib import Path
from kvbench.engine.checkpoints import conversion
from kvbench.tests.warm import Started, python
save = conversion._convert_gguf
def half(file, folder):
    save(file, folder)
    (folder / "half").write_bytes(b"x" * 1_000_000)
    print("half", flush=True)
    time.sleep(600)
conversion._convert_gguf = half
conversion.from_gguf(Path(sys.argv[1]))
"""
    other = save_tiny_gguf(tiny.with_name("other.gguf"))
    done = conversion.from_gguf(other)
    killed = Started(["-c", code, str(tiny)])
    assert b"half\n" in iter(killed.stdout.readline, b"")  # behind what it says of its progress
    models = cache_home() / "models"
    (left,) = models.glob("*.making")
    assert conversion.from_gguf(other) == done
    assert (left / "half").exists(), "its process lives"
    killed.kill()
    killed.wait()
    assert (left / "half").exists()
    assert conversion.from_gguf(other) == done
    assert [path for path in models.iterdir() if path.is_dir()] == [done]


def test_what_dead_conversions_left_is_removed_and_nothing_else(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion, "_convert_gguf", converter([], 0))
    models = cache_home() / "models"
    for name in ("dead.making", "alive.making", "mine", "x.making.kept"):
        (models / name).mkdir(parents=True)
        (models / name / "file").write_text("")
    (models / "link.making").symlink_to(models / "mine")
    with conversion.FileLock(models / "alive.lock"):
        folder = conversion.from_gguf(gguf)
    assert {path.name for path in models.iterdir() if path.is_dir()} == {
        "alive.making", "mine", "x.making.kept", "link.making", folder.name,
    }  # fmt: skip
    assert (models / "mine" / "file").exists()


def test_a_conversion_is_the_same_model_with_and_without_a_network(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HF_HUB_OFFLINE is read once, when the hub's library is imported; clusters set it."""
    found = []
    for offline in (False, True):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tiny.parent / f"cache-{offline}"))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
        folder = conversion.from_gguf(tiny)
        found.append((folder / "tokenizer_config.json").read_text())
        found.append(digest_of(str(folder), None))
    assert found[0] != found[2], "transformers writes no note any more: the digest needs no care"
    assert found[1] == found[3]
