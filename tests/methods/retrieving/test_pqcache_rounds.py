"""The adaptive bound: profiles of a machine, times of layers, and rounds that fit."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvbench.engine.softmax import Softmax
from kvbench.methods.retrieving import pqcache_rounds
from kvbench.methods.retrieving.pqcache_rounds import Clock, Profile
from kvbench.tests.methods.retrieving.test_pqcache import random_tokens, variant
from kvbench.tests.vectors import trace_of


@pytest.fixture
def cache_home(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(pqcache_rounds, "LENGTHS", (128, 256))
    return own_cache / "kvbench" / "profiles"


def test_clustering_is_timed_once_and_layers_until_there_are_enough(cache_home: Path) -> None:
    clustering = None
    for i, s in enumerate((100, 100, 200, 300, 400)):
        tokens = random_tokens(s)
        trace = trace_of(tokens[1], tokens[2], 6, s)
        trace.shape = replace(trace.shape, n_layers=3, attention_layers=(0, 1, 2))
        for layer in (1, 2):
            trace.add(layer, tokens[1], tokens[2], Softmax(0.25))
        row = variant(tokens, s, trace=trace, b=4, iterations="auto")
        said = row.report()["iterations"]
        assert len(said) == 3
        assert all(3 <= n <= 300 for n in said)
        (file,) = cache_home.iterdir()
        kept = json.loads(file.read_text())
        lengths = [n for n, _ in kept["layers"]]
        # The second prompt is as long as the first, the last comes when there are enough.
        assert lengths == [94, 194, 294][: (1, 1, 2, 3, 3)[i]]
        assert [(n, rounds) for n, rounds, _ in kept["clustering"]] == [
            (n, rounds) for n in (128, 256) for rounds in (3, 9)
        ]
        clustering = clustering or kept["clustering"]
        assert kept["clustering"] == clustering


@pytest.mark.parametrize("content", ["", "{", "[]", "\xff", "[" * 100_000, '{"clustering": [[1]], "layers": 5}'])
def test_a_damaged_profile_is_made_again(cache_home: Path, content: str) -> None:
    shape = trace_of(*random_tokens(16)[1:3], 6, 16).shape
    profile = pqcache_rounds.profile_of(shape, torch.device("cpu"), 2, 4, 1)
    profile.path.write_text(content, encoding="latin-1")
    made = pqcache_rounds.profile_of(shape, torch.device("cpu"), 2, 4, 1)
    assert [one[:2] for one in made.clustering] == [one[:2] for one in profile.clustering]
    assert json.loads(profile.path.read_text())["layers"] == []


def test_a_profile_that_cannot_be_kept_is_used_all_the_same(cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    shape = trace_of(*random_tokens(16)[1:3], 6, 16).shape
    assert pqcache_rounds.profile_of(shape, torch.device("cpu"), 2, 4, 1).clustering


def test_the_bound_follows_the_profile(tmp_path: Path) -> None:
    clustering = [(n, r, 1e-3 + 1e-6 * n * r) for n in (1000, 2000, 4000) for r in (3, 9)]
    layers = [(n, 2e-3 + 5e-6 * n + 1e-9 * n * n) for n in (1000, 2000, 4000)]
    profile = Profile(tmp_path / "x.json", clustering, layers)
    by_hand = int((1e-3 + 5e-6 * 8000 + 1e-9 * 8000**2) / (1e-6 * 8000))
    assert profile.rounds(8000, None, False) == profile.rounds(8000, None, True) == by_hand == 13
    unknown = Profile(tmp_path / "x.json", clustering)
    assert unknown.rounds(8000, None, False) == 3
    assert unknown.rounds(8000, 0.0975, False) == 12
    assert unknown.rounds(8000, 1e9, True) == 300


def test_a_layer_is_what_lies_between_two_buildings(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([1.0, 4.0, 4.5, 5.0, 9.0, 9.5])
    monkeypatch.setattr("kvbench.engine.books.stopwatch.perf_counter", lambda: next(now))
    clock, cpu = Clock(), torch.device("cpu")
    clock.enter(0, cpu)
    assert clock.latest() is None
    clock.leave()  # 1.0
    clock.enter(1, cpu)  # 4.0, three seconds later
    clock.leave()  # 4.5
    clock.enter(1, cpu)  # another variant
    clock.leave()  # 5.0
    clock.enter(2, cpu)  # 9.0
    clock.leave()
    assert (clock.latest(), clock.middle()) == (4.0, 3.5)
