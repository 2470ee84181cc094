"""`--list` has a line for everything that can stand on a command line."""

import pytest

from engine.errors import ConfigError
from evals.screen import listing
from evals.screen.fits import shipped
from evals.screen.listing import main
from results.names import own_methods, own_tasks


def test_each_method_has_its_line_and_its_presets(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods"]) == 0
    lines = capsys.readouterr().out.splitlines()
    first = {line.split(" ")[0]: line for line in lines if line}
    assert own_methods().keys() <= first.keys()
    assert "SnapKV (Li et al., 2024)" in first["snapkv"] and "kvpress, paper" in first["snapkv"]
    assert "drop after the prompt, by its last queries" in lines


def test_each_model_has_its_size(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    few = [one for one in shipped() if one.name in ("llama-3.1-8b-instruct", "smollm2-135m")]
    monkeypatch.setattr(listing, "shipped", lambda: few)
    assert main(["models"]) == 0
    lines = {line.split(" ")[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    assert {one.name for one in few} <= lines.keys()
    # 32 layers x 2 x 8 heads x 128 dimensions x 2 bytes
    assert lines["llama-3.1-8b-instruct"][2:8] == ["8.03", "G", "32", "131,072", "128", "KB"]


def test_each_task_has_its_first_sample(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "costs", lambda firsts, shape: (dict.fromkeys(firsts, 2.0), "timed by nobody"))
    monkeypatch.setattr(listing, "own_tasks", lambda: {name: own_tasks()[name] for name in ("needle", "babilong")})
    assert main(["tasks"]) == 0
    said = capsys.readouterr().out
    assert "needle " in said and "babilong " in said and "timed by nobody" in said


@pytest.mark.parametrize("words", [[], ["methods", "tasks"], ["metods"]])
def test_another_list_is_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="--list wants one of tasks, methods, models"):
        main(words)
