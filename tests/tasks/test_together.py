"""How many requests fit into a memory, by sums written a second time, and what so many give."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvbench.engine.row import Row
from kvbench.results import SampleRow
from kvbench.tasks import latency, memory, together
from kvbench.tasks.base import Sample
from kvbench.tasks.memory import Sizes
from kvbench.tests.tiny_run import run, save_tiny, sweep

LENGTH, N_NEW = 160, 6
WORDS = ["task=latency", f"task.lengths=[{LENGTH}]", f"task.n_new={N_NEW}", "task.repeats=1", "task.warmup=0"]
TOKEN = 3 * 2 * (8 + 8) * 4  # bytes of K and V: layers, KV heads, dimensions, float32
KEPT = 40  # tokens of the prompt, where it has a budget
# By method: what it holds of a prompt with room for what comes, and its index.
HELD = {
    "full": (LENGTH + N_NEW) * TOKEN,
    "snapkv": (KEPT + N_NEW) * TOKEN,
    "streamingllm": (KEPT + 1) * TOKEN,  # the current token takes the oldest one's place a step later
    "h2o": (KEPT + 1) * TOKEN + 3 * 2 * 4 * (KEPT + 1),  # a sum of weights for each slot of a KV head
}
IS_VIEW = ("full",)  # which holds the prompt where the prefill left it


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def words(folder: Path) -> list[str]:
    return ["model=any", f"model.id={folder}", "model.name=tiny", *WORDS]


@pytest.fixture(scope="module")
def weights(folder: Path) -> int:
    """Bytes of the weights, by their file: eight that say how long its header is, the header, the numbers."""
    data = (folder / "model.safetensors").read_bytes()
    return len(data) - 8 - int.from_bytes(data[:8], "little")


def asked(name: str) -> list[str]:
    return [f"method={name}", *([] if name == "full" else [f"budget={KEPT}", "compensate=false"])]


def in_gb(n_bytes: int) -> str:
    return f"task.memory_gb={n_bytes / 1e9:.9f}"


def timing(row: SampleRow) -> dict[str, Any]:
    assert row.status == "ok", row.error
    return row.fields["timing"]


@pytest.mark.parametrize("name", HELD)
def test_as_many_requests_fit_as_their_bytes_say(name: str, words: list[str], weights: int, tmp_path: Path) -> None:
    request = HELD[name]
    prefill = request if name in IS_VIEW else LENGTH * TOKEN + request
    n = 5
    most = weights + (n - 1) * request + prefill
    for room, expected in ((most, n), (most - 1, n - 1)):
        _, (row,) = run([*words, *asked(name), in_gb(room)], tmp_path / f"{room}")
        found = timing(row)
        assert (found["weight_bytes"], found["request_bytes"]) == (weights, request)
        assert found["prefill_bytes"] == prefill
        assert found["largest_batch"] == found["batch_run"] == expected
        assert found["batch_bound"] is None and found["largest_batch_tried"] == []
        assert found["tokens_per_s_at_largest"] == pytest.approx(expected / found["tpot_s_at_largest"])


def test_retrieving_requests_hold_their_device_tier_alone(words: list[str], weights: int, tmp_path: Path) -> None:
    found = {
        name: timing(run([*words, *asked(name), "comm=1/8"], tmp_path / name)[1][0]) for name in ("quest", "pqcache")
    }
    whole = LENGTH * TOKEN
    for each in found.values():
        assert each["request_bytes"] < whole < each["prefill_bytes"] and "batch_run" not in each
    # Quest leaves two of three layers whole, and has two bounds of d_h numbers of 16 bits for each page of a KV head.
    pages = -(-LENGTH // 16)
    assert found["quest"]["request_bytes"] > 2 * whole // 3 + 2 * pages * 8 * 2 * 2


@pytest.mark.parametrize(
    ("sizes", "room", "largest"),
    [
        (Sizes(weights=100, request=10, prefill=35), 145, 2),  # the last one's prefill beside the first
        (Sizes(weights=100, request=10, prefill=35), 135, 1),
        (Sizes(weights=100, request=10, prefill=35), 134, 0),
        (Sizes(weights=100, request=10, prefill=3), 139, 3),  # where reading takes less than going on
        (Sizes(weights=100, request=10, prefill=3), 99, 0),
    ],
)
def test_the_last_prefill_happens_beside_all_others(sizes: Sizes, room: int, largest: int) -> None:
    assert sizes.largest(room) == largest


def test_a_batch_that_does_not_fit_is_not_run(
    words: list[str], weights: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[int] = []
    ordinary = latency.run_pass

    def noted(model: Any, timed: latency.Timed, sample: Sample) -> Any:
        batches.append(latency.batch_of(sample))
        return ordinary(model, timed, sample)

    monkeypatch.setattr(latency, "run_pass", noted)
    room = weights + LENGTH * TOKEN + 4 * HELD["snapkv"]
    result, rows = run([*words, *asked("snapkv"), "task.batches=[1,4,5]", in_gb(room)], tmp_path)
    assert [row.status for row in rows] == ["ok", "ok", "oom"] and result.status == "oom"
    assert {*batches} == {1, 4}
    assert rows[2].error is not None
    assert (
        rows[2].error.startswith("5 requests of 160 tokens do not fit into task.memory_gb=")
        and ", 4 do" in rows[2].error
    )
    assert timing(rows[0])["tpot_s_at_largest"] == timing(rows[1])["tpot_s_at_largest"]  # decoded once for both


def test_weights_that_do_not_fit_are_said_before_a_prompt_is_read(
    words: list[str], weights: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nobody(*_: Any) -> Any:
        raise AssertionError("a prompt is read")

    monkeypatch.setattr(latency, "read", nobody)
    result, (row,) = run([*words, "method=full", in_gb(weights)], tmp_path)
    assert result.status == row.status == "oom" and row.error is not None
    assert row.error.startswith("the weights of tiny take ") and "leaves nothing beside them; give more" in row.error


def test_full_attention_is_decoded_once_for_a_sweep(
    words: list[str], weights: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[tuple[str, int]] = []
    ordinary = together.run_copies

    def noted(model: Any, reading: memory.Reading, feed: Sequence[int], n: int) -> Any:
        def named() -> Any:
            trace, row = reading()
            runs.append((type(row).__name__, n))
            return trace, row

        return ordinary(model, named, feed, n)

    monkeypatch.setattr(together, "run_copies", noted)
    room = weights + 3 * HELD["full"]
    done = sweep([*words, in_gb(room)], [asked(name) for name in ("snapkv", "full", "streamingllm")], tmp_path)
    found = [timing(row) for _, (row,) in done]
    assert [name for name, _ in runs].count("Full") == 1 and len(runs) == 3
    assert {each["full_largest_batch"] for each in found} == {3}
    assert len({each["full_tokens_per_s_at_largest"] for each in found}) == 1
    assert found[1]["throughput_ratio"] == 1 and found[1]["batch_run"] == 3
    ours = found[0]["tokens_per_s_at_largest"] / found[0]["full_tokens_per_s_at_largest"]
    assert found[0]["throughput_ratio"] == pytest.approx(ours)
    assert found[0]["largest_batch"] == 1 + (room - weights - LENGTH * TOKEN - HELD["snapkv"]) // HELD["snapkv"]


def test_no_more_rows_are_run_than_asked_for(words: list[str], weights: int, tmp_path: Path) -> None:
    _, (row,) = run([*words, *asked("snapkv"), in_gb(weights + 10**7), "task.most_rows=3"], tmp_path)
    found = timing(row)
    assert found["largest_batch"] > 500
    assert (found["batch_run"], found["batch_bound"], found["full_batch_run"]) == (3, "task.most_rows", 3)


def test_a_host_without_room_for_so_many_bounds_them(
    words: list[str], weights: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: 1.5 * HELD["full"] / memory.SHARE)
    _, (row,) = run([*words, "method=full", in_gb(weights + 9 * HELD["full"])], tmp_path)
    found = timing(row)
    assert (found["largest_batch"], found["batch_run"], found["batch_bound"]) == (9, 2, "memory of the host")


def test_where_memory_runs_out_all_the_same_fewer_are_tried(
    words: list[str], weights: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ordinary, copies = together.request_like, 0

    def short_of_memory(row: Row) -> Row:
        nonlocal copies
        copies += 1
        if copies in (12, 20):
            raise torch.OutOfMemoryError("no room")
        return ordinary(row)

    monkeypatch.setattr(together, "request_like", short_of_memory)
    _, (row,) = run([*words, "method=full", in_gb(weights + 17 * HELD["full"])], tmp_path)
    found = timing(row)
    assert found["largest_batch"] == 17 and found["largest_batch_tried"] == [17, 15]
    assert (found["batch_run"], found["batch_bound"]) == (14, "out of memory")


def test_a_method_whose_rows_cannot_be_copied_reads_each_prompt(
    words: list[str], weights: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvbench.methods.dropping.snapkv import SnapKV

    monkeypatch.setattr(SnapKV, "traits", replace(SnapKV.traits, rolls_back=False))
    room = weights + LENGTH * TOKEN + 4 * HELD["snapkv"]
    _, (row,) = run([*words, *asked("snapkv"), in_gb(room)], tmp_path)
    assert timing(row)["batch_run"] == 4
