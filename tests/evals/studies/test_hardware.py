import json
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch

from kvbench.engine.budget import EVERYTHING, BudgetRequest
from kvbench.engine.shapes import ModelShape
from kvbench.evals.every import own_class
from kvbench.evals.overrides import CONF
from kvbench.evals.studies.counts import AT, N_STEPS, Counts, Numbers, count
from kvbench.evals.studies.hardware import (
    Hardware,
    Layers,
    Question,
    answer,
    main,
    method_of,
    predict,
    read_hardware,
    read_model,
)
from kvbench.results.names import known

# Round figures: 10^12 operations and 10^9 bytes a second, no prices but those a test adds.
PLAIN = Hardware("plain", 1, 1, 1000, 1, 0.5, 1, 1, 1, 0, 0, 0, 0)
SHAPE = ModelShape("plain", 2, 4, 2, 8, 1 << 20, (0, 1))
LAYERS = Layers(SHAPE, 500_000, 1_000_000, 3_000_000)
READ_BYTES = 2 * (2 * 500_000 + 1_000_000)  # of weights, at a step
NOTHING = Counts(0, 0, 0, 0, 0, 0, 0, 0)
REQUEST = BudgetRequest(Fraction(1, 5), None, Fraction(1, 64))


def test_a_step_without_attention_reads_all_weights_once() -> None:
    found = predict(NOTHING, LAYERS, PLAIN, 16)
    assert found.tpot_s == pytest.approx(READ_BYTES / 1e9)
    # Weights are read once for the whole batch, K and V once per request.
    counts = replace(NOTHING, attended_bytes=1e6)
    assert predict(counts, LAYERS, PLAIN, 16, 3).tpot_s == pytest.approx(READ_BYTES / 1e9 + 2 * 3 * 1e6 / 1e9)


def test_a_fetch_is_waited_for_and_finding_is_hidden_behind_a_layer() -> None:
    step = predict(NOTHING, LAYERS, PLAIN, 16).tpot_s
    fetching = predict(replace(NOTHING, moved_kv_bytes=1e6), LAYERS, PLAIN, 16)
    assert fetching.tpot_s == pytest.approx(step + 2 * 1e6 / 1e9)
    a_layer = 500_000 * 2 / 1e9
    hidden = predict(replace(NOTHING, moved_meta_bytes=0.9e6), LAYERS, PLAIN, 16)
    assert hidden.tpot_s == pytest.approx(step) and a_layer == 1e-3
    shown = predict(replace(NOTHING, moved_meta_bytes=1.5e6), LAYERS, PLAIN, 16)
    assert shown.parts["find, not hidden"] == pytest.approx(2 * 0.5e-3)
    for found in (fetching, hidden, shown):
        assert sum(found.parts.values()) == pytest.approx(found.tpot_s)


def test_numbers_that_a_search_makes_have_a_price_for_each_request() -> None:
    step = predict(NOTHING, LAYERS, PLAIN, 16).parts
    priced = replace(PLAIN, number_ns=3)
    found = predict(replace(NOTHING, searched_numbers=1e6), LAYERS, priced, 16, 2).parts
    assert found["search"] == pytest.approx(2 * 2 * 1e6 * 3e-9)
    assert {name: found[name] for name in found if name != "search"} == pytest.approx(
        {name: step[name] for name in step if name != "search"}
    )


def test_numbers_are_counted_of_searches_alone_and_grow_with_what_is_scored() -> None:
    shape = read_model("smollm2-135m")[0].shape
    per_token = {}
    for name in ("full", "snapkv", "quest", "sparq", "oracle", "rocketkv"):
        kind, params = method_of(name)
        low, high = (count(kind, params, EVERYTHING if name == "full" else REQUEST, shape, s) for s in AT)
        per_token[name] = (high.searched_numbers - low.searched_numbers) / (AT[1] - AT[0])
        assert (low.searched_numbers > 0) == (low.searched_bytes > 0)
    assert per_token["full"] == per_token["snapkv"] == 0
    # SPARQ and the oracle score every token for each query head or more, Quest two corners of 128 tokens' page.
    assert per_token["sparq"] > shape.h and per_token["oracle"] > shape.h > 3 * per_token["quest"] > 0
    numbers = Numbers()
    with numbers:
        scores = torch.arange(12).view(3, 4)[:, :2] + 1
        scores.topk(1)
    assert numbers.n == 12 + 6 + 2 * 3


def test_tokens_that_are_read_once_more_are_waited_for_before_the_second_token() -> None:
    bare, more = (predict(replace(NOTHING, second_pass_tokens=n), LAYERS, PLAIN, 4096) for n in (0, 4096))
    assert more.ttft_s == bare.ttft_s and more.tpot_s == bare.tpot_s
    # As many tokens as the prompt has, each of which sees the whole prompt and half of its own kind: thrice the pairs.
    layers, pairs = 2 * 4096 * 500_000, 2 * 4 * 8 * 4096**2
    assert bare.ttft_s == pytest.approx(2 * (layers + pairs) / 1e12 + 2e-3)
    assert more.tt2t_s - bare.tt2t_s == pytest.approx(2 * (layers + 3 * pairs) / 1e12)


def test_layers_that_no_method_compresses_read_what_they_keep() -> None:
    """A model was priced as if all of its layers kept every token."""
    slides = replace(SHAPE, attention_layers=(1,), left=((64, 1000),))  # 64 numbers of each of the last 1,000 tokens
    counts = replace(NOTHING, attended_bytes=1e6, moved_kv_bytes=1e6)
    found = predict(counts, replace(LAYERS, shape=slides), PLAIN, 4096, 3).parts
    both = predict(counts, LAYERS, PLAIN, 4096, 3).parts
    assert found["fetch"] == pytest.approx(both["fetch"] / 2)
    assert found["attention"] == pytest.approx(both["attention"] / 2 + 3 * 2 * 64 * 1000 / 1e9)
    assert (found["model"], found["head"]) == (both["model"], both["head"])


def test_one_memory_has_no_link() -> None:
    counts = replace(NOTHING, moved_kv_bytes=1e9, moved_meta_bytes=1e9, offloaded_bytes=1e9)
    found = predict(counts, LAYERS, replace(PLAIN, link_gb_s=None), 16)
    assert found.tpot_s == pytest.approx(predict(NOTHING, LAYERS, PLAIN, 16).tpot_s)


def test_clustering_shows_in_the_second_token_only_where_it_is_slower_than_the_layers() -> None:
    bare = predict(NOTHING, LAYERS, PLAIN, 4096)
    layer_s = (bare.ttft_s - 2e-3) / 2  # without the head
    quick = predict(replace(NOTHING, build_flops=0.4 * layer_s * 0.5e12), LAYERS, PLAIN, 4096)
    slow = predict(replace(NOTHING, build_flops=3 * layer_s * 0.5e12), LAYERS, PLAIN, 4096)
    assert quick.ttft_s == slow.ttft_s == bare.ttft_s
    # Two layers of clustering begin when the first layer is done; then the second layer's step and the head are left.
    assert slow.tt2t_s == pytest.approx((1 + 2 * 3) * layer_s + 1e-3 + 2e-3)
    assert quick.tt2t_s - bare.tt2t_s < 0.4 * layer_s


@pytest.mark.parametrize("name", ["full", "snapkv", "quest"])
def test_counts_lie_on_a_line_through_two_lengths(name: str) -> None:
    shape = read_model("smollm2-135m")[0].shape
    kind, params = method_of(name)
    request = EVERYTHING if name == "full" else REQUEST
    far = count(kind, params, request, shape, 3072)
    for field in ("attended_bytes", "searched_bytes", "resident_bytes"):
        low, high = (getattr(count(kind, params, request, shape, s), field) for s in AT)
        assert getattr(far, field) == pytest.approx((low + high) / 2)
    share = 1 if name == "full" else 0.2
    # A dropping method gets what 1/64 of the keys' bytes would have moved as tokens: 1/128 of the prompt.
    share += 1 / 128 if name == "snapkv" else 0
    whole_pages = 0.1 if name == "quest" else 0.01
    assert far.attended_bytes == pytest.approx(share * 3072 * shape.h_kv * 4 * shape.d_h, rel=whole_pages)
    assert (far.moved_kv_bytes > 0) == (name == "quest") == (far.offloaded_bytes > 0)


def test_a_budget_of_more_tokens_than_the_short_lengths_have_is_no_full_attention() -> None:
    """Counts were those of full attention at any length, where both short ones had no more tokens than the budget."""
    shape = read_model("smollm2-135m")[0].shape
    kind, params = method_of("snapkv")
    found = count(kind, params, BudgetRequest(None, 4096, Fraction(0)), shape, 65536)
    assert found.attended_bytes == pytest.approx((4096 + N_STEPS) * 4 * shape.h_kv * shape.d_h)


def test_h2o_pays_for_its_sums_and_clusterkv_for_its_clusters() -> None:
    shape = read_model("smollm2-135m")[0].shape
    for name in ("h2o", "clusterkv"):
        kind, params = method_of(name)
        found = count(kind, params, REQUEST, shape, 8192)
        assert (found.observe_flops > 0) == (name == "h2o")
        assert (found.build_flops > 0) == (name == "clusterkv")
    kind, params = method_of("h2o")
    once, twice = (count(kind, params, REQUEST, shape, s).observe_flops for s in (4096, 8192))
    assert twice == 4 * once


@pytest.mark.parametrize("name", sorted(path.stem for path in (CONF / "hardware").glob("*.yaml")))
def test_every_hardware_file_is_whole(name: str) -> None:
    found = read_hardware(name)
    assert 0 < found.flops <= found.matrix_tflops * 1e12
    assert 0 < found.bandwidth <= found.memory_gb_s * 1e9


METHODS = sorted(path.stem for path in (CONF / "method").glob("*.yaml"))
# Whose cost follows from what a prompt says, from a prefill of their own, or from where a layer stands.
REFUSED = {
    "pyramidinfer": "shortens its own prefill",
    "pyramidinfer_paper": "shortens its own prefill",
    "turboquant_vllm": "leaves first and last layers whole",
    **dict.fromkeys(("dms", "dms_kvzap", "dms_kvzap_kvpress", "simlayerkv_kvpress", "simlayerkv_paper"), "asks for"),
    **dict.fromkeys(("append_only", "append_only_random"), "asks for"),
}
BUDGETS = {
    "double_sparsity_paper": ("budget=512", "comm=1/16"),
    **dict.fromkeys(("append_only_budget", "random_decode", "triattention", "triattention_class"), ("budget=2200",)),
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of which there is a configuration and nothing else."""
    folder = tmp_path_factory.mktemp("models") / "small"
    folder.mkdir()
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 300, "hidden_size": 64,
        "intermediate_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 64, "max_position_embeddings": 8192, "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def budget_of(name: str) -> tuple[str, ...]:
    takes = own_class(known(name) or name).traits.takes
    return BUDGETS.get(name, ("ratio=1",) if takes == ("memory",) else ("budget=512",))


@pytest.mark.parametrize("budget", sorted({*map(budget_of, METHODS)}), ids=" ".join)
@pytest.mark.parametrize("preset", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["methods", "presets"])
def test_every_method_has_a_row_or_one_sentence_that_says_why_not(
    preset: bool, budget: tuple[str, ...], small: str
) -> None:
    """Some ended in a traceback: no second pass was run, no gate was there, no rotation, and nothing was cut."""
    names = [name for name in METHODS if budget_of(name) == budget and (known(name) != name) == preset]
    rows, left_out = answer(Question(["h100"], small, names, [2048], budget, 1))
    why = dict(line.split(": ", 1) for line in left_out)
    assert why.keys() == REFUSED.keys() & {*names} and len(rows) == len(names) - len(why)
    assert all(REFUSED[name] in sentence and "\n" not in sentence for name, sentence in why.items())


def rows_of(model: str, names: list[str], *budget: str, s: int = 2048) -> list[dict[str, Any]]:
    rows, left_out = answer(Question(["h100"], model, names, [s], budget, 1))
    assert not left_out
    return rows


def test_an_answer_is_counted_over_a_whole_cycle_of_cuts(small: str) -> None:
    """The first steps were counted, of which some schedules cut at none."""
    shape = read_model(small)[0].shape
    kind, params = method_of("h2o_decode_paper")
    request = BudgetRequest(None, 512, Fraction(0))
    assert count(kind, params, request, shape, 2048).attended_bytes == 513 * 4 * shape.h_kv * shape.d_h
    kind, params = method_of("rkv_kvpress_schedule")  # 512 steps lie between two cuts
    found = count(kind, params, request, shape, 2048).attended_bytes
    assert found == pytest.approx((512 + 513 / 2) * 4 * shape.h_kv * shape.d_h, rel=0.01)


def test_codes_are_read_as_they_lie(small: str) -> None:
    full, kivi = rows_of(small, ["full", "kivi_2bit"], "ratio=1", s=8192)
    assert 0.1 < kivi["attention_s"] / full["attention_s"] < 0.3


@pytest.mark.parametrize(
    ("name", "total", "met"),
    # As their makers say: in all, and of them at a token, the first embedding apart.
    [("llama-3.1-8b", 8.03e9, 7.5e9), ("gpt-oss-20b", 20.9e9, 3.6e9), ("qwen3-30b-a3b", 30.5e9, 3.0e9)],
)
def test_a_token_meets_the_weights_that_it_is_multiplied_with(name: str, total: float, met: float) -> None:
    """Experts were taken for one gated feed-forward of the width in the configuration."""
    model, layers = read_model(name)
    assert layers.n_weights == pytest.approx(total, rel=0.01)
    assert model.shape.n_layers * layers.layer_weights + layers.head_weights == pytest.approx(met, rel=0.02)


@pytest.mark.parametrize("name", ["opt-6.7b", "gemma-3-4b-it", "deepseek-v2-lite-chat", "qwen3-next-80b-a3b-instruct"])
def test_models_of_other_kinds_are_simulated(name: str) -> None:
    for row in rows_of(name, ["snapkv", "pqcache", "criticalkv"], "ratio=0.2"):
        assert row["fits"] is not (name == "qwen3-next-80b-a3b-instruct") and row["tpot_s"] > 0


def test_times_are_compared_with_full_attention_though_nobody_asks_for_it(small: str) -> None:
    full, among = rows_of(small, ["full", "snapkv"], "ratio=0.2", s=32768)
    (alone,) = rows_of(small, ["snapkv"], "ratio=0.2", s=32768)
    assert alone == among and full["tpot_to_full"] == 1 > among["tpot_to_full"]
    assert among["tpot_to_full"] == among["tpot_s"] / full["tpot_s"]


def test_the_command_says_that_it_simulates(capsys, small: str, tmp_path) -> None:
    words = ["--model", small, "--methods", "full,snapkv", "dms", "--lengths", "4096", "8k"]
    assert main([*words, "--on", "laptop", "rtx4090-pcie1", "--csv", str(tmp_path / "rows.csv")]) == 0
    out = capsys.readouterr().out
    assert "simulated, not measured" in out and "to Full" in out and "8,192" in out
    assert "dms: Delayed eviction keeps as much as a prompt asks for" in " ".join(out.split())
    lines = (tmp_path / "rows.csv").read_text().splitlines()
    assert len(lines) == 1 + 8 and lines[0].startswith("simulated,") and lines[1].startswith("True,")


def test_help_begins_with_commands(capsys) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    out = capsys.readouterr().out
    assert end.value.code == 0 and 2 <= out.count("    python -m kvbench.evals.studies.hardware --on")
    assert out.index("    python -m") < out.index("options:")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--on", "rtx"], "no --on 'rtx'"),
        (["--methods", "snapk"], "did you mean 'snapkv'"),
        (["--methods", "full", "snapk"], "did you mean 'snapkv'"),
        (["--model", "llama-3.1-8b-instuct"], "did you mean 'llama-3.1-8b-instruct'"),
        (["--model", "smollm2-135m,qwen3-8b"], "--model=smollm2-135m,qwen3-8b is several models"),
        (["--lengths", "100"], "lengths start at"),
        (["--lengths", "32q"], "--lengths=32q is no number of tokens"),
        (["--methods", "pyramidinfer", "--ratio", "0.9"], "shortens its own prefill"),
        (["--ratio", "x"], "ratio=x is not a number"),
        (["--ratio", "0.1", "--budget", "10"], "ratio=0.1 and budget=10 are both given"),
    ],
)
def test_a_wrong_word_is_one_sentence(words, message, capsys) -> None:
    assert main(["--model", "smollm2-135m", *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and message in said and said.count("\n") == 1
