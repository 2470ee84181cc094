from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvbench.engine.observe import ColumnSums
from kvbench.engine.passes.chunks import by_chunk, in_chunks
from kvbench.engine.prefill import prefill
from kvbench.tests.tiny import prompt, tiny
from kvbench.tests.tiny_run import run, save_tiny

S, CHUNK = 70, 16


def test_a_prompt_read_in_chunks_is_the_same_prompt() -> None:
    model, what = tiny(), ColumnSums()
    with model.hooked():
        whole, parts = (prefill(model, prompt(S), [what], chunk=n) for n in (None, CHUNK))
    assert whole.logits is not None and parts.logits is not None
    torch.testing.assert_close(parts.logits, whole.logits, rtol=1e-5, atol=1e-5)
    for layer in model.shape.attention_layers:
        for one, other in zip(
            (parts.keys(layer), parts.values(layer)), (whole.keys(layer), whole.values(layer)), strict=True
        ):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(parts.observed(what, layer), whole.observed(what, layer), rtol=1e-5, atol=1e-5)


def test_no_mlp_sees_more_tokens_than_a_chunk_and_attention_sees_all() -> None:
    model, seen = tiny(), list[int]()
    assert model.turn is not None  # looked up by a short pass of its own, once
    mlps = [layer.mlp for layer in model.hf.get_decoder().layers]
    down = [mlp.down_proj.register_forward_hook(lambda m, args, out: seen.append(args[0].shape[1])) for mlp in mlps]
    with model.hooked():
        prefill(model, prompt(S), chunk=CHUNK)
    assert seen == [CHUNK, CHUNK, CHUNK, CHUNK, S % CHUNK] * len(mlps)
    seen.clear()
    with model.hooked():
        prefill(model, prompt(S))
    assert seen == [S] * len(mlps), "outside nothing is left behind"
    for hook in down:
        hook.remove()


def test_what_somebody_else_put_in_place_of_a_forward_is_there_again() -> None:
    model = tiny()
    mlp = model.hf.get_decoder().layers[0].mlp
    mlp.forward = other = mlp.forward
    with pytest.raises(RuntimeError, match="half way"), in_chunks(model, CHUNK):
        assert mlp.forward is not other
        raise RuntimeError("half way")
    assert mlp.__dict__["forward"] is other
    assert "forward" not in model.hf.get_decoder().layers[1].mlp.__dict__


def test_what_gives_more_than_a_value_for_each_token_reads_all_at_once() -> None:
    def routed(x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x.mean(1)

    x = torch.randn(1, S, 4)
    out, mean = by_chunk(routed, CHUNK, x)
    assert torch.equal(out, x * 2) and torch.equal(mean, x.mean(1))


def test_a_run_says_its_chunk_and_answers_alike(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "tiny")
    words = [f"model.id={folder}", "model=any", "model.name=tiny", "method=snapkv", "ratio=0.5", "task=needle"]
    words += ["task.source=embedded", "task.lengths=[400]", "task.depths=[50]", "task.max_new_tokens=4"]
    (_, (parts,)), (_, (whole,)) = (
        run([*words, *given], tmp_path / str(i), "cpu") for i, given in enumerate((["prefill.chunk=64"], []))
    )
    assert parts.prediction == whole.prediction and parts.ledger == whole.ledger
    (config,) = (tmp_path / "0").rglob("config.yaml")
    assert "prefill_chunk: 64" in config.read_text()
