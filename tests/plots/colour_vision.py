"""What people with other colour vision see, distances between colours, contrast; for tests and for looking.

python -m kvbench.tests.plots.colour_vision FILE.png …     writes FILE_deutan.png and so on beside each
"""

import sys
from pathlib import Path

import numpy as np
from matplotlib.image import imread, imsave
from numpy.typing import NDArray

Array = NDArray[np.float64]

# Linear RGB to linear RGB, no cone of one kind (Machado, Oliveira and Fernandes, 2009, severity 1).
DEFICIENT: dict[str, Array] = {
    "protan": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deutan": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritan": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
TO_CONES = np.array(
    [[0.4122214708, 0.5363325363, 0.0514459929], [0.2119034982, 0.6806995451, 0.1073969566],
     [0.0883024619, 0.2817188376, 0.6299787005]]
)  # fmt: skip
TO_OKLAB = np.array(
    [[0.2104542553, 0.7936177850, -0.0040720468], [1.9779984951, -2.4285922050, 0.4505937099],
     [0.0259040371, 0.7827717662, -0.8086757660]]
)  # fmt: skip


def linear(coded: Array) -> Array:
    return np.where(coded <= 0.04045, coded / 12.92, ((coded + 0.055) / 1.055) ** 2.4)


def coded(linear_rgb: Array) -> Array:
    clipped = np.clip(linear_rgb, 0, 1)
    return np.where(clipped <= 0.0031308, 12.92 * clipped, 1.055 * clipped ** (1 / 2.4) - 0.055)


def rgb(colour: str) -> Array:
    """Linear, of #RRGGBB."""
    return linear(np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]))


def simulated(linear_rgb: Array, vision: str) -> Array:
    return linear_rgb if vision == "normal" else np.clip(linear_rgb @ DEFICIENT[vision].T, 0, 1)


def seen(colour: str, vision: str) -> str:
    """The colour that looks to all as this one looks in that vision."""
    return "#" + "".join(f"{round(255 * x):02X}" for x in coded(simulated(rgb(colour), vision)))


def distance(one: str, other: str, vision: str) -> float:
    """Between two colours in Oklab (Ottosson, 2020), as seen in a vision."""
    a, b = (TO_OKLAB @ np.cbrt(TO_CONES @ simulated(rgb(colour), vision)) for colour in (one, other))
    return float(np.linalg.norm(a - b))


def contrast(one: str, other: str) -> float:
    """Of WCAG 2.1: 1 for the same, 21 for black on white."""
    low, high = sorted(float(rgb(colour) @ (0.2126, 0.7152, 0.0722)) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        picture = imread(path)[..., :3].astype(np.float64)
        for vision in DEFICIENT:
            imsave(path.with_stem(f"{path.stem}_{vision}"), coded(simulated(linear(picture), vision)))
