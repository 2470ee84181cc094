"""Rotations and codebooks of TurboQuant: every coordinate of a rotated unit vector has one distribution, known before.

Shapes    rotation (d_h, d_h); centroids (2**b,) ascending, of coordinates of a unit vector.

Not here: codes of a cache (`methods/quantising/turboquant.py`).
"""

from functools import cache
from math import lgamma, log, pi

import numpy as np
import torch
from torch import Tensor

ROUNDS = 5000  # of Lloyd's iteration at most; some hundreds bring 4 bits to 1e-12
POINTS = 20_001  # of the grid that integrals over a cell are summed on
NODES, WEIGHTS = np.polynomial.legendre.leggauss(64)  # of an integral over one cell


def density(x: np.ndarray, d_h: int, is_normal: bool) -> np.ndarray:
    """Density of one coordinate of a uniform unit vector of d_h dimensions, or of the normal distribution near it."""
    if is_normal:
        return np.exp(-d_h / 2 * x * x) * (d_h / (2 * pi)) ** 0.5
    scale = lgamma(d_h / 2) - 0.5 * log(pi) - lgamma((d_h - 1) / 2)
    return np.exp(scale + (d_h - 3) / 2 * np.log1p(-np.square(np.clip(x, -1 + 1e-15, 1 - 1e-15))))


def moments(edges: np.ndarray, d_h: int, is_normal: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mass, first and second moment of the density between neighbouring edges."""
    low, high = edges[:-1, None], edges[1:, None]
    x = (low + high) / 2 + (high - low) / 2 * NODES
    f = density(x, d_h, is_normal) * WEIGHTS * (high - low) / 2
    return f.sum(1), (f * x).sum(1), (f * x * x).sum(1)


@cache
def solved(d_h: int, bits: int, is_normal: bool = False) -> tuple[tuple[float, ...], float]:
    """Centroids that minimise the squared error, and this error of a unit vector, all coordinates summed."""
    reach = 12 / d_h**0.5 if is_normal else min(1.0, 12 / d_h**0.5)  # the mass beyond is nothing in double precision
    grid = np.linspace(-reach, reach, POINTS)
    shares = np.cumsum(density(grid, d_h, is_normal))
    quantiles = (np.arange(2**bits) + 0.5) / 2**bits
    centroids = np.interp(quantiles, shares / shares[-1], grid)
    for _ in range(ROUNDS):
        edges = np.concatenate([[-reach], (centroids[1:] + centroids[:-1]) / 2, [reach]])
        mass, first, second = moments(edges, d_h, is_normal)
        better = first / mass
        better = (better - better[::-1]) / 2  # symmetric, like the density
        done = np.abs(better - centroids).max() < 1e-13
        centroids = better
        if done:
            break
    edges = np.concatenate([[-reach], (centroids[1:] + centroids[:-1]) / 2, [reach]])
    mass, first, second = moments(edges, d_h, is_normal)
    error = d_h * float((second - 2 * centroids * first + np.square(centroids) * mass).sum())
    return tuple(centroids.tolist()), error


def centroids(d_h: int, bits: int, is_normal: bool) -> Tensor:
    """Centroids of the codebook, float32."""
    return torch.tensor(solved(d_h, bits, is_normal)[0], dtype=torch.float32)


def hadamard(d_h: int) -> Tensor:
    """Sylvester's matrix with rows of length 1; symmetric, its own inverse, without random signs."""
    matrix = torch.ones(1, 1)
    while len(matrix) < d_h:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / d_h**0.5


def haar(d_h: int, seed: int) -> Tensor:
    """A random rotation, uniform over all."""
    draw = torch.Generator().manual_seed(seed)
    q, r = torch.linalg.qr(torch.randn(d_h, d_h, dtype=torch.float64, generator=draw))
    return (q * r.diagonal().sign()).float()


def midpoints(table: Tensor) -> Tensor:
    return (table[1:] + table[:-1]) / 2


def nearest(z: Tensor, table: Tensor) -> Tensor:
    """Index of the nearest centroid, uint8; a value on a midpoint goes to the lower one."""
    return torch.bucketize(z, midpoints(table).to(z)).to(torch.uint8)


def mse_codes(x: Tensor, rotation: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """The paper's quantiser: indices (…, d_h) and norms (…, 1) of vectors x (…, d_h); zero vectors have norm 0."""
    norms = x.norm(dim=-1, keepdim=True)
    unit = torch.where(norms > 0, x / norms, 0)
    return nearest(unit @ rotation.mT, table), norms


def mse_rebuilt(codes: Tensor, norms: Tensor, rotation: Tensor, table: Tensor) -> Tensor:
    return norms * (table.to(norms)[codes.long()] @ rotation)


def signs_of(x: Tensor, norms: Tensor, units: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """For `prod`: signs (…, d_h) of what rebuilt `units` leave of unit vectors, seen by `s`, and its length (…, 1)."""
    left = torch.where(norms > 0, x / norms, 0) - units
    return (left @ s.mT) >= 0, left.norm(dim=-1, keepdim=True)


def prod_rebuilt(
    codes: Tensor, norms: Tensor, signs: Tensor, lengths: Tensor, rotation: Tensor, table: Tensor, s: Tensor
) -> Tensor:
    """Numbers whose inner products with any query are right in the mean over `s`."""
    d_h = s.shape[0]
    more = (signs.to(norms) * 2 - 1) @ s * ((pi / 2) ** 0.5 / d_h * lengths)
    return mse_rebuilt(codes, norms, rotation, table) + norms * more


def gaussian(d_h: int, seed: int) -> Tensor:
    """The Gaussian matrix by which `prod` projects the residual."""
    return torch.randn(d_h, d_h, generator=torch.Generator().manual_seed(seed + 1))
