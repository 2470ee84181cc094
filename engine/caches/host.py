"""The tier from which a step fetches tokens: `Host`.

Not here: what is fetched (`methods`), the device's tokens (`engine/layouts`), a tier of codes
(`engine/caches/packed_host.py`).
"""

import torch
from torch import Tensor

from kvbench.engine.attend import Part
from kvbench.kernels.gather import bytes_of_both, move_both
from kvbench.kernels.rows.values import fetch_values


class Host:
    """Tokens of a layer that are attended to where a step fetches them: of the prompt, and generated ones after them.

    As a rule it is another tier, and holds the whole prompt, which all variants share. It may hold some tokens alone,
    numbered as they lie here, and the device may hold it: what is fetched then moves nothing. It may have values alone,
    of the prompt's tokens: generated ones then never come here.
    """

    is_packed = False  # True: tokens are codes, and what is fetched is rebuilt

    def __init__(self, k: Tensor, v: Tensor, n_new: int, positions: Tensor | None = None, near: bool = False) -> None:
        """`positions` (1, h_kv, n) are those of its tokens of the prompt; None: all, in order."""
        self.k, self.v = k, v  # (1, h_kv, n, d_h), never written to; keys that are not here have no dimensions
        self.positions, self.is_near = positions, near
        self.has_keys = k.shape[3] > 0
        self.n_prompt, self.device = v.shape[2], v.device
        # Pinned where the prompt's are: an accelerator writes there.
        room, pinned = (1, v.shape[1], n_new * self.has_keys), v.is_pinned()
        late = (torch.empty(*room, x.shape[3], dtype=v.dtype, device=v.device, pin_memory=pinned) for x in (k, v))
        self.late = move_both(lambda _: next(late), k, v)

    def write(self, at: int, k_new: Tensor, v_new: Tensor) -> None:
        """Take in generated tokens from number `at` on, 0 for the first: (1, h_kv, n, d_h) each."""
        if self.has_keys:
            for late, new in zip(self.late, (k_new, v_new), strict=True):
                late[:, :, at : at + new.shape[2]] = new

    def far_bytes(self, of_token: int, of_value: int) -> int:
        """Bytes of a token of one KV head, of which K and V have `of_token`, and V alone `of_value`."""
        return of_token if self.has_keys else of_value

    def near_bytes(self) -> int:
        """Bytes on the device that all its tokens share."""
        return 0

    def held_bytes(self) -> int:
        """Bytes of all tokens, and of the room for generated ones."""
        return bytes_of_both(self.k, self.v) + bytes_of_both(*self.late)

    def tokens(self, idx: Tensor, mask: Tensor | None, late: bool) -> Part:
        """The tokens at `idx`, left where they are; `late` says that generated ones may be among them.

        Where the host has values alone they are brought, and the keys have no dimensions before the caller makes them.
        """
        if not self.has_keys:
            assert not late and mask is None and idx.shape[1] == self.v.shape[1], (late, idx.shape)
            v = fetch_values(self.v, idx)
            return Part(v[..., :0], v)
        return Part(self.k, self.v, mask, idx=idx, late=self.late if late else None)

    def held(self, stop: int) -> list[tuple[Tensor, Tensor]]:
        """K and V (1, h_kv, n, d_h) of its first `stop` tokens, of the prompt and after it."""
        late_k, late_v = (x[:, :, : max(0, stop - self.n_prompt)] for x in self.late)
        return [(self.k[:, :, :stop], self.v[:, :, :stop]), (late_k, late_v)]

    def keys(self, start: int, stop: int) -> Tensor:
        """Keys (h_kv, n, d_h) of the tokens from `start` to `stop`, as they are numbered here."""
        s, late = self.n_prompt, self.late[0][0, :, max(0, start - self.n_prompt) : max(0, stop - self.n_prompt)]
        return late if start >= s else torch.cat([self.k[0, :, start : min(stop, s)], late], 1)

    def positions_of(self, idx: Tensor, s_prompt: int) -> Tensor:
        """Positions of the tokens that a selection (1, h_kv or h, k) names, -1 where it names none."""
        idx = idx.int().long()  # a GPU's keys have scores in their upper halves
        if self.positions is None:
            return idx
        n = self.positions.shape[-1]
        owned = self.positions.repeat_interleave(idx.shape[1] // self.positions.shape[1], 1)
        of_prompt = owned.gather(-1, idx.clamp(0, n - 1))
        return torch.where(idx < n, of_prompt, idx - n + s_prompt).where(idx >= 0, -1)
