import torch

from kvbench.engine.observe import LastQueries
from kvbench.engine.prefill import prefill
from kvbench.tests.tiny import prompt, tiny


def test_the_trace_holds_keys_and_values_of_the_compressed_layers() -> None:
    model, ids = tiny("llama"), prompt(30)
    with torch.inference_mode():
        expected = model.hf(torch.tensor([ids]), use_cache=True)
    with model.hooked():
        trace = prefill(model, ids)
    for layer, cached in enumerate(expected.past_key_values.layers):
        torch.testing.assert_close(trace.keys(layer), cached.keys)
        torch.testing.assert_close(trace.values(layer), cached.values)
    torch.testing.assert_close(trace.logits, expected.logits[0, -1])


def test_observations_are_made_once_however_many_ask() -> None:
    model, seen = tiny(), []
    with model.hooked():
        trace = prefill(
            model, prompt(30), [LastQueries(4), LastQueries(4), LastQueries(9)], lambda trace, layer: seen.append(layer)
        )
    assert seen == [0, 1, 2]
    assert trace.observed(LastQueries(4), 2).shape == (1, 6, 4, 8)
    assert torch.equal(trace.observed(LastQueries(9), 1)[:, :, 5:], trace.observed(LastQueries(4), 1))


def test_shared_work_is_done_by_the_first_who_asks() -> None:
    model, calls = tiny(), []
    with model.hooked():
        trace = prefill(model, prompt(10))
    for key in ("codes", "codes", "clusters"):
        trace.once((key, 0), lambda: calls.append(1))
    assert len(calls) == 2


def test_no_later_token_changes_an_earlier_one() -> None:
    model, ids = tiny(), prompt(30)
    with model.hooked():
        short, long = prefill(model, ids[:20]), prefill(model, ids)
    for layer in range(3):
        torch.testing.assert_close(long.keys(layer)[:, :, :20], short.keys(layer))
