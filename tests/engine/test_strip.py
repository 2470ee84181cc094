import pytest
import torch

from kvbench.engine.books.strip import attended_bins
from kvbench.engine.placement import Kept
from kvbench.engine.store import Store
from kvbench.tests.conformance import S, model, ours, watched
from kvbench.tests.engine.test_store import counting_trace, token


def drawn(pictures: list[torch.Tensor], n_bins: int) -> list[float]:
    """The shares of each part of the prompt, from exact pictures (h, n) of the layers."""
    parts = torch.arange(S) * n_bins // S
    of_layers = [[float(seen[:, :S][:, parts == part].double().mean()) for part in range(n_bins)] for seen in pictures]
    return [sum(shares) / len(shares) for shares in zip(*of_layers, strict=True)]


@pytest.mark.parametrize("name", ["full", "snapkv", "h2o", "pyramidinfer", "quest", "pqcache", "oracle", "infllm"])
def test_a_strip_is_what_the_pictures_of_all_layers_say(name: str) -> None:
    said = watched(ours(name), "0.2")
    last = [seen for seen in said.steps if seen.step == said.steps[-1].step]
    assert [seen.layer for seen in last] == [*model().shape.attention_layers]
    for n_bins in (100, 7):
        strip = attended_bins(said.row.store.layers.values(), n_bins)
        assert strip == pytest.approx(drawn([seen.attended for seen in last], n_bins), abs=6e-4)
        assert name == "full" or 0 < sum(strip) / n_bins < 0.9


def test_a_prompt_shorter_than_the_strip_has_a_part_for_each_token() -> None:
    store = Store(counting_trace(6), 2)
    store.place(0, Kept(torch.tensor([[[1, 3], [1, 2]]]), n_window=1))
    store[0].append(token(6), -token(6))
    assert attended_bins(store.layers.values()) == [0.0, 1.0, 0.5, 0.5, 0.0, 1.0]


def test_a_variant_without_layers_has_no_strip() -> None:
    assert attended_bins([]) == []
