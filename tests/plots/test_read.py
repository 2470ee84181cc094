"""Which runs may stand side by side."""

from pathlib import Path

from plots import turns
from plots.read import by_conditions, load
from tests.plots.made_runs import write


def test_two_checkpoints_of_one_name_are_never_paired_and_are_told_apart(tmp_path: Path) -> None:
    for digest in ("aaa", "bbb"):
        for method, score in (("full", 1.0), ("snapkv", 0.5)):
            write(tmp_path, method, "needle", [{"score": score}], digest=digest)
    groups = by_conditions(load(tmp_path))
    assert [sorted(run.method for run in runs) for runs in groups.values()] == [["full", "snapkv"]] * 2
    assert [{run.checkpoint for run in runs} for runs in groups.values()] == [{"aaa"}, {"bbb"}]
    assert [str(key).partition(" · ")[0] for key in groups] == ["tiny aaa", "tiny bbb"]
    assert len(turns.groups(load(tmp_path))) == 2


def test_one_checkpoint_is_called_by_its_name_alone(tmp_path: Path) -> None:
    for name in ("tiny", "other"):
        write(tmp_path, "full", "needle", [{"score": 1.0}], digest=f"of {name}", model=name)
    assert [str(key).partition(" · ")[0] for key in by_conditions(load(tmp_path))] == ["other", "tiny"]
