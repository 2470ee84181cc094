"""Which runs may stand side by side."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvbench.plots import turns
from kvbench.plots.read import by_conditions, key_bytes_per_token, load
from kvbench.tests.plots.made_runs import write


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


@pytest.mark.parametrize(("share", "of_a_token"), [(None, 50.0), ("1", 100.0), ("3/5", 60.0)])
def test_keys_have_the_share_of_a_tokens_bytes_that_their_model_gives_them(
    share: str | None, of_a_token: float
) -> None:
    """Half, all of a latent, three fifths where keys are wider than values."""
    row = SimpleNamespace(ledger={"bytes_resident_device": 1200}, prompt_tokens=10, generated_tokens=3)
    run: Any = SimpleNamespace(is_full=True, rows=[row], result=SimpleNamespace(key_share=share))
    assert key_bytes_per_token([run]) == pytest.approx(of_a_token)
