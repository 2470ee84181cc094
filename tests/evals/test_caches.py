"""`make clean-cache`: what it lists, what it frees, and what it leaves alone."""

import os
import shutil
from pathlib import Path

import pytest
from filelock import FileLock

from kvbench.evals.screen import caches

MODEL = "Some-Model.Q4_1-0123456789ab-transformers-5.23.0"
OURS = (
    f"models/{MODEL}/model.safetensors",
    "models/Other-0123456789ab-transformers-5.23.0.making/half",
    f"kernels-{os.geteuid()}/clusters-avx512-0123456789abcdef.so",
    f"kernels-{os.geteuid()}/.making-clusters-avx512-0123456789abcdef/made.o",
    f"digests-{os.geteuid()}/{'0' * 32}.json",
    "vega-v6.4.1-1.9.0.post1.js",
    f"digests-{os.geteuid()}/.{'0' * 32}.json.4711",  # of a process that was killed
)
NOT_OURS = (
    "models/my-own-model/model.safetensors",
    f"models/{MODEL}.lock",
    f"kernels-{os.geteuid()}/notes.txt",
    "kernels-99999/clusters-avx512-0123456789abcdef.so",
    "digests-0/a.json.bak",
    "data/longbench/data/qasper.jsonl",
    "precious.txt",
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    home = tmp_path / "cache" / "kvbench"
    for name in (*OURS, *NOT_OURS):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_bytes(b"x" * 1_000_000)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "result.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    return home


def files(home: Path) -> set[str]:
    return {path.relative_to(home).as_posix() for path in home.rglob("*") if not path.is_dir()}


def test_without_the_word_nothing_is_freed(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files(home)
    assert caches.main([]) == 0
    said = capsys.readouterr().out
    assert files(home) == before
    assert "7.0 MB  in all" in said
    assert MODEL in said and "ARGS=--yes" in said
    assert f"1.0 MB of data in {home / 'data'}" in said


def test_with_the_word_all_of_ours_goes_and_nothing_else(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "models" / f"Linked-{MODEL}").symlink_to(home / "models" / "my-own-model")
    before = files(home)
    assert caches.main(["--yes"]) == 0
    assert before - files(home) == {*OURS}
    assert "Freed 7.0 MB" in capsys.readouterr().out
    assert Path("runs/result.json").exists()
    assert caches.main(["--yes"]) == 0, "a second time there is nothing"


def test_what_a_living_process_makes_is_left_to_it(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    making = home / "models" / "Other-0123456789ab-transformers-5.23.0"
    with FileLock(f"{making}.lock"):
        assert caches.main(["--yes"]) == 0
    assert (home / f"{OURS[1]}").exists()
    assert "another process makes it" in capsys.readouterr().err
    assert not (home / OURS[0]).exists()


def test_a_folder_of_another_user_is_left_alone(home: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    os.chown(home / "models" / MODEL, 65534, -1)
    caches.main(["--yes"])
    assert (home / OURS[0]).exists()


def test_a_link_in_place_of_a_folder_is_not_followed(home: Path, tmp_path: Path) -> None:
    shutil.move(home / "models", tmp_path / "elsewhere")
    (home / "models").symlink_to(tmp_path / "elsewhere")
    caches.main(["--yes"])
    assert (tmp_path / "elsewhere" / MODEL / "model.safetensors").exists()


def test_an_empty_machine_has_nothing_to_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "none"))
    assert caches.main(["--yes"]) == 0
    assert "0.0 MB  in all" in capsys.readouterr().out
    assert not (tmp_path / "none").exists()
