"""The workspace's panels name what `logger=wandb` copies, and a machine without account gets a file."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvbench.evals.logger import curves, summary
from kvbench.plots.dashboard import main, missing, specification, workspace
from kvbench.results import read_ledger
from kvbench.tests.plots.report_runs import write_run


@pytest.fixture
def no_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_ENTITY", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def panels() -> list[dict[str, Any]]:
    return [panel for section in specification()["sections"] for panel in section["panels"]]


@pytest.mark.usefixtures("no_account")
def test_without_an_account_the_specification_goes_to_a_file(tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("wandb_workspaces", reason="the extra `dashboard` is not installed")
    out = tmp_path / "new" / "dashboard.json"
    assert main(["--out", str(out)]) == 0
    assert json.loads(out.read_text()) == specification()
    assert "wandb login" in capsys.readouterr().out


@pytest.mark.usefixtures("no_account")
def test_a_netrc_is_an_account_and_then_a_name_is_asked_for(tmp_path: Path) -> None:
    pytest.importorskip("wandb_workspaces", reason="the extra `dashboard` is not installed")
    (tmp_path / "netrc").write_text("machine api.wandb.ai\n login user\n password key\n")
    (tmp_path / "netrc").chmod(0o600)
    assert "--entity" in str(missing(None))
    assert missing("me") is None


def test_every_panel_shows_what_a_copy_has(tmp_path: Path) -> None:
    folder, result = write_run(tmp_path, "quest", [1.0, 0.0])
    logged = {key for row in curves(read_ledger(folder, result)) for key in row} | summary(result).keys()
    logged |= {"ledger/moved_meta_bytes", "bytes_index_read_per_step"}  # which the small ledger here leaves out
    for panel in panels():
        names = panel.get("y", panel.get("metrics", []))
        names = [names] if isinstance(names, str) else names
        assert {*names, *([panel["x"]] if "x" in panel else [])} <= logged, panel


@pytest.mark.filterwarnings("ignore:Pydantic V1 style")  # its own import
def test_wandb_workspaces_accepts_the_specification() -> None:
    pytest.importorskip("wandb_workspaces", reason="the extra `dashboard` is not installed")
    made = workspace(specification(), "me", "kvbench")
    assert [len(section.panels) for section in made.sections] == [4, 4, 4, 3]
    assert made.runset_settings.groupby
