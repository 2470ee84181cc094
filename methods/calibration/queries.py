"""Where the queries of a head lie before rotary embedding: TriAttention's offline statistics.

A head's dimensions are pairs, one per frequency: channel i and channel i + d_h / 2, read as a complex number. The array
of one layer is (h, 4, d_h / 2): real and imaginary part of the mean query, the mean of its absolute values, and the
model's angular speeds, which are the same for all heads. A query norm, where the model has one, has been applied. A
model that scales its rotary embedding has scaled the queries once, as it scales keys. A file that was made elsewhere
may have NaN for heads that nobody looked at.

Not here: scores of keys (`methods/decoding/triattention.py`).
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvbench.engine.checkpoints.kinds import backbone
from kvbench.engine.errors import ConfigError
from kvbench.engine.model import Model
from kvbench.engine.passes.rotations import unmoved
from kvbench.engine.shapes import ModelShape
from kvbench.methods.calibration.base import Seen, Statistics

USUAL_BASE = 10_000.0  # of the angular speeds, where there is no model


class Queries(Statistics):
    name = "queries"
    n_tokens, n_block = 8192, 8192  # the authors read up to 32,768 tokens at once; means have settled long before

    def sums(self, seen: Seen) -> dict[str, Tensor]:
        pairs = as_complex(seen.q_before[0].double())  # (h, n, f)
        sums = torch.stack([pairs.real.sum(1), pairs.imag.sum(1), pairs.abs().sum(1)], 1)
        return {"sums": sums, "n": torch.tensor(pairs.shape[1])}

    def arrays(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        means = sums["sums"] / sums["n"]  # (h, 3, f)
        f = means.shape[-1]
        speeds = usual_speeds(f).to(means).expand(len(means), 1, f)
        return {"statistics": torch.cat([means, speeds], 1).float()}

    def measure(self, model: Model, ids: Sequence[int]) -> Mapping[str, Tensor]:
        speeds = speeds_of(model)
        found = super().measure(model, ids)["statistics"]
        own = speeds.to(found).expand_as(found[:, :, 3]).unsqueeze(2)
        return {"statistics": torch.cat([found[:, :, :3], own], 2)}


def as_complex(x: Tensor) -> Tensor:
    """Channels (..., d_h) as (..., d_h / 2) complex numbers: the front half real, the back half imaginary."""
    front, back = x.chunk(2, -1)
    return torch.complex(front, back)


def usual_speeds(f: int) -> Tensor:
    """Angular speeds of `f` frequencies by the usual base, float64."""
    return USUAL_BASE ** -(torch.arange(f, dtype=torch.float64) / f)


def speeds_of(model: Model) -> Tensor:
    """The model's own angular speeds; `ConfigError` where a head is not whole pairs of front and back channels."""
    found = [m.inv_freq for m in backbone(model.hf).modules() if isinstance(getattr(m, "inv_freq", None), Tensor)]
    if model.turn is None or unmoved in model.turn.values() or not found or 2 * len(found[0]) != model.shape.d_h:
        raise unpaired(model.shape)
    return found[0]


def unpaired(shape: ModelShape) -> ConfigError:
    """The error for a model whose heads are not whole pairs of front and back channels."""
    return ConfigError(
        f"{shape.name} does not rotate all {shape.d_h} dimensions of a head in pairs of a front and a back half, which "
        "TriAttention's statistics need; use another method with it"
    )
