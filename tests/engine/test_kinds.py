"""Every kind of layer is answered as transformers answers it, or refused in a sentence before weights are read."""

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from kvbench.engine.attend import attend_own, attend_own_past
from kvbench.engine.batch import Batch
from kvbench.engine.caches.forks import fork, select_rows
from kvbench.engine.causal import Chunk, causal
from kvbench.engine.checkpoints import kinds, load
from kvbench.engine.checkpoints.kinds import shape_of, survey
from kvbench.engine.declared import build
from kvbench.engine.errors import ConfigError, LengthError
from kvbench.engine.model import register_attention
from kvbench.engine.passes import agreement
from kvbench.engine.passes.agreement import check_attention
from kvbench.engine.passes.rotations import unmoved
from kvbench.engine.prefill import prefill
from kvbench.engine.softmax import Softmax
from kvbench.evals.settings import ModelSpec
from kvbench.methods.dropping.streamingllm import StreamingLLM
from kvbench.methods.full import Full
from kvbench.tests.architectures import (
    CHUNK,
    N_SINK,
    SINCE,
    answers,
    config_of,
    generated,
    is_too_new,
    loaded,
    look,
    model_of,
    prompt,
    text_types,
)
from kvbench.tests.tiny import tiny
from kvbench.tests.tiny_run import save_tiny

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' words about sizes of toys
EXACT = (
    *("cohere2", "deepseek_v3", "exaone4", "falcon_h1", "gemma2", "gemma3n_text", "gemma4_text", "gpt2", "gpt_bigcode"),
    *("gpt_oss", "granitemoehybrid", "hunyuan_v1_dense", "jetmoe", "minimax"),
    *("deepseek_v32", "deepseek_v4", "hy_v4", "minimax_m3_vl_text", "qwen4_exp_text"),
    *("lfm2", "llama4_text", "modernbert-decoder", "nemotron", "nemotron_h", "phi", "qwen3_5_text", "qwen3_next"),
    *("smollm3", "stablelm", "zamba2"),
)
TOO_NEW = [*filter(is_too_new, SINCE)]
EXACT_HERE = [name for name in EXACT if name not in TOO_NEW]
REFUSED = {
    "bert": "answers differently",
    "bloom": "code of its own",
    "diffllama": "attends 2 times in layer 0",
    "doge": "hides tokens by a mask",
    "hrm_text": "attends 8 times in layer 0",
    "inkling_text": "layers of the kind 'hybrid_sliding'",
    "mamba": "no layer that methods compress",
    "mpt": "code of its own",
}


@pytest.mark.parametrize("name", EXACT_HERE)
def test_this_architecture_answers_as_transformers_does(name: str) -> None:
    found = look(name)
    assert found.word == "exact", found


@pytest.mark.parametrize("name", [*REFUSED, *TOO_NEW])
def test_this_architecture_is_refused_in_one_sentence(name: str) -> None:
    found = look(name)
    assert found.word == "refused", found
    assert REFUSED.get(name, f"the model '{name}'") in found.says
    assert "\n" not in found.says and len(found.says) < 500


@pytest.mark.slow
@pytest.mark.parametrize("name", text_types())
def test_no_architecture_of_transformers_is_wrong_or_ends_in_a_traceback(name: str) -> None:
    found = look(name)
    if found.word == "not built":
        pytest.skip(f"the common values make no model of it: {found.says}")
    assert found.word in ("exact", "refused"), found


# --- chunks ---


@pytest.fixture(scope="module")
def chunked() -> tuple[Any, Any]:
    config = config_of("llama4_text")
    hf = model_of(config, 1)
    return hf, loaded(config, hf, "chunked")


@pytest.mark.parametrize("n", [CHUNK - 4, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK - 1, 2 * CHUNK, 2 * CHUNK + 1])
def test_answers_around_the_end_of_a_chunk_are_those_of_transformers(chunked: tuple[Any, Any], n: int) -> None:
    hf, model = chunked
    want = generated(hf, prompt(n))
    assert answers(model, prompt(n), [Full]) == [want]
    assert answers(model, prompt(n), [Full] * 3) == [want] * 3


@pytest.mark.parametrize("n", [CHUNK - 4, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK - 1, 2 * CHUNK, 2 * CHUNK + 1])
def test_dropped_tokens_are_missing_in_full_layers_and_still_seen_within_a_chunk(
    chunked: tuple[Any, Any], n: int
) -> None:
    """Transformers' own layers behind two masks, and no cache whose length could tell the layers apart wrongly."""
    hf, model = chunked
    ids, n_kept = prompt(n), n // 3
    for _ in range(6):
        query, key = torch.arange(len(ids)).unsqueeze(1), torch.arange(len(ids))
        gone = (query >= n) & (key >= N_SINK) & (key < n - n_kept + N_SINK)
        seen = {"full_attention": (key <= query) & ~gone, "chunked_attention": in_chunk(query[:, 0], key, CHUNK)}
        masks = {kind: torch.zeros(see.shape).masked_fill(~see, -1e30)[None, None] for kind, see in seen.items()}
        with torch.inference_mode():
            logits = hf(input_ids=torch.tensor([ids]), attention_mask=masks, use_cache=False).logits
        ids = [*ids, int(logits[0, -1].argmax())]
    assert answers(model, ids[:n], [StreamingLLM] * 3, 6, Fraction(1, 3)) == [ids[n:]] * 3


@pytest.mark.parametrize("n_feed", [2, 7, CHUNK + 3])
def test_a_feed_that_crosses_a_chunk_is_read_as_transformers_reads_it(chunked: tuple[Any, Any], n_feed: int) -> None:
    hf, model = chunked
    ids = prompt(2 * CHUNK - 3 + n_feed)
    with torch.inference_mode():
        want = hf(input_ids=torch.tensor([ids])).logits[0, -1]
    with model.hooked():
        trace = prefill(model, ids[:-n_feed])
        request = agreement_request()
        row = Full.variant_for(Full.Params(), request, model.shape, len(ids) - n_feed).row(trace, n_feed + 1)
        for layer in trace.shape.attention_layers:
            row.build(layer)
        row.complete()
        found = Batch(model, trace, [row]).read([ids[-n_feed:]])
    torch.testing.assert_close(found[0], want, atol=1e-4, rtol=1e-4)


def agreement_request() -> Any:
    from kvbench.engine.budget import BudgetRequest

    return BudgetRequest(Fraction(1), None, Fraction(1, 2), False)


def masked(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=0.3)


def in_chunk(queries: Tensor, keys: Tensor, n: int) -> Tensor:
    """The plain formula: causal, and of one chunk."""
    q, k = queries.unsqueeze(1), keys
    return (k <= q) & (k // n == q // n)


@pytest.mark.parametrize("n", [1, 5, 8])
@pytest.mark.parametrize("s", [1, 4, 5, 6, 8, 9, 16, 23])
def test_attention_within_chunks_is_the_plain_formula(n: int, s: int) -> None:
    draw = torch.Generator().manual_seed(s)
    q, k, v = (torch.randn(1, h, s, 16, generator=draw) for h in (4, 2, 2))
    places = torch.arange(s)
    whole = masked(q, k, v, in_chunk(places, places, n))
    torch.testing.assert_close(causal(q, k, v, Softmax(0.3), Chunk(n))[0], whole, atol=1e-5, rtol=1e-5)
    held = slice(max(0, s - n), s)  # a cache layer of a chunk's length hands out so many
    one = attend_own(q[:, :, -1:], k[:, :, held], v[:, :, held], Softmax(0.3), Chunk(n), s - 1)
    torch.testing.assert_close(one, whole[:, :, -1:], atol=1e-5, rtol=1e-5)
    m = min(3, s)
    held = slice(max(0, s - m - n + 1), s)
    some = attend_own_past(q[:, :, -m:], k[:, :, held], v[:, :, held], Softmax(0.3), Chunk(n), s - m)
    torch.testing.assert_close(some, whole[:, :, -m:], atol=1e-5, rtol=1e-5)


# --- states ---


@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1", "lfm2", "minimax", "jetmoe"])
def test_rows_that_part_each_keep_their_own_state(name: str) -> None:
    """Rows forked from one prompt read tokens of their own; those that stay go on as if they had been alone."""
    config = config_of(name)
    hf = model_of(config, 1)
    model, ids = loaded(config, hf, name), prompt(30)
    session = agreement.Short(model)
    first, second = torch.tensor([[5], [6], [7]]), torch.tensor([[8], [9]])
    with model.hooked():
        cache = model.new_cache()
        model.forward(torch.tensor([ids]), 0, cache, session)
        rows, session.position = fork(cache, 3), 30
        model.forward(first, 30, rows, session)
        select_rows(rows, [2, 0])
        session.position = 31
        session.held = {layer: (k[[2, 0]], v[[2, 0]]) for layer, (k, v) in session.held.items() if len(k) == 3}
        found = model.forward(second, 31, rows, session)
    with torch.inference_mode():
        for row, tokens in enumerate(([7, 8], [5, 9])):
            want = hf(input_ids=torch.tensor([[*ids, *tokens]])).logits[0, -1]
            torch.testing.assert_close(found[row], want, atol=1e-4, rtol=1e-4)


def test_a_cache_that_we_cannot_make_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "own_cache", lambda *_: None)
    config = config_of("minimax")
    config.eos_token_id = 87  # that nobody asked about before
    with pytest.raises(ConfigError, match="only takes a cache of its own kind"):
        shape_of(config, "minimax")


def test_a_layer_that_repeats_its_kv_heads_counts_those_that_it_caches() -> None:
    """JetMoE's attention is called with the KV heads of every expert, which are the same."""
    config = config_of("jetmoe")
    shape = shape_of(config, "jetmoe")
    assert (shape.h, shape.h_kv) == (config.num_attention_heads, config.num_key_value_heads) == (4, 2)


# --- rotations ---


@pytest.mark.parametrize(
    "name", ["phi", "glm", "gemma3_text", "gemma4_text", "qwen3", "stablelm", "olmo3", "falcon_h1"]
)
def test_turning_queries_is_turning_keys_the_other_way(name: str) -> None:
    config = config_of(name)
    model = loaded(config, model_of(config, 1), name)
    assert model.turn is not None
    draw = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 2, 3, model.shape.d_h, generator=draw)
    for layer in model.shape.attention_layers:
        turn = model.turn[layer]
        assert turn is not unmoved
        torch.testing.assert_close(turn(q, -5) @ k.mT, q @ turn(k, 5).mT, atol=1e-4, rtol=1e-4)
        assert (turn(q, 9) - q).abs().max() > 0.1


def test_layers_without_positions_are_not_turned() -> None:
    config = config_of("smollm3")
    turns = loaded(config, model_of(config, 1), "smollm3").turn
    assert turns is not None
    assert [turns[layer] is unmoved for layer in range(4)] == [False, False, False, True]
    config = config_of("cohere2")  # whose full layers have none, and whose others do
    assert {*(loaded(config, model_of(config, 1), "cohere2").turn or {}).values()} == {unmoved}


@pytest.mark.parametrize("name", ["opt", "gpt2", "nemotron_h", "hunyuan_v1_dense"])
def test_positions_that_are_no_known_rotation_turn_nothing(name: str) -> None:
    """Learned ones, none at all, and a rotation with a norm behind it."""
    config = config_of(name)
    assert loaded(config, model_of(config, 1), name).turn is None


def test_tables_that_grow_with_the_text_are_no_known_rotation() -> None:
    config = transformers.AutoConfig.for_model(
        "llama", hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=89,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    )  # fmt: skip
    assert loaded(config, model_of(config, 1), "dynamic").turn is None


def test_tables_that_one_text_made_longer_are_not_those_of_the_next() -> None:
    config = transformers.AutoConfig.for_model(
        "llama", hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=89,
        max_position_embeddings=40, rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    )  # fmt: skip
    hf = model_of(config, 1)
    want, model = generated(hf, prompt()), loaded(config, hf, "dynamic")
    assert [answers(model, prompt(), [Full]) for _ in range(2)] == [[want]] * 2


# --- before weights are read, and when they are ---


def test_looking_at_a_configuration_leaves_it_as_it_is() -> None:
    config = config_of("qwen3")
    before = config.to_dict(), config._attn_implementation
    assert survey(config).why_not is None
    assert (config.to_dict(), config._attn_implementation) == before


@pytest.mark.parametrize(("name", "says"), [("doge", "hides tokens by a mask"), ("mamba", "none of them")])
def test_a_configuration_alone_is_enough_to_refuse_a_model(name: str, says: str, tmp_path: Path) -> None:
    config_of(name).save_pretrained(tmp_path)  # without weights
    with pytest.raises(ConfigError, match=says):
        load.read_shape(name, str(tmp_path))


def test_a_model_with_nothing_to_compress_is_refused(tmp_path: Path) -> None:
    config = transformers.MistralConfig(sliding_window=8, num_hidden_layers=2, hidden_size=32, num_attention_heads=8)
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="none of them with full attention"):
        load.read_shape("local", str(tmp_path))


def test_a_model_that_answers_differently_is_refused_with_both_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    check_attention(model)
    own = agreement.own_logits
    monkeypatch.setattr(agreement, "own_logits", lambda *args: own(*args) + 0.5)
    with pytest.raises(ConfigError, match=r"logits differ by 0\.5, with a range of \d"):
        check_attention(model)


def test_what_our_attention_cannot_stand_in_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()

    def fail(*_: object) -> None:
        raise ValueError("heads of a shape that no kernel takes")

    monkeypatch.setattr(agreement, "attend_rows", fail)
    with pytest.raises(ConfigError, match="does not run with KVBench's attention"):
        check_attention(model)


def test_a_checkpoint_is_compared_once_and_not_where_it_is_asked_not_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder, seen = str(save_tiny(tmp_path / "checkpoint")), list[str]()
    monkeypatch.setattr(load, "check_attention", lambda model: seen.append(model.shape.name))
    load.load("a", folder, dtype="float32", device="cpu", check=False)
    assert seen == []
    load.load("b", folder, dtype="float32", device="cpu")
    load.load("c", folder, dtype="float32", device="cpu")
    assert seen == ["b"]
    load.load("d", folder, dtype="bfloat16", device="cpu")
    assert seen == ["b", "d"]


def test_a_model_is_compared_or_never() -> None:
    spec = {"name": "m", "id": "m", "revision": None, "trust_remote_code": False, "chat": "auto", "system_prompt": ""}
    assert build(ModelSpec, spec | {"check": "never"}, "model").check == "never"
    with pytest.raises(ConfigError, match=r"model\.check"):
        build(ModelSpec, spec | {"check": "often"}, "model")


def folder_of(name: str, changes: dict[str, Any], folder: Path) -> str:
    """A folder with a configuration of this architecture alone, some of whose values are others."""
    given = json.loads(config_of(name).to_json_string(use_diff=False)) | changes
    (folder / "config.json").write_text(json.dumps(given))
    return str(folder)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {"num_attention_heads": -2}),
        ("mistral", {"num_attention_heads": 0}),
        ("mistral", {"num_key_value_heads": -2}),
        ("cohere2", {"head_dim": 1.5}),
        ("gemma3_text", {"head_dim": -8}),
        ("qwen3", {"hidden_size": -48}),
        ("llama4_text", {"attention_chunk_size": 0}),
        ("gemma2", {"sliding_window": 0}),
        ("olmo3", {"sliding_window": 0}),
        ("gpt_oss", {"sliding_window": -3}),
    ],
)
def test_counts_that_are_none_are_refused_although_no_pass_ends(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        load.read_shape(name, folder_of(name, changes, tmp_path))
    assert len(str(caught.value)) < 500 and "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "key"), [("gemma3_text", "sliding_window"), ("llama4_text", "attention_chunk_size")])
def test_a_window_of_one_token_is_refused(name: str, key: str, tmp_path: Path) -> None:
    """transformers reads it in two ways."""
    with pytest.raises(ConfigError, match=f"{key}=1, with which transformers shows"):
        load.read_shape("narrow", folder_of(name, {key: 1}, tmp_path))


@pytest.mark.parametrize(("n", "is_refused"), [(48, False), (55, True), (60, True), (61, False)])
def test_an_answer_past_a_change_of_all_rotations_is_refused(n: int, is_refused: bool) -> None:
    """Phi 3 reads its whole text again behind so many tokens; prompts on either side answer as transformers does."""
    factors = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0]}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 60}
    config = config_of("phi3")
    config.original_max_position_embeddings, config.rope_parameters = 60, rope | factors
    hf = model_of(config, 1)
    model = loaded(config, hf, "long")
    if is_refused:
        with pytest.raises(LengthError, match=f"a prompt of {n} tokens and its answer go past 60 tokens"):
            answers(model, prompt(n), [Full])
    else:
        assert answers(model, prompt(n), [Full] * 2) == [generated(hf, prompt(n))] * 2


def test_a_chunk_that_no_layer_has_is_not_read(tmp_path: Path) -> None:
    assert load.read_shape("m", folder_of("qwen3", {"attention_chunk_size": "x"}, tmp_path)).chunk == 0


def test_a_model_of_thousands_of_layers_is_refused_before_they_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the file, and in values that no file was asked for."""
    monkeypatch.setattr(kinds, "skeleton", lambda *_: pytest.fail("it was made"))
    with pytest.raises(ConfigError, match="no number of layers"):
        load.read_shape("deep", folder_of("llama", {"num_hidden_layers": 10_000}, tmp_path))
    with pytest.raises(ConfigError, match="has 10000000 layers"):
        shape_of(transformers.LlamaConfig(num_hidden_layers=10_000_000), "deep")


def test_a_model_of_too_many_modules_is_refused_while_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    config = transformers.LlamaConfig(num_hidden_layers=5, hidden_size=40, num_attention_heads=4, vocab_size=71)
    monkeypatch.setattr(kinds, "MOST_MODULES", 30)
    with pytest.raises(ConfigError, match="more than 30 modules"):
        shape_of(config, "many")
    monkeypatch.undo()
    assert shape_of(config, "many").n_layers == 5


@pytest.mark.parametrize(("name", "dtype"), [(n, d) for n in EXACT_HERE for d in (torch.bfloat16, torch.float16)])
def test_no_right_model_is_refused_in_half_precision(name: str, dtype: torch.dtype) -> None:
    """Of experts too: a router's two best may be so near that rounding takes the other one."""
    register_attention()
    config = config_of(name)
    made = load.made(model_of(config, 1).to(dtype), None, shape_of(config, name), dtype, f"half-{name}")
    check_attention(made)


def test_a_wrong_model_is_refused_in_half_precision_too(monkeypatch: pytest.MonkeyPatch) -> None:
    register_attention()
    config = config_of("granitemoehybrid")
    hf = model_of(config, 1).to(torch.bfloat16)
    made = load.made(hf, None, shape_of(config, "half"), torch.bfloat16, "half")
    monkeypatch.setattr(agreement, "causal", lambda q, k, v, softmax, window: causal(q, k, v.flip(2), softmax, window))
    with pytest.raises(ConfigError, match="answers differently"):
        check_attention(made)


@pytest.mark.parametrize("window", [1, 4, 5, 14, 15, 16, 51, 52])
@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_a_model_is_asked_for_no_position_that_it_has_not_learned(name: str, window: int) -> None:
    config = config_of(name)
    config.max_position_embeddings = window
    model = loaded(config, model_of(config, 1), name)
    assert model.shape.window == window and model.turn is None


def test_a_model_of_one_word_is_compared() -> None:
    config = transformers.LlamaConfig(
        vocab_size=1, hidden_size=48, intermediate_size=56, num_hidden_layers=4, num_attention_heads=6,
        num_key_value_heads=2, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    loaded(config, model_of(config, 1), "word")


def test_only_a_note_of_ones_own_says_that_a_checkpoint_was_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model, seen = tiny(), list[str]()
    monkeypatch.setattr(load, "check_attention", lambda model: seen.append(model.shape.name))
    load.check_once(model, True)
    load.check_once(model, True)
    assert len(seen) == 1
    (note,) = (tmp_path / "cache" / "kvbench" / "checked").iterdir()
    note.chmod(0o666)  # that others can write
    load.check_once(model, True)
    load.check_once(model, True)  # it was written anew
    assert len(seen) == 2
    note.unlink()
    note.symlink_to(tmp_path / "cache")
    load.check_once(model, True)
    assert len(seen) == 3


@pytest.mark.parametrize("name", ["x" * 300, "file/below"])
def test_a_cache_that_cannot_be_read_costs_the_comparison_once_more(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
    model, seen = tiny(), list[str]()
    monkeypatch.setattr(load, "check_attention", lambda model: seen.append(model.shape.name))
    load.check_once(model, True)
    load.check_once(model, True)
    assert len(seen) == 2
