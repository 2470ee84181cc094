"""Models that choose what they attend to: as transformers answers, counted as they choose, and under no method."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvbench.engine.batch import Batch
from kvbench.engine.books.ledger import Entry
from kvbench.engine.budget import EVERYTHING
from kvbench.engine.decode import decode
from kvbench.engine.errors import ConfigError
from kvbench.engine.passes.chosen import BLOCK, attend_seen, seen_by
from kvbench.engine.prefill import prefill
from kvbench.engine.softmax import Softmax
from kvbench.evals.cells import rules_and_params
from kvbench.evals.settings import from_words
from kvbench.methods.combinations import KINDS, Case, refuse
from kvbench.methods.full import Full
from kvbench.results.names import own_methods
from kvbench.tests import tiny_run
from kvbench.tests.architectures import config_of, generated, is_too_new, loaded, model_of, prompt
from kvbench.tests.tiny_tokenizer import tiny_tokenizer

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # transformers' words about sizes of toys
    pytest.mark.skipif(
        any(map(is_too_new, ("deepseek_v32", "deepseek_v4", "hy_v4"))),
        reason="this transformers is too old for them, and they are refused (tests/engine/test_kinds.py)",
    ),
]
S, N_NEW = 75, 6
H = 6  # query heads


def entries(name: str) -> list[Entry]:
    """The books of one row's answer."""
    config = config_of(name)
    hf = model_of(config, 1)
    model = loaded(config, hf, name)
    with model.hooked():
        trace = prefill(model, prompt())
        rows = [Full.variant_for(Full.Params(), EVERYTHING, model.shape, S).row(trace, N_NEW) for _ in range(2)]
        said = decode(model, trace, rows, max_new_tokens=N_NEW).answers
    assert [one.ids for one in said] == [generated(hf, prompt(), N_NEW)] * 2
    first, second = (row.store.ledger.entries for row in rows)
    assert first == second
    assert [(e.step, e.layer, e.tokens) for e in first] == [
        (step, layer, S + step) for step in range(1, N_NEW) for layer in model.shape.choosing_layers
    ]
    return first


def test_tokens_of_an_index_are_counted_and_all_of_it_is_read() -> None:
    """12 tokens of each query; a latent of 12, a rotary key of 8 and 8 numbers of the index a token."""
    for entry in entries("deepseek_v32"):
        assert entry.attended == 12 * H and entry.pseudo_tokens == 0
        assert entry.resident_kv_bytes == 2 * entry.tokens * 20
        assert entry.read_meta_bytes == entry.resident_meta_bytes == 2 * entry.tokens * 8


def test_a_layer_that_takes_the_choice_of_another_reads_no_index() -> None:
    found = entries("hy_v4")
    assert {e.layer for e in found if e.read_meta_bytes} < {e.layer for e in found}
    assert {e.attended for e in found} == {12 * H}


def test_blocks_are_counted_as_the_tokens_in_them() -> None:
    """Three blocks of 8, of which the query's own is there in part; layers with full attention beside them."""
    for entry in entries("minimax_m3_vl_text"):
        if entry.layer % 2 == 0:
            assert (entry.attended, entry.read_meta_bytes) == (entry.tokens * H, 0)
        else:
            assert entry.attended == (16 + (entry.tokens - 1) % 8 + 1) * H
            assert entry.read_meta_bytes == 2 * entry.tokens * 8


def test_entries_made_of_several_tokens_are_no_tokens() -> None:
    """A window of 20; one entry for 16 tokens, or at most three of those for 4, which an index chooses."""
    for entry in entries("deepseek_v4"):
        assert entry.attended == 20 * H
        is_sparse = entry.layer == 2
        assert entry.pseudo_tokens == (3 if is_sparse else entry.tokens // 16) * H
        assert entry.read_meta_bytes == (2 * (entry.tokens // 4) * 8 if is_sparse else 0)


def test_a_feed_is_entered_token_by_token() -> None:
    config = config_of("deepseek_v32")
    hf = model_of(config, 1)
    model, ids = loaded(config, hf, "fed"), prompt()
    with model.hooked():
        trace = prefill(model, ids[:-5])
        rows = [Full.variant_for(Full.Params(), EVERYTHING, model.shape, S - 5).row(trace, 9) for _ in range(2)]
        found = Batch(model, trace, rows).read([ids[-5:]] * 2)
    with torch.inference_mode():
        before = hf(input_ids=torch.tensor([ids[:-5]]), use_cache=True)
        want = hf(input_ids=torch.tensor([ids[-5:]]), past_key_values=before.past_key_values).logits[0, -1]
    torch.testing.assert_close(found[0], want, atol=1e-4, rtol=1e-4)
    steps = [(e.step, e.tokens) for e in rows[1].store.ledger.entries if e.layer == 0]
    assert steps == [(i + 1, S - 4 + i) for i in range(5)]


@pytest.mark.parametrize("name", sorted(own_methods()))
def test_a_method_is_refused_on_top_of_the_models_own_choice(name: str) -> None:
    shape = loaded_shape("deepseek_v32")
    rules, params = rules_and_params(from_words([f"method={name}"]).method)
    if name == "full":
        return refuse(KINDS, Case(rules, params, shape=shape))
    with pytest.raises(ConfigError, match=r"chooses by itself what 4 of its 4 layers attend to.*use method=full"):
        refuse(KINDS, Case(rules, params, shape=shape))


def loaded_shape(name: str) -> Any:
    from kvbench.engine.checkpoints.kinds import shape_of

    return shape_of(config_of(name), name)


def saved(name: str, folder: Path) -> Path:
    tokenizer = tiny_tokenizer(None, adds_bos=True)
    config = config_of(name)
    config.vocab_size, config.max_position_embeddings = len(tokenizer), 1024
    config.bos_token_id, config.eos_token_id = 0, 1
    model_of(config, 1).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_run_says_that_the_model_chooses(tmp_path: Path) -> None:
    folder = saved("deepseek_v32", tmp_path / "model")
    words = ["model=any", f"model.id={folder}", "model.name=chooser", "task=needle", "task.lengths=[400]"]
    words += ["task.depths=2", "task.seeds=1", "limit=2"]
    result, rows = tiny_run.run(["method=full", *words], tmp_path / "out")
    assert result.method_label == "Full (the model's choice)"
    assert any("the model itself chooses what 4 of its 4 layers attend to" in note for note in result.notes)
    assert result.compressed_share is None and result.compressed_layers == []
    assert rows[0].ledger["tokens_attended_mean"] == 12
    assert (rows[0].ledger["bytes_index_read_per_step"] or 0) > 0
    with pytest.raises(ConfigError, match="use method=full"):
        tiny_run.run(["method=snapkv", *words], tmp_path / "out")
    with pytest.raises(ConfigError, match="sparse prefill has no meaning"):
        tiny_run.run(["method=full", "prefill=a_shape", *words], tmp_path / "out")


# --- the plain formula ---


def plain(q: Tensor, k: Tensor, v: Tensor, softmax: Softmax, seen: Any) -> Tensor:
    """Query by query, over the keys that `seen(row, head, query)` lists."""
    out = torch.zeros(*q.shape[:3], v.shape[3])
    for n, h, i in torch.cartesian_prod(*map(torch.arange, q.shape[:3])).tolist():
        group, at = h // (q.shape[1] // k.shape[1]), seen(n, h, i)
        logits = k[n, group, at] @ q[n, h, i] * softmax.scale
        if softmax.cap:
            logits = softmax.cap * (logits / softmax.cap).tanh()
        weights = logits.exp() / (logits.exp().sum() + (0 if softmax.sink is None else softmax.sink[h].exp()))
        out[n, h, i] = weights @ v[n, group, at]
    return out


@pytest.mark.parametrize("seed", range(8))
def test_attention_to_a_choice_is_the_plain_formula(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=draw))

    groups, g, s, d, d_v, block = number(1, 4), number(1, 4), number(1, 40), number(1, 9), number(1, 9), number(1, 9)
    n, h, s_q = number(1, 3), groups * g, s if seed % 2 else number(1, s + 1)
    q, k, v = (torch.randn(n, *size, generator=draw) for size in ((h, s_q, d), (groups, s, d), (groups, s, d_v)))
    softmax = Softmax(0.4, (0.0, 2.0)[seed % 2], torch.randn(h, generator=draw) if seed % 3 else None)
    past = torch.arange(s) <= torch.arange(s - s_q, s).unsqueeze(1)
    mask = torch.zeros(n, 1, s_q, s).masked_fill_(~past, torch.finfo(torch.float32).min)
    indices = torch.rand(n, s_q, s, generator=draw).argsort(-1)[..., : number(1, s + 1)].clone()
    indices[..., 0] = torch.arange(s - s_q, s)
    indices[torch.rand(indices.shape, generator=draw) < 0.2] = -1
    indices[..., -1] = torch.arange(s - s_q, s)
    n_blocks = -(-s // block)
    blocks = torch.rand(n, groups, s_q, n_blocks, generator=draw).argsort(-1)[..., : number(1, n_blocks + 1)].clone()
    blocks[..., 0] = torch.arange(s - s_q, s) // block

    def by_indices(row: int, head: int, i: int) -> list[int]:
        return sorted({j for j in indices[row, i].tolist() if 0 <= j <= s - s_q + i})

    def by_blocks(row: int, head: int, i: int) -> list[int]:
        mine = blocks[row, head // g, i].tolist()
        return [j for j in range(s - s_q + i + 1) if j // block in mine]

    for others, seen in (({"indices": indices}, by_indices), ({"block_indices": blocks}, by_blocks)):
        found = attend_seen(q, k, v, softmax, seen_by(k, mask, others, block))
        torch.testing.assert_close(found, plain(q, k, v, softmax, seen), atol=1e-5, rtol=1e-5)


def test_a_long_prompt_is_read_in_blocks_of_queries() -> None:
    s = 2 * BLOCK + 3
    q, k, v = torch.randn(3, 1, 2, s, 4, generator=torch.Generator().manual_seed(0))
    seen = torch.ones(s, s, dtype=torch.bool).tril()[None, None]
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.5)
    torch.testing.assert_close(attend_seen(q, k, v, Softmax(0.5), seen), want, atol=1e-5, rtol=1e-5)
