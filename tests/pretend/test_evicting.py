"""A prompt read in chunks with eviction between them, on a pretended GPU: what is kept, and logits, as on a CPU."""

import pytest
import torch

from kvbench.benchmarks.pretend.cuda import Machine
from kvbench.engine.decode import decode
from kvbench.tests.engine.passes.test_evicting import CHUNK, N_NEW, READABLE, S, read, variant_of
from kvbench.tests.pretend.test_methods import moved
from kvbench.tests.tiny import prompt, tiny

QUICK = ("h2o", "dms")  # sums over chunks; heads that keep numbers of their own


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in READABLE]
)
def test_a_prompt_in_chunks_is_as_on_a_cpu(machine: Machine, name: str) -> None:
    here, ids = tiny(), prompt(S)
    there, variant = moved(here, "cuda"), variant_of(name, here)
    (trace, row), (other, its_row) = read(here, variant, ids, CHUNK), read(there, variant, ids, CHUNK)
    assert trace.logits is not None and other.logits is not None
    torch.testing.assert_close(other.logits.cpu(), trace.logits, rtol=1e-4, atol=1e-4)
    for layer in here.shape.attention_layers:
        ours, theirs = (each.store[layer].positions().cpu().sort(dim=-1).values for each in (row, its_row))
        assert torch.equal(ours, theirs), f"layer {layer}"
    said = []
    for model, at, its in ((here, trace, row), (there, other, its_row)):
        with model.hooked():
            said.append(decode(model, at, [its], max_new_tokens=N_NEW).answers[0].ids)
    assert said[0] == said[1]
    assert row.store.ledger.entries == its_row.store.ledger.entries
