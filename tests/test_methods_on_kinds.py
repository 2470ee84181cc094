"""Every method on models with layers of other kinds beside full attention: an answer or a sentence, never a traceback.

Where a method keeps the whole prompt, its tokens are those of full attention.
"""

from dataclasses import replace
from fractions import Fraction
from functools import cache

import numpy as np
import pytest
import torch

from kvbench.benchmarks.launches import BUDGETS
from kvbench.engine.budget import BudgetRequest
from kvbench.engine.decode import decode
from kvbench.engine.errors import ConfigError
from kvbench.engine.model import Model
from kvbench.engine.passes.second_pass import run_second_passes
from kvbench.engine.prefill import prefill
from kvbench.evals.cells import cell_without_task, check, rules_and_params
from kvbench.evals.settings import from_words
from kvbench.methods import combinations
from kvbench.methods.calibration.known import calibrate
from kvbench.methods.combinations import MODEL, SHAPE, Case, refuse
from kvbench.methods.reuse import Sharing
from kvbench.tests import conformance
from kvbench.tests.architectures import config_of, generated, loaded, model_of, prompt

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' words about sizes of toys
S, N_NEW = 75, 6
QUICK = ("llama4_text", "deepseek_v3")  # chunks beside full layers, those without positions; latents
KINDS = [
    *QUICK,
    *(
        pytest.param(kind, marks=pytest.mark.slow)
        for kind in (
            *("qwen3_next", "falcon_h1", "smollm3", "gpt2", "mimo_v2_flash", "gpt_oss", "gemma2", "gemma3n_text"),
            *("jetmoe", "minimax"),
        )
    ),
]


@cache
def model(kind: str) -> Model:
    config = config_of(kind)
    return loaded(config, model_of(config, 1), kind)


def answer(
    one: conformance.Subject, request: BudgetRequest, kind: str, sharing: Sharing | None = None
) -> tuple[list[int], bool]:
    """A method's tokens, and whether it is full attention at this budget; `ConfigError` where it refuses either."""
    by = model(kind)
    one.kind.check(one.params, request, by.shape)
    one.kind.check_model(one.params, by.checkpoint)
    made = one.kind.variant_for(one.params, request, by.shape, S, allocator=one.allocator)
    made = made if sharing is None else replace(made, reuse=sharing.on(by.shape))
    kept = Case(one.kind, one.params, shape=by.shape, checkpoint=by.checkpoint, post_processing=made.post_processing)
    refuse(combinations.KEPT, kept, MODEL)
    with by.hooked():
        trace = prefill(by, prompt(S), made.observations, pruning=made.pruning)
    run_second_passes(by, trace, made.second_passes)
    with torch.inference_mode():
        rows = [made.row(trace, N_NEW) for _ in range(2)]
        for row in rows:
            for layer in trace.shape.attention_layers:
                row.build(layer)
            row.complete()
    with by.hooked():
        first, second = decode(by, trace, rows, max_new_tokens=N_NEW).answers
    assert first.ids == second.ids, "two rows of one variant"
    return first.ids, made.is_full


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", BUDGETS)
def test_a_method_answers_or_refuses(name: str, kind: str) -> None:
    one = conformance.ours(name)
    for ratio in (Fraction(1), Fraction(1, 2)):
        tokens = int((S + N_NEW) * ratio) if one.kind.traits.of_answers else None
        request = BudgetRequest(None if tokens else ratio, tokens, Fraction(0 if tokens else one.comm))
        if tokens:
            request = replace(request, counts=one.counts)
        try:
            said, is_full = answer(one, request, kind)
        except ConfigError as error:
            assert "\n" not in str(error) and len(str(error)) < 500
            continue
        if is_full:
            assert said == generated(model(kind).hf, prompt(S), N_NEW)


@pytest.mark.parametrize(
    ("words", "refuses"),
    [
        (["method=streamingllm", "method.position=cache"], True),
        (["method=infllm", "method.position=fixed"], True),
        (["method=turboquant"], True),
        (["method=streamingllm"], False),
        (["method=infllm"], False),
        (["method=quest"], False),
    ],
)
def test_what_turns_queries_is_refused_where_other_layers_read_the_tokens_too(words: list[str], refuses: bool) -> None:
    """Before a folder is made, and not at the first step."""
    rules, params = rules_and_params(from_words([*words, "ratio=0.5"]).method)
    shape = model("llama").shape
    refuse(combinations.KINDS, Case(rules, params, shape=shape))
    shared = replace(shape, attention_layers=shape.attention_layers[:-1], readers=((shape.n_layers - 1, 0),))
    if not refuses:
        return refuse(combinations.KINDS, Case(rules, params, shape=shared))
    with pytest.raises(ConfigError, match="attend to these with queries of their own"):
        refuse(combinations.KINDS, Case(rules, params, shape=shared))


def test_heads_that_share_a_latent_have_no_budgets_of_their_own() -> None:
    heads, layers = (
        cell_without_task(from_words(["method=snapkv", f"allocator={name}"])) for name in ("head_mix", "pyramid")
    )
    check(replace(heads, shape=model("llama").shape), SHAPE)
    with pytest.raises(ConfigError, match="one latent per token for all heads"):
        check(replace(heads, shape=model("deepseek_v3").shape), SHAPE)
    check(replace(layers, shape=model("deepseek_v3").shape), SHAPE)


def test_the_share_of_bytes_that_methods_compress_counts_windows_and_states() -> None:
    shape = model("gpt_oss").shape  # two layers of four, the others see 20 tokens; 2 heads of 8 numbers
    assert shape.left_bytes(S) == 2 * 2 * 20 * 2 * 16
    assert shape.compressed_share(S) == pytest.approx(S / (S + 20))
    states = model("qwen3_next").shape
    assert states.left_bytes(S) == states.left_bytes(2 * S) == states.state_bytes > 0
    assert states.compressed_share(10) < states.compressed_share(1000) < 1
    assert model("llama").shape.compressed_share(S) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_layers_take_over_what_the_last_one_of_their_kind_chose(kind: str) -> None:
    """Layers that no method compresses are skipped, and those that read another one's K and V attend as it does."""
    shape = model(kind).shape
    half = BudgetRequest(Fraction(1, 2), None, Fraction(1, 8))
    for name, settings in (("oracle", []), ("quest", ["method.full_layers=0", "method.agg=group_max"])):
        one = conformance.ours(name, *settings)
        usual, _ = answer(one, half, kind)
        assert answer(one, half, kind, Sharing("every", every=1))[0] == usual
        for attends in ("chosen", "all"):
            sharing = Sharing("every", every=len(shape.attention_layers), anchor_attends=attends)
            assert len(sharing.on(shape).behind) == len(shape.attention_layers) - 1
            assert len(answer(one, half, kind, sharing)[0]) == N_NEW


@pytest.mark.parametrize("kind", KINDS)
def test_layers_are_compared_or_a_sentence_says_why_not(kind: str) -> None:
    """Whatever a model's layers are, one serves itself best."""
    by = model(kind)
    try:
        with by.hooked():
            found = calibrate(by, "reuse", prompt(S), "drawn")
    except ConfigError as error:
        assert "use reuse=every or reuse=given" in str(error) and kind == "gemma3n_text"
        return
    itself = [found.arrays["sim"][at, at].diagonal() for at in range(len(by.shape.attention_layers))]
    assert np.allclose(itself, 1) and (found.arrays["importance"] > 0).all()
