"""Which tokens a run fetched, kept in a file, and what any device cache would have saved of it.

    python run.py method=pqcache task=needle accesses=true out=runs/study
    python -m kvbench.evals.studies.accesses runs/study --tokens 1024 4096 --k-cache 8 32 --policy lfu lru --recent 1 2

A run with `accesses=true` writes `accesses-LINE.npz` into its folder for every line of samples.jsonl: a sample, one of
its answers where several are drawn, or one of its turns. It is named by `file_stem` of `results/files.py`; a
replay needs neither model nor prompt, so a sweep of policies takes seconds. It calls the caches that runs use
(`engine/caches/`), look-up by look-up in the order of the run, each line and layer from an empty cache, and gives the
counts of its ledger.

Format    one entry per fetch, a step of a layer. `step`, `layer`; `n`: tokens seen, the current one included; `n_kept`:
          tokens before the first that may be fetched; `n_host`: complete tokens on the host; all (entries,) int32.
          `positions` (all fetched tokens,) int32, entry by entry and head by head, `ends` (entries, heads) int64:
          where each head's part of it ends. Scalars `h_kv`, `s_prompt`, `token_bytes` (K and V of one token of one KV
          head). Heads are KV heads, or query heads in the order of their KV heads. `n_before`: how many of the entries
          are of turns before the line's, which fill a cache and are not counted; `counted` (entries,) bool: False for
          tokens of a dense feed, which read past the cache. Older files lack both: every entry counts.

Not here: bytes over a link in seconds (`evals/studies/hardware.py`), tokens that a cache without blocks would hold.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvbench.engine.books.meter import Access
from kvbench.engine.budget import token_bytes
from kvbench.engine.caches.blocks import BlockCache, BlockCacheSpec
from kvbench.engine.caches.recent import RecentTokens
from kvbench.engine.errors import ConfigError
from kvbench.engine.foreign import write_csv
from kvbench.engine.store import Store
from kvbench.engine.terminal import say
from kvbench.results.sheet import Sheet, show

BLOCK_LEN = 128


@dataclass(frozen=True)
class Log:
    """The fetches of one sample."""

    h_kv: int
    s_prompt: int
    token_bytes: int
    entries: list[Access]
    n_before: int = 0  # of the entries: they fill a cache and are not counted

    @property
    def n_most(self) -> int:
        """Tokens at the end."""
        return max((entry.n for entry in self.entries), default=self.s_prompt)


@dataclass(frozen=True)
class Saved:
    """What a cache would have done; hits and look-ups are of tokens of a KV head."""

    hits: int
    lookups: int
    warm_hits: int  # without the first step, which finds every cache empty
    warm_lookups: int
    moved_bytes: int  # misses
    filled_bytes: int  # whole blocks that the cache took in

    @property
    def hit_rate(self) -> float | None:
        return self.hits / self.lookups if self.lookups else None

    @property
    def warm_hit_rate(self) -> float | None:
        return self.warm_hits / self.warm_lookups if self.warm_lookups else None


def keep(placing: Callable[[], AbstractContextManager[Path]], stem: str, store: Store, n_before: int = 0) -> None:
    """Write a line's file, named by its stem, into the folder that `placing` gives, where the store noted fetches."""
    if store.accesses:
        with placing() as folder:
            write(folder / f"accesses-{stem}.npz", store, n_before)


def write(path: Path, store: Store, n_before: int = 0) -> None:
    """Write everything that a store fetched, the first `n_before` times before the turn in question."""
    entries = store.accesses
    assert entries is not None, "the store was not asked to note its fetches"
    heads = [[head[head >= 0] for head in entry.idx] for entry in entries]
    n_heads = {len(of_entry) for of_entry in heads}
    assert len(n_heads) <= 1, f"entries of {n_heads} heads"
    lengths = np.array([[len(head) for head in of_entry] for of_entry in heads], np.int64)
    flat = [head for of_entry in heads for head in of_entry]
    columns: dict[str, Any] = {
        name: np.array([getattr(entry, name) for entry in entries], np.int32)
        for name in ("step", "layer", "n", "n_kept", "n_host")
    }
    np.savez_compressed(
        path,
        positions=np.concatenate(flat).astype(np.int32) if flat else np.zeros(0, np.int32),
        ends=lengths.reshape(-1).cumsum().reshape(lengths.shape),
        counted=np.array([entry.is_counted for entry in entries], bool),
        n_before=n_before,
        h_kv=store.shape.h_kv,
        s_prompt=store.trace.s_prompt,
        token_bytes=token_bytes(store.shape) // store.shape.h_kv,
        **columns,
    )


def read(path: Path) -> Log:
    """A file that `write` made."""
    try:
        with path.open("rb") as handle, np.load(handle) as file:
            arrays = {name: file[name] for name in file.files}
        ends = arrays["ends"]
        cut = np.split(arrays["positions"].astype(np.int64), ends.reshape(-1)[:-1]) if ends.size else []
        n_heads = ends.shape[1] if ends.ndim == 2 else 0
        numbers = zip(
            *(arrays[name].tolist() for name in ("step", "layer", "n", "n_kept", "n_host")),
            strict=True,
        )
        counted = arrays.get("counted", np.ones(len(ends), bool)).tolist()
        entries = [
            Access(step, layer, n, n_kept, n_host, cut[i * n_heads : (i + 1) * n_heads], counted[i])
            for i, (step, layer, n, n_kept, n_host) in enumerate(numbers)
        ]
        h_kv, s_prompt, token_bytes = (int(arrays[name]) for name in ("h_kv", "s_prompt", "token_bytes"))
        return Log(h_kv, s_prompt, token_bytes, entries, int(arrays.get("n_before", 0)))
    # A damaged archive ends in any of the errors of zipfile, zlib and numpy.
    except Exception as error:
        raise ConfigError(f"{path} is no file of fetches ({error}); make one with accesses=true") from None


def replay_blocks(log: Log, spec: BlockCacheSpec) -> Saved:
    """What the store's block cache saves with this capacity, policy and refill."""
    caches: dict[int, BlockCache] = {}

    def access(entry: Access) -> tuple[int, int, int]:
        wanted = torch.from_numpy(np.concatenate(per_kv_head(entry, log.h_kv)))
        if spec.tokens == 0:
            return len(wanted), 0, 0
        cache = caches.setdefault(entry.layer, BlockCache(spec))
        hits, filled = cache.access(wanted - entry.n_kept, entry.n_host // spec.block_len)
        return len(wanted), hits, filled * spec.block_len * log.h_kv

    return total(log, access)


def replay_recent(log: Log, n_steps: int) -> Saved:
    """What a cache saves that keeps the tokens of the last `n_steps` selections, as ClusterKV's does."""
    caches: dict[int, RecentTokens] = {}

    def access(entry: Access) -> tuple[int, int, int]:
        cache = caches.setdefault(entry.layer, RecentTokens(n_steps, log.n_most))
        longest = max(len(head) for head in entry.idx)
        idx = torch.full((1, len(entry.idx), longest), -1)
        for i, head in enumerate(entry.idx):
            idx[0, i, : len(head)] = torch.from_numpy(head)
        distinct, hits, _ = cache.access(idx, log.h_kv, padded=True)
        return distinct, hits, 0

    return total(log, access)


def total(log: Log, access: Callable[[Access], tuple[int, int, int]]) -> Saved:
    """Sums over all entries; `access` gives the look-ups, hits and filled tokens of one."""
    first = {entry.layer: entry.step for entry in reversed(log.entries)}
    sums = np.zeros(6, np.int64)
    for i, entry in enumerate(log.entries):
        lookups, hits, filled = access(entry)
        if i < log.n_before:
            continue
        lookups, hits = lookups * entry.is_counted, hits * entry.is_counted
        warm = entry.step > first[entry.layer]
        moved, taken = (lookups - hits) * log.token_bytes, filled * log.token_bytes
        sums += [hits, lookups, hits * warm, lookups * warm, moved, taken]
    return Saved(*(int(value) for value in sums))


def per_kv_head(entry: Access, h_kv: int) -> list[np.ndarray]:
    """The tokens that each KV head needs, each once."""
    g = len(entry.idx) // h_kv
    if g == 1:
        return list(entry.idx)
    return [np.unique(np.concatenate(entry.idx[i : i + g])) for i in range(0, len(entry.idx), g)]


# --- the command ------------------------------------------------------------------------------


def files_of(folders: Sequence[Path]) -> list[Path]:
    files = [file for folder in folders for file in sorted(folder.rglob("accesses-*.npz"))]
    if not files:
        raise ConfigError(f"no accesses-*.npz below {', '.join(map(str, folders))}; make them with accesses=true")
    return files


def study(files: Sequence[Path], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row per run and cache, samples added up."""
    specs = [
        BlockCacheSpec(tokens, options.block_len, k_cache, policy)
        for tokens in options.tokens
        for policy in options.policy
        for k_cache in options.k_cache
    ]
    for folder in dict.fromkeys(file.parent for file in files):
        logs = [read(file) for file in files if file.parent == folder]
        caches = [(f"{spec.policy}, {spec.tokens:,} tokens, k_cache {spec.k_cache}", spec) for spec in specs]
        for name, spec in caches:
            saved = [replay_blocks(log, spec) for log in logs]
            yield row(folder, name, spec.policy, spec.tokens, spec.k_cache, saved)
        for n_steps in options.recent:
            saved = [replay_recent(log, n_steps) for log in logs]
            yield row(folder, f"last {n_steps} selections", "recent", None, n_steps, saved)


def row(
    folder: Path, name: str, policy: str, tokens: int | None, k_cache: int, saved: Sequence[Saved]
) -> dict[str, Any]:
    whole = Saved(*(sum(getattr(one, key) for one in saved) for key in Saved.__dataclass_fields__))
    return {
        "run": folder.name, "cache": name, "policy": policy, "tokens": tokens, "k_cache": k_cache,
        "hit_rate": whole.hit_rate, "warm_hit_rate": whole.warm_hit_rate,
        "moved_bytes": whole.moved_bytes, "filled_bytes": whole.filled_bytes,
    }  # fmt: skip


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kvbench.evals.studies.accesses", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs made with accesses=true")
    parser.add_argument("--tokens", nargs="+", type=int, default=[1024, 2048, 4096], help="capacities")
    parser.add_argument("--block-len", type=int, default=BLOCK_LEN)
    parser.add_argument("--k-cache", nargs="+", type=int, default=[8, 16, 32, 64])
    parser.add_argument("--policy", nargs="+", default=["lfu", "lru"])
    parser.add_argument("--recent", nargs="*", type=int, default=[1, 2, 4], help="ClusterKV's R")
    parser.add_argument("--csv", type=Path, default=None, help="also write the rows here")
    options = parser.parse_args(words)
    try:
        rows = list(study(files_of(options.runs), options))
    except ConfigError as error:
        say(f"error: {error}", file=sys.stderr)
        return 2
    heads = ["run", "cache", "hit rate", "without the first step", "moved MB", "filled MB"]
    shown = [
        [line["run"], line["cache"]]
        + ["-" if line[key] is None else f"{line[key]:.3f}" for key in ("hit_rate", "warm_hit_rate")]
        + [f"{line[key] / 1e6:,.1f}" for key in ("moved_bytes", "filled_bytes")]
        for line in rows
    ]
    show(Sheet(heads, shown, n_keys=2))
    if options.csv is not None:
        write_csv(options.csv, rows[0], (row.values() for row in rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
