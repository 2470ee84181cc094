import csv
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml

from kvbench.engine.caches.blocks import BlockCacheSpec
from kvbench.engine.errors import ConfigError
from kvbench.evals.studies.accesses import main, read, replay_blocks, replay_recent
from kvbench.tests.tiny_run import run, save_tiny

NEEDLE = [
    "task=needle",
    "task.source=embedded",
    "task.style=own",
    "task.lengths=[400]",
    "task.depths=[50]",
]
SPEC = BlockCacheSpec(64, 16, 4, "lfu")
CACHE = ["cache.tokens=64", "cache.block_len=16", "cache.k_cache=4"]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = save_tiny(tmp_path_factory.mktemp("models") / "tiny")
    words = ["model=any", f"model.id={folder}", "model.name=tiny", "task.max_new_tokens=12"]
    return [*words, *NEEDLE, "ratio=0.25", "comm=1", "accesses=true"]


def totals(folder: Path) -> dict[str, int]:
    """Sums of the ledger that the run itself wrote."""
    table = pq.read_table(folder / "ledger.parquet").to_pydict()
    names = ("cache_hits", "cache_lookups", "moved_kv_bytes", "filled_bytes")
    return {name: sum(table[name]) for name in names}


@pytest.mark.parametrize("policy", ["lfu", "lru"])
@pytest.mark.parametrize("method", ["oracle", "quest"])
def test_a_replay_counts_what_the_run_counted(words, method, policy, tmp_path) -> None:
    words = [*words, f"method={method}", *CACHE, f"cache.policy={policy}"]
    run(words, tmp_path)
    (file,) = tmp_path.glob("accesses-*.npz")
    log, counted = read(file), totals(tmp_path)
    saved = replay_blocks(log, BlockCacheSpec(64, 16, 4, policy))
    assert saved.hits == counted["cache_hits"] and saved.lookups == counted["cache_lookups"] > 0
    assert saved.moved_bytes == counted["moved_kv_bytes"]
    assert saved.filled_bytes == counted["filled_bytes"]
    assert saved.warm_lookups < saved.lookups and saved.warm_hits == saved.hits


def sums_of_replays(folder: Path, replay) -> dict[str, int]:
    found = [replay(read(file)) for file in sorted(folder.glob("accesses-*.npz"))]
    return {
        "cache_hits": sum(one.hits for one in found),
        "cache_lookups": sum(one.lookups for one in found),
        "moved_kv_bytes": sum(one.moved_bytes for one in found),
        "filled_bytes": sum(one.filled_bytes for one in found),
    }


def test_every_draw_keeps_its_fetches(words, tmp_path) -> None:
    run([*words, "method=oracle", *CACHE, "temperature=1", "n_answers=3"], tmp_path)
    assert len([*tmp_path.glob("accesses-*.npz")]) == 3
    assert sums_of_replays(tmp_path, lambda log: replay_blocks(log, SPEC)) == totals(tmp_path)


@pytest.mark.parametrize("mode", ["independent", "golden", "dialogue"])
@pytest.mark.parametrize("method", ["oracle", "clusterkv"])
def test_every_turn_keeps_its_fetches_and_those_that_filled_the_cache_before(words, method, mode, tmp_path) -> None:
    is_oracle = method == "oracle"
    own = [*CACHE, "cache.policy=lfu"] if is_oracle else ["method.cache_steps=2"]
    run([*words, f"method={method}", *own, "task.lengths=[620]", "task.questions=3", f"task.mode={mode}"], tmp_path)
    assert len([*tmp_path.glob("accesses-*.npz")]) == 3
    found = sums_of_replays(tmp_path, lambda log: replay_blocks(log, SPEC) if is_oracle else replay_recent(log, 2))
    assert found == totals(tmp_path) and found["cache_hits"] > 0


def test_a_dense_feed_is_no_look_up(words, tmp_path) -> None:
    run([*words, "method=oracle", *CACHE, "task.questions=2", "task.feed=dense"], tmp_path)
    found, counted = sums_of_replays(tmp_path, lambda log: replay_blocks(log, SPEC)), totals(tmp_path)
    for name in ("cache_hits", "cache_lookups", "filled_bytes"):
        assert found[name] == counted[name] > 0, name
    assert found["moved_kv_bytes"] < counted["moved_kv_bytes"], "a feed's tokens read the whole host"


def test_recent_selections_are_clusterkvs_cache(words, tmp_path) -> None:
    run([*words, "method=clusterkv", "method.cache_steps=2"], tmp_path)
    (file,) = tmp_path.glob("accesses-*.npz")
    saved, counted = replay_recent(read(file), 2), totals(tmp_path)
    assert (saved.hits, saved.lookups) == (counted["cache_hits"], counted["cache_lookups"])
    assert saved.moved_bytes == counted["moved_kv_bytes"] and saved.hits > 0


def test_without_a_cache_everything_moves(words, tmp_path) -> None:
    run([*words, "method=oracle"], tmp_path)
    (file,) = tmp_path.glob("accesses-*.npz")
    saved = replay_blocks(read(file), BlockCacheSpec(0, 16, 4, "lfu"))
    assert saved.hits == 0 and saved.moved_bytes == totals(tmp_path)["moved_kv_bytes"]
    larger = replay_blocks(read(file), BlockCacheSpec(1024, 16, 64, "lfu"))
    assert larger.hits > replay_blocks(read(file), SPEC).hits > 0


def test_noting_fetches_changes_neither_answers_nor_the_runs_identity(words, tmp_path) -> None:
    words = [*words, "method=quest"]
    _, noted = run(words, tmp_path / "a")
    _, plain = run([word for word in words if word != "accesses=true"], tmp_path / "b")
    assert [row.prediction for row in noted] == [row.prediction for row in plain]
    a, b = (yaml.safe_load((tmp_path / x / "config.yaml").read_text()) for x in "ab")
    assert a == b and not list((tmp_path / "b").glob("accesses-*"))


def test_the_command_compares_caches(words, tmp_path, capsys) -> None:
    run([*words, "method=oracle"], tmp_path / "run")
    asked = ["--tokens", "64", "128", "--block-len", "16", "--k-cache", "4", "--recent", "1", "3"]
    assert main([str(tmp_path / "run"), *asked, "--csv", str(tmp_path / "rows.csv")]) == 0
    assert "last 3 selections" in capsys.readouterr().out
    with (tmp_path / "rows.csv").open() as handle:
        rows = list(csv.DictReader(handle))
    assert [(row["policy"], row["tokens"]) for row in rows] == [
        ("lfu", "64"), ("lru", "64"), ("lfu", "128"), ("lru", "128"), ("recent", ""), ("recent", "")
    ]  # fmt: skip
    recent = [float(row["hit_rate"]) for row in rows if row["policy"] == "recent"]
    assert 0 < recent[0] <= recent[1] <= 1


def test_what_is_no_log_is_said(tmp_path, capsys) -> None:
    assert main([str(tmp_path)]) == 2
    assert "make them with accesses=true" in capsys.readouterr().err
    np.savez(tmp_path / "accesses-x.npz", positions=np.zeros(3))
    with pytest.raises(ConfigError, match="is no file of fetches"):
        read(tmp_path / "accesses-x.npz")
    assert main([str(tmp_path)]) == 2
