import json

import pytest

from kvbench.engine.errors import ConfigError
from kvbench.results import SampleRow
from kvbench.results.files import file_stem
from kvbench.tasks import latency
from kvbench.tests.tiny_run import cell, run, save_tiny, sweep

WORDS = ["task=latency", "task.lengths=[96,160]", "task.n_new=6", "task.repeats=2", "task.warmup=0"]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = save_tiny(tmp_path_factory.mktemp("models") / "tiny")
    return ["model=any", f"model.id={folder}", "model.name=tiny", *WORDS]


def timing(row: SampleRow) -> dict:
    return row.fields["timing"]


def test_each_length_and_batch_is_a_sample_with_times_paired_with_full(words, tmp_path) -> None:
    words = [*words, "method=oracle", "ratio=0.25", "task.batches=[1,3]", "trace=true"]
    result, rows = run(words, tmp_path)
    assert [(row.fields["length"], row.fields["batch"]) for row in rows] == [
        (96, 1), (96, 3), (160, 1), (160, 3)
    ]  # fmt: skip
    assert result.metric == "tpot_ratio"
    for row in rows:
        found = timing(row)
        assert row.score == found["tpot_ratio"] and row.batch_rows == row.fields["batch"]
        assert 0 < found["ttft_s"] < found["tt2t_s"]
        for name in ("ttft", "tt2t", "tpot"):
            low, high = found[f"{name}_ratio_q"]
            assert 0 < low <= found[f"{name}_ratio"] <= high
        assert found["tokens_per_s"] == pytest.approx(row.fields["batch"] / found["tpot_s"])
        # The prefill gives one token of six, so five are fed; the ledger is of one request.
        assert row.ledger["steps"] == 5 and row.ledger["tokens_budget"] == row.fields["length"] // 4
        assert found["prefill_bytes"] > found["request_bytes"] > 0
        assert {"model", "attention", "search", "fetch"} <= set(found["step_parts_s"])
        assert {"model", "attention", "build"} <= set(found["prefill_parts_s"])
        trace = json.loads((tmp_path / f"trace-{file_stem(row.id)}.json").read_text())["traceEvents"]
        assert sum(event["name"] == "step" for event in trace) == 5


def test_parts_of_a_step_add_up_to_it(words, tmp_path) -> None:
    _, rows = run([*words, "method=full"], tmp_path)
    for row in rows:
        found = timing(row)
        whole = sum(found["step_parts_s"].values())
        # The first step is among the parts and not in the time per token: hence the slack.
        assert 0.3 * found["recorded_tpot_s"] < whole < 20 * found["recorded_tpot_s"]


def test_cells_of_a_sweep_are_timed_one_after_another(words, tmp_path) -> None:
    done = sweep(words, [["method=full"], ["method=snapkv", "ratio=0.5"]], tmp_path)
    for _, rows in done:
        assert [row.batch_rows for row in rows] == [1, 1]
    assert timing(done[1][1][0])["request_bytes"] < timing(done[0][1][0])["request_bytes"]


def test_a_length_that_does_not_fit_is_a_result(words, tmp_path, monkeypatch) -> None:
    read = latency.read

    def short_of_memory(model, variant, ids, n_new):
        if len(ids) == 160:
            raise MemoryError("160 tokens are too many")
        return read(model, variant, ids, n_new)

    monkeypatch.setattr(latency, "read", short_of_memory)
    result, rows = run([*words, "method=snapkv", "ratio=0.5"], tmp_path)
    assert [row.status for row in rows] == ["ok", "oom"] and result.status == "oom"


def test_random_weights_need_no_download(tmp_path, monkeypatch) -> None:
    (tmp_path / "shapes").mkdir()
    (tmp_path / "shapes" / "small.yaml").write_text(
        "model_type: llama\nvocab_size: 300\nhidden_size: 32\nintermediate_size: 64\n"
        "num_hidden_layers: 2\nnum_attention_heads: 4\nnum_key_value_heads: 2\nmax_position_embeddings: 512\n"
    )
    monkeypatch.setattr("kvbench.evals.settings.ARCHITECTURES", tmp_path / "shapes")
    words = ["model=any", "model.id=no-one/small", "model.name=small", "weights=random", *WORDS]
    result, rows = run([*words, "method=snapkv", "ratio=0.5"], tmp_path / "out")
    assert result.model == "small" and len(rows) == 2
    assert "weights: random" in (tmp_path / "out" / "config.yaml").read_text()


def test_shapes_of_large_models_are_here(tmp_path) -> None:
    from kvbench.evals.models import look_up

    for name, n_layers, h, h_kv in (
        ("llama-3.1-8b-instruct", 32, 32, 8),
        ("mistral-7b-instruct-v0.2", 32, 32, 8),
    ):
        shape = look_up(cell([f"model={name}", "weights=random", "task=latency"], tmp_path))
        assert (shape.n_layers, shape.h, shape.h_kv, shape.d_h) == (n_layers, h, h_kv, 128)
        assert len(shape.attention_layers) == n_layers


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["task.lengths=[]"], "task.lengths"),
        (["task.lengths=[96,96]"], "task.lengths"),
        (["task.n_new=2"], "task.n_new=2 is out of range; it is 3 or more: the first token"),
        (["task.repeats=0"], "task.repeats=0"),
        (["task.memory_gb=0"], "task.memory_gb=0"),
        (["task.most_rows=0"], "task.most_rows=0"),
        (["task.lengths=[1020]"], "use shorter ones"),
    ],
)
def test_what_cannot_be_timed_is_said(changes, message, words, tmp_path) -> None:
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
        run([*words, "method=full", *changes], tmp_path)


def test_random_weights_are_refused_where_answers_count(tmp_path) -> None:
    with pytest.raises(ConfigError, match="use it with task=latency"):
        run(["method=full", "task=needle", "weights=random", "task.source=embedded"], tmp_path)
