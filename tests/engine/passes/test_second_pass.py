from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from kvbench.engine.budget import Frame
from kvbench.engine.causal import Chunk, causal
from kvbench.engine.model import Model
from kvbench.engine.passes.repetition import Repetition, largest_weights
from kvbench.engine.passes.second_pass import Pass, SecondPass, joined, run_second_passes
from kvbench.engine.passes.trace import Trace
from kvbench.engine.prefill import prefill
from kvbench.engine.softmax import Softmax
from kvbench.kernels import column_sums
from kvbench.tests.tiny import prompt, tiny

S = 70
WHAT = Repetition(24, 8, Frame(6, 4, (11, 12)), (7, 5, 9), (7, 8))


def read(model: Model, n: int = S) -> Trace:
    with model.hooked():
        return prefill(model, prompt(n))


@dataclass(frozen=True)
class Queries(SecondPass):
    """A second pass that keeps the queries and their log-sum-exps."""

    fed: tuple[tuple[int, ...], ...]
    near: tuple[range, ...]

    def passes(self, model: Model, ids: Sequence[int]) -> Sequence[Pass]:
        return [Pass(each, self.near) for each in self.fed]

    def observe(self, at: Pass, q: Tensor, near: Tensor, scale: float, lse: Tensor) -> Tensor:
        return torch.cat([q, lse.unsqueeze(-1)], -1)

    def join(self, found: Sequence[Tensor]) -> Tensor:
        return torch.stack([*found])


class Noted:
    """A session that reads a prompt and notes every layer's queries and keys."""

    def __init__(self) -> None:
        self.q: dict[int, Tensor] = {}
        self.k: dict[int, Tensor] = {}

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax, window: int | Chunk | None
    ) -> Tensor:
        self.q[layer], self.k[layer] = q, k
        return causal(q, k, v, softmax)[0]


def plain(model: Model, fed: Sequence[int]) -> Noted:
    """One ordinary pass over the prompt and what is fed behind it."""
    noted = Noted()
    with model.hooked():
        model.forward(torch.tensor([[*prompt(S), *fed]]), 0, model.new_cache(), noted)
    return noted


@pytest.mark.parametrize("kind", ["llama", "qwen3", "opt"])
@pytest.mark.parametrize("near", [(range(0, S),), (range(3, 9), range(20, 40)), ()])
def test_a_probe_reads_what_a_longer_prompt_would_and_leaves_nothing(kind: str, near: tuple[range, ...]) -> None:
    """The second pass begins where the first did: at the prompt's end, without the first one's tokens."""
    model, fed = tiny(kind), ((5, 6, 7, 8), (9, 10, 11, 12))
    trace = read(model)
    assert trace.logits is not None
    before = [trace.logits.clone(), *(trace.keys(layer).clone() for layer in range(3))]
    what = Queries(fed, near)
    run_second_passes(model, trace, [what])
    for i, ids in enumerate(fed):
        expected = plain(model, ids)
        for layer in range(3):
            found = trace.of_second_pass(what, layer)[i]
            q, k = expected.q[layer][:, :, S:], expected.k[layer]
            torch.testing.assert_close(found[..., :-1], q, atol=2e-5, rtol=1e-4)
            seen = torch.zeros(4, S + 4, dtype=torch.bool)
            for some in near:
                seen[:, some.start : some.stop] = True
            seen[:, S:] = torch.ones(4, 4, dtype=torch.bool).tril()
            logits = q @ k.repeat_interleave(model.shape.g, 1).mT * trace.softmax[layer].scale
            lse = logits.masked_fill(~seen, -torch.inf).logsumexp(-1)
            torch.testing.assert_close(found[..., -1], lse, atol=2e-5, rtol=1e-4)
    assert all(torch.equal(a, b) for a, b in zip(before, [trace.logits, *map(trace.keys, range(3))], strict=True))


def test_parts_that_are_joined_are_attention_over_all_of_them() -> None:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 8, generator=draw) for n in (3, 40, 40))
    logits = 4 * q @ k.mT
    parts = [
        (logits[..., at].softmax(-1) @ v[:, :, at], logits[..., at].logsumexp(-1))
        for at in (slice(0, 1), slice(1, 30), slice(30, 40))
    ]
    torch.testing.assert_close(joined(parts)[0], logits.softmax(-1) @ v, atol=1e-6, rtol=1e-5)


def test_a_repetition_gives_the_largest_weight_over_prefix_chunk_and_what_was_fed() -> None:
    model = tiny()
    trace = read(model)
    run_second_passes(model, trace, [WHAT])
    passes = WHAT.passes(model, trace.ids)
    assert [len(each.near[-1]) for each in passes] == [24, 24, 12]
    for each in passes:
        noted, at = plain(model, each.ids), each.near[-1]
        for layer in range(3):
            q, r = noted.q[layer][:, :, S:].double(), len(each.ids)
            seen = torch.zeros(r, S + r, dtype=torch.bool)
            seen[:, :6] = seen[:, at.start : at.stop] = True
            seen[:, S:] = torch.ones(r, r, dtype=torch.bool).tril()
            logits = q @ noted.k[layer].double().repeat_interleave(3, 1).mT * trace.softmax[layer].scale
            weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)[..., at.start : at.stop]
            expected = weights.amax(2).unflatten(1, (2, 3)).amax(2).float()
            found = trace.of_second_pass(WHAT, layer)[..., at.start - 6 : at.stop - 6]
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-3)
            assert (found > 0).all() and (found <= 1).all()


def test_another_size_of_chunks_gives_much_the_same_numbers() -> None:
    """Of random weights, which do not look for what they repeat; a trained model's are nearly equal."""
    model = tiny()
    trace = read(model)
    one, some = replace(WHAT, chunk=100), WHAT
    run_second_passes(model, trace, [one, some])
    a, b = (torch.cat([trace.of_second_pass(what, layer) for layer in range(3)]) for what in (one, some))
    assert a.shape == b.shape and not torch.equal(a, b)
    assert torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1] > 0.6


def test_a_probe_runs_once_for_all_who_ask_and_an_empty_context_takes_none() -> None:
    model = tiny()
    trace = read(model)
    run_second_passes(model, trace, [WHAT, WHAT])
    second_passes = dict(trace.second_passes)
    run_second_passes(model, trace, [Repetition(24, 8, WHAT.frame, WHAT.first_ids, WHAT.next_ids)])
    assert trace.second_passes == second_passes and len(second_passes) == 1
    assert replace(WHAT, frame=Frame(66, 4)).passes(model, trace.ids) == []


@pytest.mark.parametrize("n_bytes", [1, 4 * 30 * 7, 1 << 20])
def test_largest_weights_do_not_depend_on_the_block(n_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(column_sums, "LOGIT_BYTES", n_bytes)
    monkeypatch.setattr(column_sums, "takes_native", lambda *_: False)
    draw = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 6, 50, 8, generator=draw), torch.randn(1, 2, 30, 8, generator=draw)
    logits = q @ k.repeat_interleave(3, 1).mT * 0.5
    expected = logits.softmax(-1).amax(2).unflatten(1, (2, 3)).amax(2)
    torch.testing.assert_close(largest_weights(q, k, Softmax(0.5), logits.logsumexp(-1)), expected)
