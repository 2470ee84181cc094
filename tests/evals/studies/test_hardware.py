from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from engine.budget import BudgetRequest
from evals.overrides import CONF
from evals.studies.hardware import (
    COUNT_AT,
    FULL_REQUEST,
    N_STEPS,
    Counts,
    Hardware,
    Layers,
    Numbers,
    count,
    main,
    method_of,
    predict,
    read_hardware,
    read_model,
)

# Round figures: 10^12 operations and 10^9 bytes a second, no prices but those a test adds.
PLAIN = Hardware("plain", 1, 1, 1000, 1, 0.5, 1, 1, 1, 0, 0, 0, 0)
LAYERS = Layers(2, 4, 8, 500_000, 1_000_000, 64)
NOTHING = Counts(0, 0, 0, 0, 0, 0, 0, 0)
REQUEST = BudgetRequest(Fraction(1, 5), None, Fraction(1, 64))


def test_a_step_without_attention_reads_all_weights_once() -> None:
    found = predict(NOTHING, LAYERS, PLAIN, 16)
    assert found.tpot_s == pytest.approx(LAYERS.weight_bytes / 1e9)
    # Weights are read once for the whole batch, K and V once per request.
    counts = replace(NOTHING, attended_bytes=1e6)
    assert predict(counts, LAYERS, PLAIN, 16, 3).tpot_s == pytest.approx(LAYERS.weight_bytes / 1e9 + 2 * 3 * 1e6 / 1e9)


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
    shape, _ = read_model("smollm2-135m")
    per_token = {}
    for name in ("full", "snapkv", "quest", "sparq", "oracle"):
        kind, params = method_of(name)
        low, high = (count(kind, params, FULL_REQUEST if name == "full" else REQUEST, shape, s) for s in COUNT_AT)
        per_token[name] = (high.searched_numbers - low.searched_numbers) / (COUNT_AT[1] - COUNT_AT[0])
        assert (low.searched_numbers > 0) == (low.searched_bytes > 0)
    assert per_token["full"] == per_token["snapkv"] == 0
    # SPARQ and the oracle score every token for each query head or more, Quest two corners of 128 tokens' page.
    assert per_token["sparq"] > shape.h and per_token["oracle"] > shape.h > 3 * per_token["quest"] > 0
    numbers = Numbers()
    with numbers:
        scores = torch.arange(12).view(3, 4)[:, :2] + 1
        scores.topk(1)
    assert numbers.n == 12 + 6 + 2 * 3


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
    shape, _ = read_model("smollm2-135m")
    kind, params = method_of(name)
    request = FULL_REQUEST if name == "full" else REQUEST
    far = count(kind, params, request, shape, 3072)
    for field in ("attended_bytes", "searched_bytes", "resident_bytes"):
        low, high = (getattr(count(kind, params, request, shape, s), field) for s in COUNT_AT)
        assert getattr(far, field) == pytest.approx((low + high) / 2)
    share = 1 if name == "full" else 0.2
    # A dropping method gets what 1/64 of the keys' bytes would have moved as tokens: 1/128 of the prompt.
    share += 1 / 128 if name == "snapkv" else 0
    whole_pages = 0.1 if name == "quest" else 0.01
    assert far.attended_bytes == pytest.approx(share * 3072 * shape.h_kv * 4 * shape.d_h, rel=whole_pages)
    assert (far.moved_kv_bytes > 0) == (name == "quest") == (far.offloaded_bytes > 0)


def test_a_budget_of_more_tokens_than_the_short_lengths_have_is_no_full_attention() -> None:
    """Counts were those of full attention at any length, where both short ones had no more tokens than the budget."""
    shape, _ = read_model("smollm2-135m")
    kind, params = method_of("snapkv")
    found = count(kind, params, BudgetRequest(None, 4096, Fraction(0)), shape, 65536)
    assert found.attended_bytes == pytest.approx((4096 + N_STEPS) * 4 * shape.h_kv * shape.d_h)


def test_h2o_pays_for_its_sums_and_clusterkv_for_its_clusters() -> None:
    shape, _ = read_model("smollm2-135m")
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


def test_the_command_says_that_it_simulates(capsys, tmp_path) -> None:
    words = ["--model", "smollm2-135m", "--methods", "full", "snapkv", "--lengths", "4096", "8192"]
    assert main([*words, "--on", "laptop", "rtx4090-pcie1", "--csv", str(tmp_path / "rows.csv")]) == 0
    assert "simulated, not measured" in capsys.readouterr().out
    lines = (tmp_path / "rows.csv").read_text().splitlines()
    assert len(lines) == 1 + 8 and lines[0].startswith("simulated,") and lines[1].startswith("True,")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--on", "rtx"], "no --on 'rtx'"),
        (["--methods", "snapk"], "did you mean 'snapkv'"),
        (["--model", "llama"], "no --model 'llama'"),
        (["--lengths", "100"], "lengths start at"),
        (["--methods", "pyramidinfer", "--ratio", "0.9"], "shortens its own prefill"),
        (["--ratio", "x"], "--ratio=x is not a number"),
    ],
)
def test_a_wrong_word_is_one_sentence(words, message, capsys) -> None:
    assert main(["--model", "smollm2-135m", *words]) == 2
    assert message in capsys.readouterr().err
