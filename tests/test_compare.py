"""`kvbench.compare`: what the command line does with the same words, as a DataFrame; `kvbench.results`: its samples."""

import json
import linecache
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
import yaml

import kvbench
from kvbench import run
from kvbench.engine.errors import ConfigError
from kvbench.evals import outside
from kvbench.methods.dropping.snapkv import SnapKV
from kvbench.results.frame import runs
from kvbench.tests.tiny_run import example_file, save_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny")


SMALL = {"task": "needle", "limit": 2, "dtype": "float32", "device": "cpu", "task.lengths": [300]}


def test_a_row_a_run_with_the_columns_of_result_json(model: Path, tmp_path: Path) -> None:
    mine = example_file(tmp_path / "mine")
    table = kvbench.compare(str(model), ["full", "snapkv", mine], ratio=[0.1, "1/5"], out=tmp_path / "out", **SMALL)
    assert [*table.columns][:3] == ["method_label", "asked", "score"]
    assert [*zip(table.method_label, table.asked, strict=True)] == [
        ("Full", "ratio 1"),
        *(("SnapKV (C)", f"ratio {ratio}") for ratio in ("0.1", "0.2")),
        *(("Smallest keys (C)", f"ratio {ratio}") for ratio in ("0.1", "0.2")),
    ]
    for _, row in table.iterrows():
        said = json.loads((Path(row.run) / "result.json").read_text())
        assert (row.score, row.n_samples, row.tpot_s) == (said["score"], 2, said["tpot_s"])
    again = kvbench.compare(str(model), ["full", "snapkv", mine], ratio=[0.1, "1/5"], out=tmp_path / "out", **SMALL)
    assert again.equals(table)  # found, not run again
    samples = kvbench.results(tmp_path / "out")
    assert len(samples) == 10 and samples.groupby("run").score.mean().round(9).to_dict() == {
        row.run: round(row.score, 9) for _, row in table.iterrows()
    }
    assert {"method.window", "bytes_resident_device", "depth", "prediction"} <= {*samples.columns}
    assert runs(tmp_path / "out").shape[0] == 5


def test_what_the_command_line_refuses_raises_the_same_sentence(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["notebook", "-f", "kernel.json"])
    given: dict[str, Any] = SMALL | {"out": tmp_path / "out"}
    for methods, keys, said in (
        (["snapkw"], {}, "did you mean 'snapkv'"),
        (["snapkv"], {"ratoi": 0.1}, "did you mean 'ratio'"),
        (["snapkv"], {"ratio": [0.1, 7]}, "ratio=7"),
        ("snapkv", {}, "is no list of methods"),
        ([], {}, "is no list of methods"),
    ):
        with pytest.raises(ConfigError, match=said):
            kvbench.compare(str(model), methods, **given | keys)
    assert sys.argv == ["notebook", "-f", "kernel.json"]
    assert not (tmp_path / "out").exists()


def test_an_error_in_a_run_is_raised_and_the_command_line_still_ends_with_its_code(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hydra adds lines of its own to an exception; a refusal inside of it is handed around it."""
    words = ["-m", f"model={model}", "method=snapkv,full", "task=needle", "task.lengths=[3000]", f"out={tmp_path}"]
    with pytest.raises(ConfigError, match=r"3,?000|window"):
        kvbench.compare(str(model), ["snapkv", "full"], task="needle", out=tmp_path, **{"task.lengths": [3000]})
    assert run.main(words) == 2
    said = capsys.readouterr().err
    assert said.count("run.py: ") == 1 and "HYDRA" not in said


def test_folders_without_runs_are_refused(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ConfigError, match="no finished run in or below"):
            kvbench.results(folder)


def test_a_class_is_named_by_its_file_and_one_of_a_notebook_by_its_cell(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert outside.word_of(SnapKV) == "snapkv"
    source = example_file(tmp_path / "mine").read_text()
    found = [of_cell(text) for text in (source, source, source + "# another\n")]
    words = [outside.word_of(kind) for kind in found]
    assert words[0] == words[1] != words[2]
    table = kvbench.compare(str(model), [found[0]], ratio=0.2, out=tmp_path / "out", **SMALL)
    assert table.method_label.item() == "Smallest keys (C)"
    kept = yaml.safe_load((Path(table.run.item()) / "config.yaml").read_text())["method"]
    assert kept["digest"] == words[0].split("/")[1]
    other = kvbench.compare(str(model), [found[2]], ratio=0.2, out=tmp_path / "out", **SMALL)
    assert other.run.item() != table.run.item()
    nameless: dict[str, Any] = {}
    exec(compile(source, "<stdin>", "exec", dont_inherit=True), nameless)
    with pytest.raises(ConfigError, match="no source that can be read; put it into a file"):
        kvbench.compare(str(model), [nameless["SmallestKeys"]], **SMALL)


def of_cell(source: str) -> type:
    """The class of a cell, kept as a notebook's kernel does."""
    name = f"<ipython-input-{zlib.crc32(source.encode())}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    cell: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, name, "exec", dont_inherit=True), cell)
    return cell["SmallestKeys"]
