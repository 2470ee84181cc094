"""`make clean-cache`: what it lists, and the command that it prints."""

import shlex
import subprocess
from pathlib import Path

import pytest

from kvbench.evals.screen import caches

OURS = ("models/Some-0123456789ab/model.safetensors", "kernels-0/clusters.so", "digests-0/a.json", "vega-v6.js")
NOT_OURS = ("data/longbench/data/qasper.jsonl", "precious.txt")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a cache"))
    home = tmp_path / "a cache" / "kvbench"
    for name in (*OURS, *NOT_OURS):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_bytes(b"x" * 1_000_000)
    return home


def test_the_command_frees_what_can_be_made_again_and_nothing_else(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "models" / "linked").symlink_to(home / "data")
    assert caches.main([]) == 0
    said = capsys.readouterr().out.splitlines()
    assert any("4.0 MB  in all" in line for line in said)
    assert f"Not made here: 1.0 MB in {home / 'data'}; remove what you do not need by hand" in said
    assert {path for path in home.rglob("*") if path.is_file()} == {home / name for name in (*OURS, *NOT_OURS)}
    (command,) = [line for line in said if line.startswith("rm -r ")]
    subprocess.run(shlex.split(command), check=True)
    assert {path for path in home.rglob("*") if path.is_file()} == {home / name for name in NOT_OURS}


def test_an_empty_machine_has_nothing_to_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "none"))
    assert caches.main([]) == 0
    assert capsys.readouterr().out == f"The cache folder is {tmp_path / 'none' / 'kvbench'}\n"
    assert not (tmp_path / "none").exists()
