"""Whole runs on a model of a few thousand weights, through the same door as run.py."""

import json
import time
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from hydra import compose

from kvbench.engine.budget import Budget
from kvbench.engine.errors import ConfigError
from kvbench.engine.passes.trace import Trace
from kvbench.engine.placement import Offloaded
from kvbench.evals import models, prepare, runner
from kvbench.evals.batch import reading
from kvbench.evals.composing import composing
from kvbench.evals.prepare import SHOWN
from kvbench.evals.settings import Settings, settings
from kvbench.methods.dropping import xkv
from kvbench.methods.dropping.pyramidinfer import PyramidInfer
from kvbench.methods.dropping.snapkv import SnapKV
from kvbench.methods.retrieving.oracle import Oracle
from kvbench.results import RunResult, read_runs, read_samples
from kvbench.tasks.needle.task import Needle
from kvbench.tests.tiny import COMMON
from kvbench.tests.tiny_tokenizer import CHATML_TEMPLATE, tiny_tokenizer
from kvbench.tests.warm import Started, python

ROOT = Path(__file__).resolve().parents[2]
GRID = [
    "task.source=embedded",
    "task.lengths=[400,500]",
    "task.depths=[0,50]",
    "task.max_new_tokens=6",
]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with its tokenizer, as a folder."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    tokenizer = tiny_tokenizer(CHATML_TEMPLATE, adds_bos=False)
    changes: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 2048,
        "eos_token_id": 1,
    }
    config = LlamaConfig(**COMMON | changes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.data.normal_(std=0.25)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def cell(checkpoint: Path, tmp_path: Path) -> Any:
    """Settings of one run, by the words of a command line."""

    def make(*words: str, out: str = "run") -> Settings:
        method = next((word.removeprefix("method=") for word in words if word.startswith("method=")), "oracle")
        names = {"method": method, "task": "needle"}
        overrides = [
            "model=any", f"model.id={checkpoint}", "dtype=float32", "device=cpu", f"out={tmp_path / out}", *GRID, *words
        ]  # fmt: skip
        with composing(ROOT / "conf"):
            cfg = compose("config", overrides, return_hydra_config=True)
        return settings(cfg, names)

    return make


def run(*cells: Settings) -> list[tuple[Path, RunResult]]:
    return runner.run_cells(cells)


def lines(folder: Path) -> list[dict[str, Any]]:
    """The samples without their timings and with nothing that says who else was in the batch."""
    timing = {"prefill_s", "decode_s", "tpot_s", "batch_rows"}
    return [{k: v for k, v in row.to_dict().items() if k not in timing} for row in read_samples(folder)]


def test_a_run_leaves_everything_in_its_folder(cell: Any) -> None:
    ((folder, result),) = run(cell("ratio=1/5"))
    names = {
        "config.yaml",
        "samples.jsonl",
        "result.json",
        "env.json",
        "ledger.parquet",
        "heatmap.png",
        "heatmap.csv",
    }
    assert names <= {path.name for path in folder.iterdir()}
    assert 0 < json.loads((folder / "env.json").read_text())["cpu_s"] < time.process_time()
    assert (result.method, result.task, result.model) == ("oracle", "needle", "tiny-llama")
    assert (result.n_samples, result.status, result.protocol) == (4, "ok", "full_prompt")
    assert result.compressed_layers == [0, 1, 2]
    assert result.within_budget is True
    assert read_runs(folder) == [(folder, result)]
    rows = read_samples(folder)
    for row in rows:
        # The first of the generated tokens comes from the prefill, so there is one step less than tokens.
        budget = row.prompt_tokens // 5
        assert row.ledger["steps"] == row.generated_tokens - 1
        assert row.ledger["tokens_attended_mean"] == budget + 1
        # What a reader of the report looks at: how the prompt ended, and which parts of it were attended to.
        end, bins = row.fields["prompt_end"], row.fields["attended_bins"]
        assert "phone number" in end["question"] and end["cue"] and 0 < len(end["context"]) <= SHOWN
        assert sum(bins) / len(bins) == pytest.approx(budget / row.prompt_tokens, abs=0.02)
    ledger = pd.read_parquet(folder / "ledger.parquet")
    assert len(ledger) == sum(3 * (row.generated_tokens - 1) for row in rows)
    assert set(ledger.sample_id) == {row.id for row in rows}


def test_the_report_of_a_method_stands_in_its_samples(cell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    ((exact, _),) = run(cell("method=xkv", out="exact"))
    ((oracle, _),) = run(cell("method.n_sink=4", out="oracle"))
    reports = [row.fields["method_report"] for row in read_samples(exact)]
    assert [len(report["n"]) for report in reports] == [3] * 4
    assert all("method_report" not in row.fields for row in read_samples(oracle))
    # What the reports average to is what another run takes.
    capsys.readouterr()
    assert xkv.main([str(exact)]) == 0
    shares = capsys.readouterr().out.strip()
    words = ("method=xkv", "method.allocation=sampled", f"method.shares={shares}")
    ((sampled, _),) = run(cell(*words, out="sampled"))
    totals = [sum(row.fields["method_report"]["n"]) for row in read_samples(sampled)]
    assert totals == [sum(report["n"]) for report in reports]


def test_a_budget_with_room_for_fewer_sinks_says_so_in_the_samples(cell: Any) -> None:
    ((folder, _),) = run(cell("budget=100"))
    ((wide, _),) = run(cell("budget=128", out="wide"))
    assert [row.fields["method_report"] for row in read_samples(folder)] == [{"n_sink": 25}] * 4
    assert all("method_report" not in row.fields for row in read_samples(wide))


def test_the_same_command_again_loads_nothing(cell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run(cell())
    monkeypatch.setattr(models, "load", lambda *_, **__: pytest.fail("a finished run loaded the model"))
    assert run(cell()) == first


def test_cells_side_by_side_say_what_they_say_alone(cell: Any) -> None:
    words = [
        ("method=full",),
        ("method=oracle", "ratio=0.1"),
        ("method=streamingllm", "ratio=0.3"),
        ("method=oracle", "ratio=1"),
    ]
    together = run(*(replace(cell(*w, out="sweep"), is_sweep=True) for w in words))
    assert len({folder for folder, _ in together}) == 4
    for i, (folder, result) in enumerate(together):
        ((alone, single),) = run(cell(*words[i], out=f"alone-{i}"))
        assert lines(folder) == lines(alone)
        assert result.batch_rows_mean == 4
        assert single.batch_rows_mean == 1
        assert result.score_ci95 == single.score_ci95
    assert lines(together[0][0])[0]["prediction"] == lines(together[3][0])[0]["prediction"]  # full, and ratio=1


def test_a_question_outside_of_the_compression_is_fed_token_by_token(cell: Any) -> None:
    ((folder, result),) = run(cell("compression_scope=context_only"))
    assert result.protocol == "context_only"
    ((whole, _),) = run(cell(out="whole"))
    for row, full in zip(read_samples(folder), read_samples(whole), strict=True):
        split, joint = row.ledger, full.ledger
        assert number(split["steps"]) > number(joint["steps"])
        # The question is not in the prompt's budget.
        assert number(split["tokens_budget"]) < number(joint["tokens_budget"])


def number(value: float | None) -> float:
    assert value is not None
    return value


@pytest.mark.parametrize("scope", ["full_prompt", "context_only"])
def test_full_attention_does_not_care_where_the_prompt_is_cut(cell: Any, scope: str) -> None:
    ((folder, _),) = run(cell("method=oracle", "ratio=1", f"compression_scope={scope}"))
    ((full, _),) = run(cell("method=full", f"compression_scope={scope}", out="full"))
    assert [row["prediction"] for row in lines(folder)] == [row["prediction"] for row in lines(full)]


def test_limit_takes_the_first_samples(cell: Any) -> None:
    ((folder, result),) = run(cell("limit=3"))
    assert result.n_samples == 3
    assert [row.id for row in read_samples(folder)] == ["400-0-0", "400-50-0", "500-0-0"]


def test_offset_leaves_out_the_first_samples_and_changes_no_answer(cell: Any) -> None:
    ((whole, _),) = run(cell())
    ((folder, result),) = run(cell("offset=2", "limit=1", out="later"))
    names = [row.id for row in read_samples(whole)]
    assert result.n_samples == 1 and [row.id for row in read_samples(folder)] == names[2:3]
    assert lines(folder)[0]["prediction"] == lines(whole)[2]["prediction"]
    with pytest.raises(ConfigError, match=rf"^offset={len(names)} leaves none of the {len(names)} samples of needle$"):
        run(cell(f"offset={len(names)}", out="none"))


def test_a_prompt_beyond_the_window_is_refused_before_any_is_read(cell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "prefill", lambda *_, **__: pytest.fail("a prompt was read"))
    with pytest.raises(ConfigError, match=r"task.lengths.*4000"):
        run(cell("task.lengths=[4000]"))
    monkeypatch.setattr(Needle, "check", lambda self, shape: None)
    with pytest.raises(
        ConfigError,
        match=r"sample '4000-0-0' has \d+ tokens and an answer of up to 6, more than the 2048",
    ):
        run(cell("task.lengths=[4000]"))


def test_a_budget_too_small_for_a_prompt_is_refused_before_any_is_read(
    cell: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "prefill", lambda *_, **__: pytest.fail("a prompt was read"))
    with pytest.raises(ConfigError, match="leaves nothing beside"):
        run(cell("method=streamingllm", "budget=4", "comm=0"))


def test_one_cell_twice_is_refused(cell: Any) -> None:
    with pytest.raises(ConfigError, match="same run"):
        run(cell(), cell())


def out_of_memory_when(condition: Any) -> Any:
    """An `arrange` that fails where the condition on the trace holds."""
    arrange = Oracle.arrange

    def failing(self: Oracle, layer: int) -> Offloaded:
        if layer == 1 and condition(self.trace):
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 20 GiB")
        return arrange(self, layer)

    return failing


def test_a_lack_of_memory_marks_the_sample_and_keeps_the_others(cell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def long(trace: Trace) -> bool:
        return trace.s_prompt > 320

    monkeypatch.setattr(Oracle, "arrange", out_of_memory_when(long))
    ((folder, result),) = run(cell())
    statuses = [row.status for row in read_samples(folder)]
    assert set(statuses) == {"ok", "oom"}, [row.prompt_tokens for row in read_samples(folder)]
    assert (result.status, result.n_oom, result.n_samples) == (
        "oom",
        statuses.count("oom"),
        statuses.count("ok"),
    )
    failed = next(row for row in read_samples(folder) if row.status == "oom")
    assert failed.error == "CUDA out of memory. Tried to allocate 20 GiB"
    assert failed.score is None


def test_only_the_cell_that_does_not_fit_is_marked(cell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Oracle, "arrange", out_of_memory_when(lambda trace: True))
    cells = [replace(cell(word, out="sweep"), is_sweep=True) for word in ("method=full", "method=oracle")]
    (_, full), (_, oracle) = run(*cells)
    assert (full.status, full.n_samples) == ("ok", 4)
    assert (oracle.status, oracle.n_samples, oracle.n_oom, oracle.score) == ("oom", 0, 4, None)


def test_other_errors_are_not_taken_for_a_lack_of_memory(cell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Oracle, layer: int) -> None:
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr(Oracle, "arrange", broken)
    with pytest.raises(RuntimeError, match="a mistake of ours"):
        run(cell())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("model.id=no-such/model",), r"'no-such/model' is no folder"),
        (("model.id=/no/such/file.gguf",), r"is no file"),
        (("method.agg=sum",), r"method.agg=sum"),
        (("task.source=local", "data_dir=/no/such/folder"), r"/no/such/folder"),
        (("device=cuda:7",), r"device=cuda:7"),
        (("device=mps",), r"device=mps needs a GPU that torch can use, and there is none"),
        (
            ("device=auto", "device_map=auto"),
            r"device_map=auto divides a model among GPUs, and torch can use none here",
        ),
    ],
)
def test_what_cannot_be_run_says_so_in_one_sentence(
    cell: Any, words: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # the variable is read when it is imported
    monkeypatch.setattr(models, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    if words[0].startswith("device") and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ConfigError, match=said):
        run(cell(*words))


def test_a_folder_that_cannot_be_written_is_refused_before_a_model_is_loaded(
    cell: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        run(cell(out="file/run"))


def test_a_killed_run_goes_on_and_ends_the_same(cell: Any, checkpoint: Path, tmp_path: Path) -> None:
    """kill -9 in the middle of a real run of run.py; the next one comes through."""
    ((whole, expected),) = run(cell("task.depths=[0,20,50,80,100]", out="whole"))
    out = tmp_path / "killed"
    command = [
        str(ROOT / "run.py"), f"model={checkpoint}", "dtype=float32", "device=cpu", f"out={out}", *GRID,
        "task.depths=[0,20,50,80,100]",
    ]  # fmt: skip
    samples, is_killed = out / "samples.jsonl", False
    process = Started(command, cwd=tmp_path)
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline and not is_killed:
        if samples.exists() and samples.read_bytes().count(b"\n") >= 3:
            process.kill()
            is_killed = True
        time.sleep(0.005)
    process.wait()
    assert is_killed, "the run ended before it could be killed"
    done = python(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert lines(out) == lines(whole)
    ours, theirs = (json.loads((folder / "result.json").read_text()) for folder in (out, whole))
    for key in ("crc32", "samples_crc32", "prefill_s", "tpot_s", "peak_rss_bytes"):
        del ours[key], theirs[key]
    assert ours == theirs
    assert expected.n_samples == 10
    assert (out / "ledger.parquet").read_bytes() == (whole / "ledger.parquet").read_bytes()


def test_a_plan_is_made_once_per_variant_and_length_and_a_prompt_is_encoded_once(
    cell: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: Counter[tuple[str, Fraction, int]] = Counter()
    for kind in (Oracle, SnapKV, PyramidInfer):

        def plan_for(cls: Any, params: Any, budget: Budget, shape: Any, made: Any = kind.plan_for) -> Any:
            plans[cls.__name__, budget.ratio, budget.s_prompt] += 1
            return made(params, budget, shape)

        monkeypatch.setattr(kind, "plan_for", classmethod(plan_for))
    prompts: Counter[str] = Counter()
    lengths = {400}  # of which the task says that its shortest prompt is not longer

    def encode(tokenizer: Any, sample: Any, **options: Any) -> Any:
        prompts[sample.id] += 1
        prompt = made_prompt(tokenizer, sample, **options)
        lengths.add(len(prompt.context_ids))
        return prompt

    made_prompt = prepare.prompt_of
    monkeypatch.setattr(prepare, "prompt_of", encode)
    variants = [("oracle", "1/5"), ("oracle", "1/2"), ("snapkv", "1/5"), ("pyramidinfer", "1/2")]
    run(*(cell(f"method={name}", f"ratio={ratio}", out=f"{name}-{i}") for i, (name, ratio) in enumerate(variants)))
    assert len(prompts) == 4 and set(prompts.values()) == {1}
    assert len(plans) == len(variants) * len(lengths) and set(plans.values()) == {1}


# --- what is refused before weights are loaded ---


def test_a_variant_that_the_budget_cannot_pay_is_named_before_weights_are_loaded(
    cell: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(models, "load", load)
    for word in ("ratio=0.005", "budget=3"):
        with pytest.raises(ConfigError, match=f"method=streamingllm {word}: "):
            runner.run_cells([cell("method=streamingllm", "comm=0", word, *GRID, out=word[:5])])


@pytest.mark.parametrize(
    "words",
    [
        ["method=snapkv", "method.kernel=1000000000001"],
        ["method=snapkv", "method.window=2049"],
        ["method=xkv", "method.kernel=1000000000001"],
        ["method=clusterkv", "method.cache_steps=100000000000"],
        ["method=quest", "method.comm_mode=native", "method.page_len=1000000000000", "comm=1"],
        ["method=infllm", "method.block_len=1000000000000", "ratio=1"],
        ["method=streamingllm", "method.n_sink=1000000000000"],
        ["cache.tokens=1000000000000"],
        ["prefill=minference", "prefill.block=1000000000000"],
        ["task.seeds=100000000000"],
        ["task.depths=1000000000"],
    ],
    ids=" ".join,
)
def test_no_size_is_larger_than_the_models_window(cell: Any, words: list[str]) -> None:
    words = [*[word for word in GRID if not word.startswith(words[-1].split("=")[0])], *words]
    with pytest.raises(ConfigError, match=r"give at most|at most (2048|10000)|from 1 to 1000"):
        runner.prepare([cell(*words)])


def test_a_sweep_goes_on_without_what_its_settings_or_its_prompts_refuse(
    cell: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """A budget of 20 tokens has no room for InfLLM's blocks, which is known with the prompts alone."""
    words = {
        "kept": ("method=oracle", "budget=20"),
        "by_prompt": ("method=infllm", "budget=20"),
        "by_model": ("method=pqcache", "budget=20", "method.m=7"),
    }
    cells = [replace(cell(*asked, out=out), skips_refused=True) for out, asked in words.items()]
    ((folder, result),) = run(*cells)
    assert (folder.name, result.method) == ("kept", "oracle")
    said = capsys.readouterr().err
    assert "left out: method=infllm budget=20" in said and "left out: method=pqcache budget=20" in said
    assert not (folder.parent / "by_prompt").exists()


def test_what_leaves_out_several_cells_is_said_once(cell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    lost = [cell(f"method={name}", "model=any", "model.id=no/folder.gguf") for name in ("snapkv", "h2o")]
    run(replace(cell("method=full"), skips_refused=True), *(replace(one, skips_refused=True) for one in lost))
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("left out")]
    assert len(said) == 1 and said[0].startswith("left out, 2 cells: "), said


def test_a_sweep_of_which_nothing_is_left_says_so(cell: Any) -> None:
    with pytest.raises(ConfigError, match="every cell of this sweep is left out"):
        run(replace(cell("method=infllm", "budget=20"), skips_refused=True))
    with pytest.raises(ConfigError, match="method=infllm budget=20"):
        run(cell("method=infllm", "budget=20"))
