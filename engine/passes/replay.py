"""A whole decode step as one CUDA graph: the model, and of all its layers what is appended, searched and attended to.

The launches of a layer's step are planned once (`engine/layouts/launch_plan.py`): kernels read the step's number on the
device, so that nothing of what the host hands them changes from step to step. Once all layers have made such a step it
is captured, and those after it are replayed: one launch each. At an event, such as a block that is full, room that ends
or rows that leave, a step is made without the graph and planned anew, and the next one is captured.

Rows that end before the others go on in the graph, unheard, until half of them have ended; who asks these rows again
does without.

What is captured is the step just made. Where it may be made twice, it is replayed once on the spot, and must end with
the same logits. Where that fails, and where steps differ, they are launched as planned without a graph.

Not here: which steps are alike (`engine/layouts/launch_plan.py`), the books of replayed ones
(`engine/books/pending.py`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvbench.engine.books.spans import is_recording
from kvbench.engine.causal import Chunk
from kvbench.engine.layouts.launch_plan import LaunchPlan
from kvbench.engine.layouts.sub_batches import SubBatch
from kvbench.engine.passes.capturing import Waits, begin, end, without_waiting
from kvbench.engine.passes.session import Runner
from kvbench.engine.passes.streams import stream_for
from kvbench.engine.softmax import Softmax
from kvbench.kernels.clock import Clock
from kvbench.kernels.jit import constants

LEAST = 3  # replays that a captured step is worth
OFF, OFF_HALF = 1e-4, 0.02  # what a graph's logits may be off, of the largest one: in float32, in other dtypes


def obstacle(model: Runner) -> str | None:
    """What of the model stands against CUDA graphs of its steps."""
    if model.device.type != "cuda":
        return "the model is on a CPU"
    if not model.allows_graphs:
        return "cuda_graphs=never"
    if len(model.devices) > 1:
        return "the model is on several GPUs"
    return "layers have caches of their own" if model.shape.n_own else None


class Launching:
    """A session that launches the step of each layer as planned, and writes nothing down."""

    def __init__(self, layers: dict[int, LaunchPlan]) -> None:
        self.layers = layers

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax, window: int | Chunk | None
    ) -> Tensor:
        return self.layers[layer].launch(q, k, v, softmax)


class Replay:
    """Steps of a batch whose rows share their launches."""

    def __init__(
        self, model: Runner, sub_batch: SubBatch, which: Sequence[int], clock: Clock
    ) -> None:  # fmt: skip
        """`which` are the numbers that the batch gives the rows."""
        self.model, self.sub_batch, self.clock = model, sub_batch, clock
        self.which, self.live = list(which), list(which)
        self.graph: Any = None
        self.why_not: str | None = None  # why a capture failed: no other is tried

    def take(self, which: Sequence[int], ids: Tensor, cache: Any, are_last: bool) -> Tensor | None:
        """The step of `which` rows, a token each (n, 1): logits (n, vocabulary), which hold until the next one.

        None: there is no graph of it. Rows that leave are forgotten where `are_last`: nobody asks them again.
        """
        if self.graph is None or not self.holds() or not self.hears(which, are_last):
            self.graph = None
            return None
        if self.at is None:
            self.ids.copy_(ids)
        else:
            self.ids.index_copy_(0, self.at, ids)
        self.graph.replay()
        self.clock.tick_host()
        for plan in self.searching:
            plan.enter_searches()
        self.sub_batch.pending.add(self.write, self.clock.now)
        self.model.count_token(cache)
        return self.logits if self.at is None else self.logits.index_select(0, self.at)

    def holds(self) -> bool:
        """Whether the next step is like the captured one."""
        if self.clock.now >= self.until:
            return False
        if self.sub_batch.pending.n_flushed != self.n_flushed:
            self.n_flushed = self.sub_batch.pending.n_flushed
            return all(plan.is_as_it_was(plan.age) for plan in self.plans.values())
        return True

    def hears(self, which: Sequence[int], are_last: bool) -> bool:
        """Whether the graph goes on for these rows: all, or what is left of them."""
        if self.live == which:
            return True
        if not are_last or 2 * len(which) < len(self.which) or not {*which} <= {*self.live}:
            return False
        self.sub_batch.pending.flush()
        self.n_flushed = self.sub_batch.pending.n_flushed
        left = [i for i, one in enumerate(self.which) if one in which]
        if [self.which[i] for i in left] != which:
            return False
        self.live, self.at = list(which), constants(tuple(left), self.model.device)
        self.sub_batch.pending.stores = [self.sub_batch.rows[i].store for i in left]
        for plan in self.plans.values():
            for i, at in enumerate(plan.layers):
                at.is_over = i not in left
        return True

    def write(self, now: int) -> None:
        """Bring a replayed step into the books of all layers."""
        for plan in self.plans.values():
            plan.write(now - plan.start)

    def make(self, ids: Tensor, position: int | Tensor, make: Callable[[], Tensor]) -> Tensor:
        """A step that `make` makes, which is captured if the next ones are like it."""
        if not self.is_due():
            return make()
        logits = torch.empty(0)
        try:
            with without_waiting():
                logits = make()
            waits = ""
        except Waits as error:
            waits = str(error)
        if self.is_due() and all(plan.age for plan in self.plans.values()):
            if waits:
                self.why_not = waits
            else:
                self.prepare(ids, position, logits)
        return logits

    def is_due(self) -> bool:
        """Whether the launches of all layers are planned for some more steps."""
        if self.why_not is not None or is_recording():
            return False
        self.plans = dict(self.sub_batch.plans)
        if {*self.plans} != {*self.model.shape.attention_layers}:
            return False
        if not all(plan.is_replayable for plan in self.plans.values()):
            return False
        self.until = min(plan.start + plan.n_steps for plan in self.plans.values())
        return self.until - self.clock.now >= LEAST

    def prepare(self, ids: Tensor, position: int | Tensor, logits: Tensor) -> None:
        """Capture the step that was just made of `ids` and gave these logits."""
        try:
            self.capture(ids, position)
            if all(plan.is_repeatable for plan in self.plans.values()):
                self.check(logits)
        except (RuntimeError, NotImplementedError) as error:  # out of memory is one, too
            self.graph = None
            self.model.__dict__.pop("graph_pool", None)  # the next one begins with other memory
            self.why_not = f"capturing a step failed: {first_cause(error)}"

    def capture(self, ids: Tensor, position: int | Tensor) -> None:
        """The graph of the step after the one at `position`."""
        model, device = self.model, self.model.device
        self.ids, self.at, self.n_flushed = ids.clone(), None, self.sub_batch.pending.n_flushed
        self.positions = torch.full_like(ids, position) if isinstance(position, int) else position.clone()
        pool, stream, graph = model.graph_pool, stream_for("capture", device), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            begin(graph, pool)
            try:
                self.clock.tick_devices()
                self.positions.add_(1)
                self.logits = model.forward(self.ids, self.positions, model.new_cache(), Launching(self.plans))
            finally:
                end(graph, pool, device)
        torch.cuda.current_stream(device).wait_stream(stream)
        self.graph = graph
        self.searching = [plan for plan in self.plans.values() if plan.searches]

    def check(self, logits: Tensor) -> None:
        """Make the captured step once more, and raise where it ends otherwise."""
        self.clock.tick_devices(-1)
        self.positions.sub_(1)
        self.graph.replay()
        off = (self.logits - logits).abs().max() / logits.abs().max().clamp(min=1e-6)
        if not off.item() <= (OFF if self.model.dtype == torch.float32 else OFF_HALF):
            raise RuntimeError(f"its logits were {off.item():.2g} off the step's own")


def first_cause(error: BaseException) -> str:
    """The first line of what went wrong first: a capture that is broken off fails once more when it is ended."""
    while error.__context__ is not None:
        error = error.__context__
    return str(error).partition("\n")[0]
