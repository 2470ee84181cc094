"""What a round of k-means writes on a GPU."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvbench.benchmarks.pretend.cuda import Machine
from kvbench.kernels.kmeans import as_product, cluster_means, cluster_means_ref, draw_points, nearest, similarities


class Written(TorchDispatchMode):
    """Bytes of new tensors, which whoever asks for them writes."""

    n_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.n_bytes += sum(x.nbytes for x in tree_leaves(made) if isinstance(x, Tensor))
        return made


def test_a_round_writes_labels_and_means_alone(machine: Machine) -> None:
    """Similarities, rows of ones and zeros and their copies are of points times clusters."""
    n, c, d = 320, 40, 16
    host = torch.randn(1, n, d, generator=torch.Generator().manual_seed(0))
    points, centroids = host.to("cuda"), draw_points(host, c, torch.Generator().manual_seed(1)).to("cuda")
    with Written() as written:
        labels = nearest(points, centroids, "dot")
        means, _ = cluster_means(points, labels, centroids)
    assert written.n_bytes <= n * 28 + c * (4 + 3 * 8 + 2 * 4 * d) + means.nbytes
    with Written() as before:
        found = [x.max(-1).indices for _, x in similarities(points, *as_product(centroids, "dot"))]
        expected, _ = cluster_means_ref(points, torch.cat(found, 1), centroids)
    assert before.n_bytes > 16 * n * c
    torch.testing.assert_close(means.cpu(), expected.cpu())
