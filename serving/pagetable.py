"""Which of a request's pages a step attends to, as the table of a paged kernel: `tables_of`, `of_one_head`.

Not here: the kernel (`serving/adapter/attention.py`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvbench.engine.attend import Part
from kvbench.serving.order import Unserved
from kvbench.serving.pages import apart


def tables_of(parts: Sequence[Part], table: Tensor, h_kv: int, block: int) -> tuple[Tensor, Tensor]:
    """vLLM's blocks (h_kv, n) that hold what each KV head attends to, and how many tokens these are (h_kv,).

    All pages are whole but the last one, which is that of the current token.
    """
    some = [part.idx for part in parts if part.idx is not None and part.idx.shape[-1]]
    wide = next((idx.shape[1] for idx in some if idx.shape[1] != h_kv), None)
    if wide is not None:
        raise Unserved("lets query heads choose pages of their own, and a KV head has one table")
    positions = torch.cat([idx[0] for idx in reversed(some)], -1)  # what is resident stands last
    n = positions.shape[1]
    firsts = positions[:, ::block]
    steps = torch.arange(n, device=table.device) % block
    if bool((firsts % block).any()) or not torch.equal(positions, firsts.repeat_interleave(block, 1)[:, :n] + steps):
        raise Unserved(f"selects tokens that are no whole pages of {block} tokens, which are vLLM's blocks")
    return table[firsts // block], torch.full((h_kv,), n, device=table.device)


def of_one_head(chosen: Sequence[tuple[Sequence[Part], Tensor]], cache: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Requests' parts and blocks (m,) as a kernel reads them that has each KV head as a request of one head.

    Blocks of one head (n, 1, block, 2 d_h) of a layer's `cache`, tables of them (requests * h_kv, m), and lengths.
    """
    _, h_kv, block, _ = cache.shape
    found = [tables_of(parts, table, h_kv, block) for parts, table in chosen]
    most = max(table.shape[1] for table, _ in found)
    tables = torch.cat([torch.nn.functional.pad(table, (0, most - table.shape[1])) for table, _ in found])
    blocks, by_block, by_head = apart(cache)
    heads = torch.arange(h_kv, device=cache.device).repeat(len(chosen)).unsqueeze(1)
    return blocks, (tables * by_block + heads * by_head).int(), torch.cat([n for _, n in found]).int()
