from pathlib import Path

import pytest

from kvbench.tests import golden


def folder_with(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(b"")
    return root


def passes(path: Path) -> list[tuple[str, str | None]]:
    return [(path.stem, None)]


def fails(path: Path) -> list[tuple[str, str | None]]:
    return [(path.stem, "off by one")]


@pytest.mark.parametrize(
    ("files", "code", "last"),
    [
        (["mine/right_a.npz"], 0, "1 ok, 0 FAILS, 0 without a runner, 0 files not implemented"),
        (["mine/right_a.npz", "mine/wrong_b.npz"], 1, "1 ok, 1 FAILS, 0 without a runner, 0 files not implemented"),
        (["mine/new_a.npz"], 1, "0 ok, 0 FAILS, 1 without a runner, 0 files not implemented"),
        (["mine/right_a.npz", "mine/new_a.json"], 1, "1 ok, 0 FAILS, 1 without a runner, 0 files not implemented"),
        (["full/a.npz"], 1, "0 ok, 0 FAILS, 1 without a runner, 0 files not implemented"),
        (["prefill_exact/a.npz"], 1, "0 ok, 0 FAILS, 1 without a runner, 0 files not implemented"),
        (["metrics_9/needle_scores.json"], 1, "0 ok, 0 FAILS, 1 without a runner, 0 files not implemented"),
        (
            ["mine/right_a.npz", "nobody/a.npz", "nobody/b.npz", "prefill_nobody/a.npz", "metrics_9/riddles_b.json"],
            0,
            "1 ok, 0 FAILS, 0 without a runner, 4 files not implemented in 3 folders"
            " (metrics_9, nobody, prefill_nobody)",
        ),
    ],
)
def test_what_the_project_has_must_pass_and_what_it_lacks_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], files, code: int, last: str
) -> None:
    monkeypatch.setattr(golden, "RUNNERS", {"mine/right_*": passes, "mine/wrong_*": fails})
    assert golden.main([str(folder_with(tmp_path, *files))]) == code
    assert capsys.readouterr().out.splitlines()[-1] == last


def test_a_folder_without_vectors_is_no_success(tmp_path: Path) -> None:
    assert golden.main([str(tmp_path)]) == 1 and golden.main([]) == 2


def test_every_file_of_ours_has_a_runner() -> None:
    files = golden.files_below(Path(__file__).parent / "golden")
    assert files and [path for path in files if golden.find_runner(path) is None] == []
