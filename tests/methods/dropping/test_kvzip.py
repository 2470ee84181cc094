from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from kvbench.engine.budget import Frame
from kvbench.engine.causal import causal, whole
from kvbench.engine.checkpoints.load import shape_of
from kvbench.engine.decode import decode
from kvbench.engine.errors import ConfigError
from kvbench.engine.model import Model, register_attention
from kvbench.engine.passes.repetition import FIRST, NEXT, Repetition, largest_weights
from kvbench.engine.passes.second_pass import run_second_passes
from kvbench.engine.passes.trace import Trace
from kvbench.engine.prefill import prefill
from kvbench.engine.softmax import Softmax
from kvbench.evals.cells import Lookups, ask_one, cell_without_task
from kvbench.evals.settings import from_words
from kvbench.methods.allocator import Allocator
from kvbench.methods.base import SelectiveAttention, Variant
from kvbench.methods.dropping.allocators import Counts
from kvbench.methods.dropping.kvzip import KVzip, above_threshold
from kvbench.methods.full import full_attention
from kvbench.tests.tiny import prompt, tiny
from kvbench.tests.tiny_run import run, save_tiny, sweep
from kvbench.tests.tiny_tokenizer import tiny_tokenizer
from kvbench.tests.vectors import Check, built, differs, first, load, request

FIRST_IDS, NEXT_IDS = (7, 5, 9), (7, 8)
PARAMS = KVzip.Params(20, 8, False, FIRST_IDS, NEXT_IDS)
FRAME = Frame(5, 3, (11, 12))
GOLDEN = sorted((Path(__file__).parents[2] / "golden" / "kvzip").glob("*.npz"))


# --- reference vectors ---


def run_vectors(path: Path) -> list[Check]:
    """The second pass of the authors' code on a tiny model, and their selections from given scores."""
    meta, x = load(path)
    if path.stem.startswith("threshold_table"):
        return [(f"{path.stem} {i}", check_threshold(row, x, i)) for i, row in enumerate(x["config"])]
    kinds = {"e2e": check_end_to_end, "score": check_scores, "head": check_heads}
    return [(path.stem, kinds[path.stem.partition("_")[0]](meta, x))]


def check_threshold(config: np.ndarray, x: dict[str, np.ndarray], i: int) -> str | None:
    n_layers, heads, s, n_kept, n = config.tolist()
    scores, ratio = torch.from_numpy(x[f"score_{i}"]), x["ratio_f64"][i]
    kept = above_threshold(scores, n)
    alike = np.full((n_layers, heads), min(s, int(s * ratio)))
    return first(
        differs("kept", kept, x[f"valid_{i}"]),
        differs("their number", int(kept.sum()), n_kept),
        differs("counts of heads alike", alike, x[f"count_uniform_{i}"]),
    )


def check_heads(meta: dict[str, Any], x: dict[str, np.ndarray]) -> str | None:
    spread = torch.from_numpy(x["head_score"]).unsqueeze(-1).expand(-1, -1, meta["S"])
    return first(
        *(
            differs(f"heads at {ratio}", above_threshold(spread, int(spread.numel() * ratio)).any(-1),
                    x[f"full_head_{ratio}"])
            for ratio in meta["ratios"]
        )
    )  # fmt: skip


def check_scores(meta: dict[str, Any], x: dict[str, np.ndarray]) -> str | None:
    q, k = torch.from_numpy(x["q"]), torch.from_numpy(x["k"])
    near = torch.cat([k[:, :, : meta["sink"]], k[:, :, meta["start"] : meta["end"]]], 2)
    own, scale = k[:, :, meta["cached"] :], Softmax(meta["d"] ** -0.5)
    _, lse = zip(causal(q, own, own, scale), whole(q, near, near, scale), strict=True)
    scores = largest_weights(q, near[:, :, meta["sink"] :], scale, torch.stack(lse).logsumexp(0))
    return differs("scores", scores, x["score"], 1e-5)


class Given(KVzip):
    """Its counts are given."""

    given: Sequence[Counts]

    def counts(self) -> Sequence[Counts]:
        return self.given


class Hidden:
    """Notes what comes out behind the last layer."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def attended(self, layer: int, order: Sequence[int], q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Nothing is noted of layers."""

    def predicted(self, order: Sequence[int], logits: Tensor) -> None:
        self.seen.append(logits[torch.tensor(order).argsort()].clone())


def check_end_to_end(meta: dict[str, Any], x: dict[str, np.ndarray]) -> str | None:
    model = vector_model(meta, x)
    sys_ids, ctx_ids, postfix, request_first, request_next, query = (
        tuple(x[name].tolist())
        for name in ("sys_ids", "ctx_ids", "postfix_ids", "repeat_prompt_first", "repeat_prompt_next", "query_ids")
    )
    frame, ids = Frame(len(sys_ids), 0, postfix), (*sys_ids, *ctx_ids)
    params = KVzip.Params(meta["chunk"], meta["prev_postfix"], True, request_first, request_next)
    variant = Given.variant_for(params, request(tokens=len(ids) - 1), model.shape, len(ids), frame=frame)
    with model.hooked():
        trace = prefill(model, ids)
    (what,) = variant.second_passes
    run_second_passes(model, trace, [what])
    scores = torch.stack([trace.of_second_pass(what, layer)[0] for layer in range(meta["layers"])])
    fed = [each.ids for each in what.passes(model, ids)]
    theirs = [tuple(x[f"repeat_ids_{i}"].tolist()) for i in range(len(fed))]
    masks = {ratio: above_threshold(scores, int(scores.numel() * ratio)) for ratio in meta["ratios"]}
    row, full = variant.row(trace, 8), full_attention(model.shape, len(ids)).row(trace, 8)
    row.given = masks[meta["hidden_pruned_ratio"]].sum(-1).tolist()  # type: ignore[attr-defined]
    hidden = Hidden()
    with model.hooked():
        decode(model, trace, [built(row), built(full)], max_new_tokens=0, feed=query, watch=hidden)
    pruned, whole_cache = torch.stack(hidden.seen, 1)
    return first(
        None if fed == theirs and f"repeat_ids_{len(fed)}" not in x else f"fed {fed}, expected {theirs}",
        differs("scores", scores, x["score"], 1e-5),
        *(differs(f"kept at {ratio}", mask, x[f"valid_{ratio}"]) for ratio, mask in masks.items()),
        *(differs(f"kept at {ratio} by heads alike", alike(scores, ratio), x[f"valid_uniform_{ratio}"])
          for ratio in masks),
        differs("hidden states, full", whole_cache, x["hidden_full"], 1e-4),
        differs("hidden states, pruned", pruned, x["hidden_pruned"], 1e-4),
    )  # fmt: skip


def alike(scores: Tensor, ratio: float) -> Tensor:
    best = scores.topk(int(scores.shape[-1] * ratio), dim=-1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True)


def vector_model(meta: dict[str, Any], x: dict[str, np.ndarray]) -> Model:
    """The vectors' Llama; in place of logits it gives hidden states."""
    config = transformers.LlamaConfig(
        vocab_size=meta["vocab"], hidden_size=meta["hidden"], intermediate_size=meta["intermediate"],
        num_hidden_layers=meta["layers"], num_attention_heads=meta["H"], num_key_value_heads=meta["Hk"],
        head_dim=meta["head_dim"], rms_norm_eps=meta["rms_eps"], hidden_act=meta["hidden_act"],
        max_position_embeddings=512, rope_parameters={"rope_type": "default", "rope_theta": meta["rope_theta"]},
    )  # fmt: skip
    hf: Any = transformers.LlamaForCausalLM(config).eval()
    hf.lm_head = torch.nn.Identity()
    hf.model.load_state_dict({name[2:]: torch.from_numpy(x[name]) for name in x if name.startswith("w.")})
    register_attention()
    return Model(hf, None, shape_of(config, "vectors"), torch.float32, torch.device("cpu"), "v")


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_kvzip_agrees_with_reference_vectors(path: Path) -> None:
    assert {problem for _, problem in run_vectors(path)} == {None}


# --- the method ---


def zipped(
    tokens: int, trace: Trace, params: KVzip.Params = PARAMS, frame: Frame = FRAME,
    allocator: Allocator | None = None,
) -> KVzip:  # fmt: skip
    """One variant on the tiny model's prompt."""
    model = tiny()
    variant = KVzip.variant_for(params, request(tokens=tokens), model.shape, trace.s_prompt, None, allocator, frame)
    run_second_passes(model, trace, variant.second_passes)
    return built(variant.row(trace, 8))


def read(s: int = 60) -> Trace:
    model = tiny()
    with model.hooked():
        return prefill(model, prompt(s))


def kept_of(row: KVzip) -> Tensor:
    """(layers, h_kv, s) bool."""
    return torch.stack([row.store[layer].attended()[:: row.trace.shape.g] for layer in range(3)])


@pytest.mark.parametrize("tokens", [9, 20, 40, 59])
def test_heads_and_layers_share_exactly_the_budget_and_all_keep_the_frame(tokens: int) -> None:
    row = zipped(tokens, read())
    kept = kept_of(row)
    assert int(kept.sum()) == 3 * 2 * tokens
    assert kept[..., :5].all() and kept[..., -3:].all()
    (what,) = row.variant.second_passes
    scores = torch.stack([row.trace.of_second_pass(what, layer)[0] for layer in range(3)])
    chosen = kept[..., 5:-3]
    assert scores.shape == chosen.shape
    assert scores[chosen].min() >= scores[~chosen].max()
    report = row.report()
    assert sum(report["kept_layers"]) == pytest.approx(3 * tokens)


def test_the_published_threshold_keeps_at_least_one_fewer() -> None:
    trace = read()
    ours, theirs = (kept_of(zipped(30, trace, replace(PARAMS, match_published=flag))) for flag in (False, True))
    assert int(theirs.sum()) == int(ours.sum()) - 1
    assert (ours | ~theirs).all()


def test_one_order_keeps_the_most_score_then_one_in_each_head() -> None:
    trace = read()
    sums = []
    for allocator in (None, Allocator("head_mix", alpha=0), Allocator("uniform")):  # type: ignore[arg-type]
        row = zipped(25, trace, allocator=allocator)
        (what,) = row.variant.second_passes
        scores = torch.stack([trace.of_second_pass(what, layer)[0] for layer in range(3)])
        assert int(kept_of(row).sum()) == 6 * 25
        sums.append(float(scores[kept_of(row)[..., 5:-3]].sum()))
    assert sums[0] >= sums[1] >= sums[2]


def test_variants_share_the_second_pass_and_the_whole_budget_takes_none() -> None:
    trace = read()
    for tokens in (20, 30):
        zipped(tokens, trace)
    assert len(trace.second_passes) == 1
    full = KVzip.variant_for(PARAMS, request(tokens=60), tiny().shape, 60)
    assert full.is_full and full.second_passes == ()


def test_two_questions_are_answered_from_one_compressed_context() -> None:
    """A row is built for each from one trace; the answer to the second is that of a context read anew."""
    trace, answers = read(), []
    for fresh in (False, True):
        for question in ([3, 4, 5], [6, 7]):
            row = cast(SelectiveAttention, zipped(30, read() if fresh else trace))
            with tiny().hooked():
                done = decode(tiny(), row.trace, [row], max_new_tokens=6, feed=question)
            answers.append(done.answers[0].ids)
    assert answers[:2] == answers[2:]


# --- refusals ---


def variant(s: int = 60, tokens: int = 20, params: KVzip.Params = PARAMS, frame: Frame = FRAME) -> Variant:
    return KVzip.variant_for(params, request(tokens=tokens), tiny().shape, s, frame=frame)


def test_a_budget_within_the_template_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"budget of 8 tokens .* nothing beside the 8 tokens of its template"):
        variant(tokens=8)
    assert variant(tokens=9).plan.n_free == 1


def test_a_repetition_beyond_the_models_window_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"up to 51\d positions, more than the 512"):
        variant(s=484)
    assert variant(s=479)


@pytest.mark.parametrize("kind", ["mistral-sliding", "gemma3"])
def test_layers_of_another_kind_are_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match="are no full attention"):
        KVzip.check(PARAMS, request(tokens=20), tiny(kind).shape)


def test_states_beside_attention_are_refused() -> None:
    shape = tiny().shape
    with pytest.raises(ConfigError, match=r"3 of 3 layers .* a state beside it"):
        KVzip.check(PARAMS, request(tokens=20), replace(shape, hybrid_layers=shape.attention_layers))


def test_a_model_without_a_tokenizer_is_refused_unless_ids_are_given() -> None:
    trace = read()
    with pytest.raises(ConfigError, match=r"no tokenizer.*first_ids"):
        zipped(20, trace, replace(PARAMS, first_ids=None, next_ids=None))


def test_a_request_has_both_forms() -> None:
    with pytest.raises(ConfigError, match=r"both or neither"):
        replace(PARAMS, first_ids=None)


# --- runs ---


TASK = ["task=needle", "task.source=embedded", "task.lengths=[300]", "task.depths=[50]", "limit=1", "ratio=0.3"]


def test_the_time_of_the_second_pass_stands_beside_the_prefills(tmp_path: Path) -> None:
    words = ["model=any", f"model.id={save_tiny(tmp_path / 'tiny')}", "model.name=tiny", *TASK]
    variants = [[f"method={name}"] for name in ("snapkv", "kvzip")]
    variants = [[*v, "method.chunk=100"] if "kvzip" in v[0] else v for v in variants]
    (snap, snap_rows), (own, rows) = sweep([*words, "compression_scope=context_only"], variants, tmp_path / "runs")
    assert own.probe_s == rows[0].fields["probe_s"] > 0 and own.within_budget
    assert snap.probe_s is None and "probe_s" not in snap_rows[0].fields
    assert own.method_label == "KVzip (C)"
    whole_prompt, _ = run([*words, "method=kvzip", "method.chunk=100"], tmp_path / "whole")
    assert whole_prompt.method_label == "KVzip (C), whole prompt"


@pytest.mark.parametrize(("mode", "label"), [("independent", "KVzip (C)"), ("dialogue", "KVzip (C), whole prompt")])
def test_a_context_that_is_compressed_before_its_questions_is_no_whole_prompt(mode: str, label: str) -> None:
    words = ["method=kvzip", "ratio=0.3", "task=shared_context", "task.source=embedded", f"task.mode={mode}"]
    asked = ask_one(from_words(words), Lookups())
    assert replace(cell_without_task(asked.settings), task=asked.task).label == label


def test_the_second_pass_is_part_of_the_time_to_the_second_token(tmp_path: Path) -> None:
    words = ["model=any", f"model.id={save_tiny(tmp_path / 'tiny')}", "model.name=tiny", "ratio=0.3", "method=kvzip"]
    task = ["task=latency", "task.lengths=[200]", "task.n_new=3", "task.repeats=1", "task.warmup=0", "method.chunk=100"]
    result, rows = run([*words, *task], tmp_path / "run")
    timing = rows[0].fields["timing"]
    assert result.probe_s is not None and 0 < result.probe_s < timing["ttft_s"] < timing["tt2t_s"]


# --- the repetition ---


def test_requests_are_the_words_of_the_authors_code() -> None:
    model = replace(tiny(), tokenizer=tiny_tokenizer(None, adds_bos=True))
    tokenizer = model.tokenizer
    what = Repetition(20, 8, Frame(2, 1, (91, 92)))
    ids = list(range(100, 153))
    passes = what.passes(model, ids)
    assert [each.near for each in passes] == [
        (range(2), range(2, 22)), (range(2), range(22, 42)), (range(2), range(42, 52)),
    ]  # fmt: skip
    requests = [tokenizer.encode(text, add_special_tokens=False) for text in (FIRST, NEXT)]
    assert tokenizer.decode(requests[1]).endswith("starting with ")
    assert passes[0].ids == (*requests[0], 91, 92, *ids[2:22])
    assert passes[2].ids == (*requests[1], *ids[34:42], 91, 92, *ids[42:52])
