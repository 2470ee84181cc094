"""Copies for W&B, made offline and read back from the file that `wandb sync` would send."""

import json
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvbench.engine.errors import ConfigError
from kvbench.evals.logger import Copies, Wandb
from kvbench.evals.runner import run_cells
from kvbench.results.files import temporary
from kvbench.tests.plots.report_runs import write_run
from kvbench.tests.tiny_run import cell

BLOCK, HEADER = 32_768, 7  # of the file's log: blocks, and the head of a piece (crc, length, kind)
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def records(path: Path) -> Iterator[Any]:
    """The records of a .wandb file: a log of pieces, as LevelDB has it, behind a head of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data = path.read_bytes()
    assert data[:4] == b":W&B"
    at, parts = HEADER, b""
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:  # the rest of a block is too short for a head
            at += BLOCK - at % BLOCK
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        piece = data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        parts = piece if kind in (FULL, FIRST) else parts + piece
        if kind in (FULL, LAST):
            record: Any = wandb_internal_pb2.Record()  # pyright: ignore[reportAttributeAccessIssue]
            record.ParseFromString(parts)
            yield record


def read_back(folder: Path) -> dict[str, Any]:
    """What an offline copy of a run says."""
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    found: dict[str, Any] = {"history": [], "summary": {}, "config": {}, "exit": None}
    for record in records(path):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            found["run"] = record.run
            found["config"] |= {u.key: json.loads(u.value_json) for u in record.run.config.update}
        elif kind == "history":
            items = record.history.item
            names = ["/".join(item.nested_key) or item.key for item in items]
            found["history"].append(
                {name: json.loads(item.value_json) for name, item in zip(names, items, strict=True)}
            )
        elif kind == "summary":
            found["summary"] |= {
                "/".join(u.nested_key) or u.key: json.loads(u.value_json) for u in record.summary.update
            }
        elif kind == "exit":
            found["exit"] = record.exit.exit_code
    return found


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_PROJECT", "WANDB_ENTITY", "WANDB_RUN_GROUP", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_MODE", "offline")


def logger(sweep: str | None = "a-sweep") -> Wandb:
    return Wandb(Wandb.Params(project=None, entity=None, group=None, tags=("one",)), sweep)


def test_a_copy_holds_what_the_run_holds(tmp_path: Path) -> None:
    bulky = {"attended_bins": [0.5] * 100, "prompt_end": {"context": "a long text", "question": "what?"}}
    folder, result = write_run(tmp_path, "quest", [1.0, 0.0, 1.0], fields=bulky)
    (folder / "heatmap.png").write_bytes(PNG)
    logger().copy(folder, result)
    copy = read_back(folder)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert {key: copy["config"][key] for key in config} == config
    assert copy["run"].run_group == "a-sweep"
    assert (copy["run"].project, [*copy["run"].tags]) == ("kvbench", ["one"])
    assert copy["run"].run_id.startswith(result.config_hash)
    assert copy["summary"]["score"] == result.score
    assert copy["summary"]["within_budget"] is True
    attended = [row["ledger/attended"] for row in copy["history"] if "ledger/attended" in row]
    assert attended == [10, 20]  # mean over samples and layers
    (table,) = folder.glob("wandb/offline-run-*/files/media/table/samples*.json")
    lines = json.loads(table.read_text())
    assert not bulky.keys() & {*lines["columns"]} and {"depth", "length"} <= {*lines["columns"]}
    at = lines["columns"].index("prediction")
    assert [line[at] for line in lines["data"]] == [
        "quest says 1.0",
        "quest says 0.0",
        "quest says 1.0",
    ]
    assert len([*folder.glob("wandb/offline-run-*/files/media/images/figures/*.png")]) == 1
    assert copy["exit"] == 0


def test_the_last_line_says_how_to_send_offline_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    runs = [write_run(Path("my runs"), method, [1.0]) for method in ("quest", "snapkv")]
    copies = Copies([], [folder for folder, _ in runs])
    copies.logger = logger()
    copies.send(dict(runs[:1]))
    assert "to send" not in capsys.readouterr().err, "the sweep is not over"
    copies.send(dict(runs))
    copies.send(dict(runs))
    said = capsys.readouterr().err.splitlines()
    (line,) = [line for line in said if "to send" in line]
    assert line == said[-1]
    command = line.partition("to send the copies: wandb sync ")[2]
    listed = subprocess.run(["bash", "-c", f"ls -d {command}"], capture_output=True, text=True, check=True)
    sent = {Path(path) for path in listed.stdout.splitlines()}
    assert sent == {*tmp_path.glob("my runs/*/wandb/offline-run-*")} and len(sent) == 2
    monkeypatch.setenv("WANDB_DIR", "/elsewhere")
    assert str(copies.logger.farewell(copies.folders)).endswith("wandb sync /elsewhere/wandb/offline-run-*")


def test_copies_that_are_online_have_their_address(tmp_path: Path) -> None:
    folder, _ = write_run(tmp_path, "quest", [1.0])
    note = {"result": "0", "url": "https://wandb.ai/me/kvbench/runs/abc"}
    (folder / "wandb.json").write_text(json.dumps(note))
    assert logger().farewell([folder]) == "W&B: 1 runs at https://wandb.ai/me/kvbench"
    (folder / "wandb.json").unlink()
    assert logger().farewell([folder]) is None


def test_a_run_is_copied_once_and_a_copy_that_was_cut_off_is_made_again_under_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, result = write_run(tmp_path, "quest", [1.0])
    with monkeypatch.context() as broken:
        broken.setattr(Wandb, "fill", fail)
        with pytest.raises(OSError, match="disk"):
            logger().copy(folder, result)
    assert not (folder / "wandb.json").exists()
    for _ in range(2):
        logger().copy(folder, result)
    files = [path.name for path in folder.glob("wandb/offline-run-*/*.wandb")]
    assert len(files) == 2 and len({*files}) == 1, "W&B takes both for one run"


@pytest.mark.parametrize("content", ["[" * 3000 + "]" * 3000, "[]", '{"result": 1e999}', "\x00", "{}"])
def test_a_damaged_marker_is_as_none(content: str, tmp_path: Path) -> None:
    folder, result = write_run(tmp_path, "quest", [1.0])
    (folder / "wandb.json").write_text(content)
    logger().copy(folder, result)
    assert len(json.loads((folder / "wandb.json").read_text())["result"]) == 10


def test_the_marker_follows_no_link(tmp_path: Path) -> None:
    folder, result = write_run(tmp_path / "runs", "quest", [1.0])
    (tmp_path / "precious").write_text("do not lose")
    for name in ("wandb.json", "wandb.json.tmp", temporary(Path("wandb.json")).name):
        (folder / name).symlink_to(tmp_path / "precious")
    logger().copy(folder, result)
    assert (tmp_path / "precious").read_text() == "do not lose"
    assert len(json.loads((folder / "wandb.json").read_text())["result"]) == 10


@pytest.mark.parametrize("damage", [lambda whole: whole[: len(whole) // 2], lambda whole: b"PAR1", lambda whole: b""])
def test_a_cut_ledger_is_no_reason_not_to_copy(damage: Any, tmp_path: Path) -> None:
    folder, result = write_run(tmp_path, "quest", [1.0])
    path = folder / "ledger.parquet"
    path.write_bytes(damage(path.read_bytes()))
    logger().copy(folder, result)
    copy = read_back(folder)
    assert copy["summary"]["score"] == 1.0 and copy["exit"] == 0
    assert not [row for row in copy["history"] if "ledger/attended" in row]


def test_runs_survive_a_logger_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    done = dict(write_run(tmp_path, "quest", [1.0], ratio=ratio) for ratio in ("1/5", "1/10"))
    monkeypatch.setattr(Wandb, "copy", fail)
    words = ["method=full", "task=needle", "logger=wandb"]
    copies = Copies([cell(words, tmp_path, is_sweep=True)], [*done])
    copies.send(done)
    copies.send(done)
    assert capsys.readouterr().err.count("the disk is full") == 1


def test_no_account_is_refused_before_a_model_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    with pytest.raises(ConfigError, match="WANDB_MODE=offline"):
        run_cells([cell(["method=full", "task=needle", "logger=wandb"], tmp_path / "run")])
    assert not (tmp_path / "run").exists()


def test_a_sweep_has_one_group_and_the_logger_is_no_part_of_a_run(tmp_path: Path) -> None:
    words = ["method=full", "task=needle"]
    plain = cell(words, tmp_path, is_sweep=True)
    logged = cell([*words, "logger=wandb", "logger.project=mine"], tmp_path, is_sweep=True)
    assert plain.resolved() == logged.resolved()
    cells, folders = [logged, replace(logged, seed=1)], [tmp_path / "a", tmp_path / "b"]
    first, second = Copies(cells, folders).logger, Copies(cells, folders[::-1]).logger
    assert isinstance(first, Wandb) and isinstance(second, Wandb)
    assert first.sweep == second.sweep is not None
    assert first.params.project == "mine"


def fail(*_: Any) -> None:
    raise OSError("the disk is full")


PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c4944415408d763f8ffff3f0005fe02fe"
    "dccc59e70000000049454e44ae426082"
)
