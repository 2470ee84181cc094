"""Which runs may stand side by side."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvbench.plots import turns
from kvbench.plots.read import key_bytes_per_token, load
from kvbench.plots.run_sets import run_sets
from kvbench.plots.tables.pivot import pivots
from kvbench.plots.tables.words import samples_below
from kvbench.tests.plots.made_runs import write


def test_two_checkpoints_of_one_name_are_never_paired_and_are_told_apart(tmp_path: Path) -> None:
    for digest in ("aaa", "bbb"):
        for method, score in (("full", 1.0), ("snapkv", 0.5)):
            write(tmp_path, method, "needle", [{"score": score}], digest=digest)
    made = pivots(samples_below(tmp_path), columns=["budget"])
    assert [pivot.where["model"] for pivot in made] == ["tiny aaa", "tiny bbb"]
    assert [[row for (row,) in pivot.rows] for pivot in made] == [["Full", "SnapKV (C)"]] * 2
    assert [str(one.where).partition(" · ")[0] for one in run_sets(load(tmp_path))] == ["tiny aaa", "tiny bbb"]
    assert len(turns.groups(load(tmp_path))) == 2


def test_one_checkpoint_is_called_by_its_name_alone(tmp_path: Path) -> None:
    for name in ("tiny", "other"):
        write(tmp_path, "full", "needle", [{"score": 1.0}], digest=f"of {name}", model=name)
    assert sorted(pivot.where["model"] for pivot in pivots(samples_below(tmp_path), columns=["budget"])) == [
        "other",
        "tiny",
    ]


@pytest.mark.parametrize(("share", "of_a_token"), [(None, 50.0), ("1", 100.0), ("3/5", 60.0)])
def test_keys_have_the_share_of_a_tokens_bytes_that_their_model_gives_them(
    share: str | None, of_a_token: float
) -> None:
    """Half, all of a latent, three fifths where keys are wider than values."""
    row = SimpleNamespace(ledger={"bytes_resident_device": 1200}, prompt_tokens=10, generated_tokens=3)
    run: Any = SimpleNamespace(is_full=True, rows=[row], result=SimpleNamespace(key_share=share))
    assert key_bytes_per_token([run]) == pytest.approx(of_a_token)
