"""Runs behind a sparse prefill: what they are called, with whom they share a pass, and what they leave behind."""

import json
from pathlib import Path
from typing import Any

import pytest
from hydra import compose

from kvbench.engine.errors import ConfigError
from kvbench.evals import models
from kvbench.evals.batch import reading
from kvbench.evals.composing import composing
from kvbench.evals.overrides import CONF, check_overrides
from kvbench.evals.screen.table import sheet
from kvbench.evals.settings import Settings, settings
from kvbench.methods.dropping.pyramidinfer import PyramidInfer
from kvbench.results import RunResult, SampleRow, run_name
from kvbench.tests.tiny_run import cell, run, save_tiny, sweep

SPARSITY = 5  # place of it among the arguments of a prefill
SPARSE = [
    "prefill=minference", "prefill.n_vertical=0.05", "prefill.n_slash=8", "prefill.n_first=2",
    "prefill.n_near=6", "prefill.n_last=16", "prefill.block=8",
]  # fmt: skip
NEEDLE = [
    "task=needle", "task.source=embedded", "task.lengths=[400]", "task.depths=[0,50]",
    "task.max_new_tokens=6",
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = save_tiny(tmp_path_factory.mktemp("models") / "tiny")
    return ["model=any", f"model.id={folder}", "model.name=tiny"]


def composed(*words: str) -> Settings:
    with composing(CONF):
        cfg = compose("config", list(words), return_hydra_config=True)
    return settings(cfg, cfg.hydra.runtime.choices)


def plain(rows: list[SampleRow]) -> list[dict[str, Any]]:
    """Lines without what depends on the company."""
    timing = {"prefill_s", "decode_s", "tpot_s", "batch_rows"}
    return [{k: v for k, v in row.to_dict().items() if k not in timing} for row in rows]


# Identity.


def test_a_run_with_the_exact_prefill_is_called_as_before_there_was_another() -> None:
    found = composed("prefill=exact").resolved()
    assert found == composed().resolved()
    assert list(found) == [
        "method", "task", "model", "ratio", "budget", "comm", "compensate", "cache",
        "compression_scope", "seed", "limit", "dtype", "device", "data_dir",
    ]  # fmt: skip
    assert run_name(found).startswith("needle-oracle-smollm2-135m-")


def test_another_prefill_is_part_of_the_name_and_the_hash() -> None:
    names = [
        run_name(composed(*words).resolved())
        for words in ([], ["prefill=minference"], ["prefill=minference", "prefill.block=32"])
    ]
    assert len({name.rpartition("-")[2] for name in names}) == 3
    assert names[1].startswith("needle-minference-oracle-smollm2-135m-")


def test_results_from_before_there_were_prefills_are_read(model: list[str], tmp_path: Path) -> None:
    result, _ = run([*model, *NEEDLE, "method=full"], tmp_path)
    written = json.loads((tmp_path / "result.json").read_text())
    assert not {"prefill", "prefill_params"} & written.keys()
    del written["crc32"]  # of the text as it was written
    assert (result.prefill, result.prefill_params) == ("exact", {})
    assert RunResult.from_json(json.dumps(written)) == result


# Refusals.


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["prefill=minferense"], "no prefill 'minferense'; did you mean 'minference'"),
        (["prefill.block=8"], "no prefill key 'block' (all: chunk, evict)"),
        (["prefill=minference", "prefill.blok=8"], "no prefill key 'blok'; did you mean 'block'?"),
    ],
)
def test_names_that_are_not_there_are_refused(words: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_overrides(words)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["prefill=minference", "prefill.n_slash=1.5"], "prefill.n_slash=1.5 is out of range"),
        (["prefill=minference", "prefill.n_slash=a"], "prefill.n_slash=a is not a number"),
        (["prefill=minference", "prefill.block=0"], "prefill.block=0 is out of range"),
        (["prefill=minference", "method=pyramidinfer", "ratio=0.7"], "a prefill of its own"),
    ],
)
def test_what_no_prefill_can_do_is_refused_before_a_model_is_loaded(
    words: list[str], says: str, model: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "load", lambda *_, **__: pytest.fail("the model was loaded"))
    with pytest.raises(ConfigError, match=says) as caught:
        run([*model, *NEEDLE, *words], tmp_path)
    assert "\n" not in str(caught.value)


def test_who_thins_says_so() -> None:
    assert PyramidInfer.traits.prunes_prompt


# Runs.


def test_cells_share_a_pass_by_prefill_and_say_what_they_say_alone(
    model: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = []
    ordinary = reading.prefill

    def counting(*args: Any) -> Any:
        passes.append(args[SPARSITY])
        return ordinary(*args)

    monkeypatch.setattr(reading, "prefill", counting)
    variants = [
        [*prefill, f"method={method}"] for prefill in (["prefill=exact"], SPARSE) for method in ("full", "snapkv")
    ]
    together = sweep([*model, *NEEDLE, "ratio=0.3"], variants, tmp_path / "sweep")
    assert len(passes) == 4 and sum(sparsity is not None for sparsity in passes) == 2
    labels = [result.method_label for result, _ in together]
    assert labels == ["Full", "SnapKV (C)", "MInference", "MInference + SnapKV (C)"]
    for i, (result, rows) in enumerate(together):
        alone, lines = run([*model, *NEEDLE, "ratio=0.3", *variants[i]], tmp_path / str(i))
        assert plain(rows) == plain(lines)
        assert result.batch_rows_mean == 2 and alone.batch_rows_mean == 1
        shares = [row.fields.get("prefill_share") for row in rows]
        assert shares == [None, None] if i < 2 else all(0.05 < s < 0.6 for s in shares if s)
        assert result.prefill == ("exact" if i < 2 else "minference")
        assert any("the prefill computed 0." in note for note in result.notes) == (i >= 2)
        votes = [row.fields.get("prefill_votes") for row in rows]
        assert votes == [None, None] if i != 3 else all(v and 0.01 < v < 0.3 for v in votes)
        assert any(note.startswith("votes of the last queries look at 0.") for note in result.notes) == (i == 3)
    assert together[2][0].prefill_params["n_slash"] == 8


def test_the_printed_table_tells_two_sparsities_apart(model: list[str], tmp_path: Path) -> None:
    words = [*model, *NEEDLE, "method=full", *SPARSE]
    done = sweep(words, [[], ["prefill.n_slash=16"]], tmp_path)
    assert [result.method_label for result, _ in done] == ["MInference"] * 2
    shown = sheet([(Path(str(i)), result) for i, (result, _) in enumerate(done)])
    cells = [str(row[0]) for row in shown.rows]
    assert cells == ["MInference prefill.n_slash=8", "MInference prefill.n_slash=16"]


def test_fidelity_is_to_full_attention_behind_an_exact_prefill(model: list[str], tmp_path: Path) -> None:
    words = [*model, "task=fidelity", "task.prompt_tokens=200", "task.windows=1", "task.steps=4"]
    done = sweep(words, [["method=full"], ["method=full", *SPARSE]], tmp_path)
    exact, rough = (result.measures or {} for result, _ in done)
    assert exact["kl"] == pytest.approx(0, abs=1e-5) and (rough["kl"] or 0) > 1e-3
    assert (exact["output_error"] or 0) < 1e-3 < (rough["output_error"] or 0)


def test_perplexity_is_of_a_continuation_behind_the_sparse_prefix(model: list[str], tmp_path: Path) -> None:
    words = [*model, "task=pg19", "task.source=embedded", "task.lengths=[200]", "task.targets=8",
             "task.offsets=1", "method=full"]  # fmt: skip
    (exact, _), (rough, rows) = sweep(words, [[], SPARSE], tmp_path)
    assert exact.score != rough.score and rows[0].fields["prefill_share"] < 0.6


def test_times_are_paired_with_full_attention_behind_an_exact_prefill(
    model: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvbench.tasks import latency

    passes = []
    ordinary = latency.prefill

    def counting(*args: Any, **keys: Any) -> Any:
        passes.append(args[SPARSITY] is not None)
        return ordinary(*args, **keys)

    monkeypatch.setattr(latency, "prefill", counting)
    words = [*model, "task=latency", "task.lengths=[160]", "task.n_new=4", "task.repeats=2"]
    result, rows = run([*words, "task.warmup=0", "method=full", *SPARSE], tmp_path)
    assert sorted(passes) == [False, False, True, True, True, True]  # pairs, the pass that counts, the recorded one
    assert result.method_label == "MInference" and rows[0].fields["prefill_share"] < 0.7
    assert rows[0].fields["timing"]["ttft_ratio"] > 0


def test_defaults_of_the_paper_are_exact_on_a_short_prompt(model: list[str], tmp_path: Path) -> None:
    words = [*model, *NEEDLE, "limit=1", "method=full"]
    (_, full), (_, paper) = sweep(words, [[], ["prefill=minference"]], tmp_path)
    assert full[0].prediction == paper[0].prediction and paper[0].fields["prefill_share"] == 1.0


# What a line, a result and a table say.

SMALL = {
    "a_shape_short": ["prefill.n_init=4", "prefill.n_local=40"],
    "tri_shape_short": ["prefill.n_init=4", "prefill.n_local=40", "prefill.n_last=16"],
    "block_sparse_short": ["prefill.top_chunks=4"],
    "flexprefill_short": ["prefill.block=16", "prefill.min_budget=16", "prefill.gamma=0.5"],
    "top_cdf_short": ["prefill.cdf=0.5", "prefill.smooth_k=false"],
    "xattention_short": ["prefill.threshold=0.5"],
    "vertical_slash": ["prefill.n_vertical=8", "prefill.n_slash=8", "prefill.n_near=8"],
}


def test_every_prefill_is_the_same_alone_and_in_company(model: list[str], tmp_path: Path) -> None:
    words = [*model, *NEEDLE, "ratio=0.3", "limit=1"]
    cells = [
        [f"prefill={name}", *keys, f"method={method}"] for name, keys in SMALL.items() for method in ("full", "h2o")
    ]
    together = sweep(words, cells, tmp_path / "sweep")
    for i, (result, rows) in enumerate(together):
        alone, lines = run([*words, *cells[i]], tmp_path / str(i))
        assert plain(rows) == plain(lines) and alone.score == result.score
        fields = rows[0].fields
        assert result.prefill_share == fields["prefill_share"] == pytest.approx(sum(fields["prefill_shares"]) / 3)
        assert 0.02 < fields["prefill_share"] < 0.95 and result.prefill_estimate == fields["prefill_estimate"] < 0.5
        assert fields.get("prefill_observed") == (None if i % 2 == 0 else "kept")
        said = "what the method observed of all queries is of the pairs that the sparse prefill computed"
        assert (said in result.notes) == (i % 2 == 1)
        assert RunResult.from_json(result.to_json()) == result


def test_a_density_beside_the_score_lets_prefills_be_compared(model: list[str], tmp_path: Path) -> None:
    words = [*model, *NEEDLE, "limit=1", "method=full"]
    cells = [[f"prefill={name}", *keys, "prefill.density=0.4"] for name, keys in SMALL.items()]
    done = sweep(words, [*cells, ["prefill=block_sparse_short", "prefill.density=0.01"]], tmp_path)
    *fitting, (over, _) = done
    assert all(0.3 < (result.prefill_share or 0) <= 0.4 for result, _ in fitting)
    assert "prefill.density=0.01 is less than what the prefill always computes" in over.notes
    made = sheet([(Path(str(i)), result) for i, (result, _) in enumerate(done)])
    shown = [float(str(row[made.heads.index("pairs\nread")])) for row in made.rows]
    assert shown == pytest.approx([result.prefill_share or 0 for result, _ in done], abs=1e-3)


def test_a_choice_by_the_last_queries_says_that_the_question_was_not_among_them(
    model: list[str], tmp_path: Path
) -> None:
    words = [*model, *NEEDLE, "limit=1", "method=full", "compression_scope=context_only"]
    (flex, _), (blocks, _) = sweep(
        words, [[f"prefill={name}", *SMALL[name]] for name in ("flexprefill_short", "block_sparse_short")], tmp_path
    )
    assert any("the question was not among them" in note for note in flex.notes)
    assert not any("the question was not among them" in note for note in blocks.notes)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["prefill=xattention", "prefill.threshold=nothing.json"], "prefill.threshold=nothing.json cannot be read"),
        (
            ["prefill=a_shape", "prefill.layers=[1,9]"],
            "prefill.layers=.1,9. is out of range; model 'tiny' has 3 layers",
        ),
        (
            ["prefill=xattention", "prefill.threshold=[0.5,0.9]"],
            "prefill.threshold=.0.5,0.9. does not fit model 'tiny'; it needs 6 shares, one for each query head, or one",
        ),
        (["prefill=xattention", "prefill.threshold=[]"], "prefill.threshold=.. does not fit model 'tiny'"),
        (["prefill=xattention", "prefill.threshold=[0.5,-1]"], "prefill.threshold=-1 is out of range"),
        (["prefill=top_cdf", "prefill.topk=0.5"], "prefill.cdf and prefill.topk are two ways"),
        (["prefill=flexprefill", "prefill.density=2"], "prefill.density=2 is out of range"),
    ],
)
def test_settings_that_no_model_can_be_read_by_are_refused(
    words: list[str], says: str, model: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "load", lambda *_, **__: pytest.fail("the model was loaded"))
    with pytest.raises(ConfigError, match=says) as caught:
        run([*model, *NEEDLE, "method=full", *words], tmp_path)
    assert "\n" not in str(caught.value)


def test_a_table_of_thresholds_is_part_of_what_names_a_run(model: list[str], tmp_path: Path) -> None:
    file, names = tmp_path / "heads.json", []
    for share in (0.4, 0.5):
        file.write_text(json.dumps([[share] * 6] * 3))
        words = [*model, *NEEDLE, "limit=1", "method=full", "prefill=xattention_short", f"prefill.threshold={file}"]
        names.append(run(words, tmp_path / str(share))[0].config_hash)
    assert names[0] != names[1]


def test_thresholds_of_heads_read_less_than_the_largest_and_more_than_the_least(
    model: list[str], tmp_path: Path
) -> None:
    words, given = [*model, *NEEDLE, "limit=1", "method=full", "prefill=xattention_short"], [0.2, 0.9, 0.9, 0.5, 0.2, 0]
    cells = [[f"prefill.threshold={x}"] for x in ("0", str(given).replace(" ", ""), "0.9")]
    (least, _), (mixed, _), (most, _) = sweep(words, cells, tmp_path)
    assert (least.prefill_share or 1) < (mixed.prefill_share or 0) < (most.prefill_share or 0)
    assert mixed.prefill_params["threshold"] == given and len({x.config_hash for x in (least, mixed, most)}) == 3


def test_settings_keep_the_chosen_file() -> None:
    assert cell(["prefill=exact"], Path("x")).prefill is None
    chosen = cell(["prefill=minference_short"], Path("x")).prefill
    assert chosen is not None and (chosen.name, chosen.group) == ("minference_short", "prefill")
