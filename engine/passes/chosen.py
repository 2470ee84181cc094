"""Layers that attend to what their model chooses: exactly that is attended to, and the ledger has what it took.

Some models choose tokens with an index of their own, blocks of them, or entries that they make of several tokens. Such
a layer says what a query sees by a mask, by positions (`indices`) or by numbers of blocks (`block_indices`). Nobody
compresses anything of such a model: its caches are its own. After a step the books get what its layers attended to,
what they hold, and what of an index they read to choose: all of it, as every query is compared with every entry.

Attention reads hidden tokens too and leaves them out, so that times are no times of a sparse kernel.

Not here: which layers are such (`engine/checkpoints/choosing.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvbench.engine.books.ledger import Entry
from kvbench.engine.checkpoints.choosing import ENTRIES, INDEXES, OF_ENTRIES
from kvbench.engine.row import Row
from kvbench.engine.softmax import Softmax

WAITING = ("buffer_kv", "buffer_gate", "overlap_kv", "overlap_gate")  # of tokens that are to become an entry
BLOCK = 128  # queries that meet all keys in one product


def seen_by(k: Tensor, mask: Tensor, others: Mapping[str, Any], block: int) -> Tensor:
    """Which keys each query sees, (n, heads, s_q, s): the same for all heads, or for each group of them.

    `mask` is 0 where nothing is hidden; `block` is how many tokens a numbered block has.
    """
    seen = mask == 0
    if (indices := others.get("indices")) is not None:  # (n, s_q, most)
        seen = seen & marked(indices.unsqueeze(1), k.shape[2])
    if (blocks := others.get("block_indices")) is not None:  # (n, groups, s_q, most)
        chosen = marked(blocks, -(-k.shape[2] // block))
        seen = seen & chosen.repeat_interleave(block, -1)[..., : k.shape[2]]
    return seen


def marked(numbers: Tensor, n: int) -> Tensor:
    """Which of `n` numbers are among these (…, most), of which negative ones are none: (…, n) bool."""
    marks = torch.zeros(*numbers.shape[:-1], n + 1, dtype=torch.bool, device=numbers.device)
    return marks.scatter_(-1, numbers.long().masked_fill(numbers < 0, n), True)[..., :n]


def attend_seen(q: Tensor, k: Tensor, v: Tensor, softmax: Softmax, seen: Tensor) -> Tensor:
    """Output (n, h, s_q, d_v) of queries over the keys that they see."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    seen = seen.repeat_interleave(q.shape[1] // seen.shape[1], 1) if seen.shape[1] > 1 else seen
    outs = []
    for at in range(0, q.shape[2], BLOCK):
        logits = softmax.logits(q[:, :, at : at + BLOCK], k).masked_fill_(~seen[:, :, at : at + BLOCK], -torch.inf)
        outs.append((softmax.weights(logits, (-1, 1)) @ v.float()).to(q.dtype))
    return outs[0] if len(outs) == 1 else torch.cat(outs, 2)


@dataclass
class Choices:
    """Which keys each query saw in the layers of one pass, (n, heads, s_q, s), for who keeps books."""

    seen: dict[int, Tensor] = field(default_factory=dict)

    def enter(self, cache: Any, rows: Sequence[Row], first: Sequence[int], s_prompt: int) -> None:
        """An entry per layer and token that was read, the first at `first`, to the ledger of each row of the pass."""
        for layer, seen in self.seen.items():
            held, h = Held.of(cache.layers[layer]), rows[0].trace.shape.h
            n_tokens = seen.shape[3] - held.n_entries
            counts = [x.sum(-1).sum(1) * (h // seen.shape[1]) for x in (seen[..., :n_tokens], seen[..., n_tokens:])]
            tokens, entries = (count.tolist() for count in counts)  # of each row and token
            for i, row in enumerate(rows):
                for j in range(seen.shape[2]):
                    n = first[i] + j + 1
                    row.store.ledger.append(held.entry(n - s_prompt, layer, n, tokens[i][j], entries[i][j]))
        self.seen.clear()


class HearsChoices:
    """A session that is told what layers chose."""

    choices: Choices


@dataclass(frozen=True)
class Held:
    """What a layer's cache has of one row, in bytes at 16 bits a number."""

    n_entries: int  # made of several tokens each, after the tokens that a query may see
    kv_bytes: int
    index_bytes: int
    other_bytes: int  # of tokens that wait to become an entry

    @classmethod
    def of(cls, layer: Any) -> "Held":
        k, v = layer.keys, layer.values
        made = getattr(layer, "compressed_kv", {})
        entries = made.get(ENTRIES)
        index = [getattr(layer, name, None) for name in INDEXES] + [made.get(OF_ENTRIES)]
        kv = [k, None if v is k else v, entries]
        rest = [x for name in WAITING for x in vars(layer).get(name, {}).values()]
        n_bytes = (2 * sum(x.numel() for x in some if x is not None) // len(k) for some in (kv, index, rest))
        return cls(0 if entries is None else entries.shape[1], *n_bytes)

    def entry(self, step: int, layer: int, n: int, tokens: int, entries: int) -> Entry:
        """The books of one token of a row, the `n`th of its text, whose heads saw so many tokens and entries."""
        return Entry(
            step=step,
            layer=layer,
            tokens=n,
            attended=tokens,
            resident_kv_bytes=self.kv_bytes,
            resident_meta_bytes=self.index_bytes + self.other_bytes,
            resident_host_bytes=0,
            moved_kv_bytes=0,
            moved_kv_heads_bytes=0,
            moved_meta_bytes=0,
            searched_bytes=0,
            filled_bytes=0,
            released_bytes=0,
            cache_hits=0,
            cache_lookups=0,
            pseudo_tokens=entries,
            read_meta_bytes=self.index_bytes,
        )
