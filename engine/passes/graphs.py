"""CUDA graphs of what the model itself does in a decode step: one launch for all that lies between two attentions.

From the attention of one layer to that of the next a model does the same at every step, whatever methods keep:
projections, norms, rotation, MLP. Each such part is captured once for a number of rows, and replayed after that.
Attention runs between the parts as ever, with lengths and lists that change.

A part writes where it wrote before. What a session gets is therefore a copy, which it may keep or send to the host
while the next step goes on.

The step that is captured runs without graphs first. Its attention's outputs then go through the captured parts, which
must end with the same queries, keys, values and logits; otherwise, and where capturing fails, steps stay without
graphs, and `StepGraphs.why_not` says why.

Not here: attention, and steps whose hooks on the model change what it computes (looking ahead): they run without.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvbench.engine.causal import Chunk
from kvbench.engine.passes.capturing import begin, end, without_waiting
from kvbench.engine.passes.session import Runner, Session
from kvbench.engine.passes.streams import stream_for
from kvbench.engine.softmax import Softmax

WARM = 3  # steps with so many rows before they are captured: libraries make their buffers by then
MOST = 8  # numbers of rows that are kept at once
APART = 1e-4  # what parts may differ by, relative to the largest number, in float32; of other dtypes:
APART_HALF = 0.02


@dataclass
class Call:
    """An attention call between two parts; tensors are where the graphs read and write."""

    layer: int
    qkv: Tensor  # q, k and v one after the other, flat
    shapes: tuple[torch.Size, torch.Size, torch.Size]
    soft: Softmax
    window: int | Chunk | None
    out: Tensor

    def fresh(self) -> tuple[Tensor, Tensor, Tensor]:
        """Copies of q, k and v."""
        q, k, v = self.qkv.clone().split([shape.numel() for shape in self.shapes])
        return q.view(self.shapes[0]), k.view(self.shapes[1]), v.view(self.shapes[2])


@dataclass
class Seen:
    """A session's attention in one step, noted."""

    session: Session
    calls: list[tuple[Tensor, Tensor, Tensor, Tensor]]  # q, k, v, out

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, soft: Softmax, window: int | Chunk | None) -> Tensor:
        before = [x.clone() for x in (q, k, v)]
        out = self.session.attend(layer, q, k, v, soft, window)
        self.calls.append((before[0], before[1], before[2], out))
        return out


class Repeated:
    """A session's attention in a step that is over, once more."""

    def __init__(self, calls: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]]) -> None:
        self.outs = iter([out for *_, out in calls])

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, soft: Softmax, window: int | Chunk | None) -> Tensor:
        return next(self.outs)


class Different(RuntimeError):
    """Parts did not compute what the model did."""


class Parts:
    """The captured parts of a step with so many rows."""

    def __init__(self, model: Runner, ids: Tensor, positions: Tensor, pool: Any, stream: Any) -> None:
        self.pool, self.calls, self.graphs = pool, list[Call](), list[Any]()
        self.ids, self.positions = ids.clone(), positions.clone()
        stream.wait_stream(torch.cuda.current_stream(model.device))
        with torch.cuda.stream(stream):
            self.begin()
            try:
                self.logits = model.forward(self.ids, self.positions, model.new_cache(), self)
            finally:
                end(self.graphs[-1], self.pool, model.device)
        torch.cuda.current_stream(model.device).wait_stream(stream)

    def begin(self) -> None:
        graph = torch.cuda.CUDAGraph()
        begin(graph, self.pool)  # other threads cluster meanwhile
        self.graphs.append(graph)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, soft: Softmax, window: int | Chunk | None) -> Tensor:
        """Ends a part and begins the next one; stands in the model's attention while it is captured."""
        qkv = torch.cat([x.reshape(-1) for x in (q, k, v)])
        end(self.graphs[-1], self.pool, q.device)
        out = q.new_empty(*q.shape[:3], v.shape[3])
        self.calls.append(Call(layer, qkv, (q.shape, k.shape, v.shape), soft, window, out))
        self.begin()
        return out

    def replay(self, attend: Callable[[int, Call], Tensor]) -> Tensor:
        """All parts in their order; `attend` gets each call's number, and gives its output. Returns the logits."""
        for i, (graph, call) in enumerate(zip(self.graphs, self.calls, strict=False)):
            graph.replay()
            call.out.copy_(attend(i, call))
        self.graphs[-1].replay()
        return self.logits.clone()

    def check(self, seen: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]], logits: Tensor) -> None:
        """Raise where the parts do not compute what the step did that was seen."""
        pairs: list[tuple[Tensor, Tensor]] = []

        def attend(i: int, call: Call) -> Tensor:
            *inputs, out = seen[i]
            pairs.extend(zip(call.fresh(), inputs, strict=True))
            return out

        pairs.append((self.replay(attend), logits))
        check_close(pairs, seen[0][0].dtype, "the model's own numbers")


def check_close(pairs: Sequence[tuple[Tensor, Tensor]], dtype: torch.dtype, whose: str) -> None:
    """Raise `Different` where what was found is not what is right, give or take how `dtype` rounds; this waits."""
    apart = [
        (found.float() - right.float()).abs().max() / right.float().abs().max().clamp(min=1e-6)
        for found, right in pairs
    ]
    most = torch.stack(apart).max().item()
    if not most <= (APART if dtype == torch.float32 else APART_HALF):
        raise Different(f"they were {most:.2g} off {whose}")


class StepGraphs:
    """Decode steps of one model by graphs, where that can be. The model has it; it does not hold the model."""

    def __init__(self, why_not: str | None) -> None:
        """`why_not` is what stands against graphs from the outset."""
        self.why_not = why_not
        self.parts: dict[int, Parts] = {}  # by number of rows, used last stands last
        self.n_rows = self.n_alike = 0  # of the last steps
        self.n_replayed = 0
        self.n_whole = 0  # of them those of whole steps (engine/passes/replay.py)
        self.why_in_parts: str | None = None  # what stands against whole steps
        self.pool: Any = None  # memory of all parts, which are never replayed at once

    @staticmethod
    def obstacle(model: Runner) -> str | None:
        """What of the model stands against graphs."""
        if model.device.type != "cuda":
            return "the model is on a CPU"
        if not model.allows_graphs:
            return "cuda_graphs=never"
        if len(model.devices) > 1:
            return "the model is on several GPUs"
        if model.shape.n_own:
            return "layers have caches of their own"
        return None

    def step(
        self, model: Runner, ids: Tensor, position: int | Tensor, cache: Any, session: Session
    ) -> Tensor:  # fmt: skip
        """One token per row, (n, 1): logits of the next, (n, vocabulary) float32."""
        n = len(ids)
        if self.why_not is not None or not self.is_ready(n):
            return model.forward(ids, position, cache, session)
        with torch.inference_mode():
            parts = self.parts.pop(n, None)
            if parts is None:
                return self.capture(model, ids, position, cache, session)
            self.parts[n] = parts
            parts.ids.copy_(ids)
            if isinstance(position, Tensor):
                parts.positions.copy_(position)
            else:
                parts.positions.fill_(position)
            logits = parts.replay(lambda _, call: session.attend(call.layer, *call.fresh(), call.soft, call.window))
            self.n_replayed += 1
            model.count_token(cache)
            return logits

    def pool_of_all(self) -> Any:
        """Memory that graphs are captured into."""
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
        return self.pool

    def forget_pool(self) -> None:
        """After a capture that failed, let the next one begin with other memory, unless graphs are in this one."""
        if not self.parts:
            self.pool = None

    def is_ready(self, n: int) -> bool:
        """Whether so many rows have parts, or came often enough to be captured."""
        self.n_alike = self.n_alike + 1 if n == self.n_rows else 1
        self.n_rows = n
        return n in self.parts or self.n_alike > WARM

    def capture(
        self, model: Runner, ids: Tensor, position: int | Tensor, cache: Any, session: Session
    ) -> Tensor:  # fmt: skip
        """The step without graphs, and the parts for those to come."""
        seen = Seen(session, [])
        positions = position if isinstance(position, Tensor) else torch.full_like(ids, position)
        logits = model.forward(ids, positions, cache, seen)
        try:
            with without_waiting():
                model.forward(ids, positions, model.new_cache(), Repeated(seen.calls))
            torch.cuda.synchronize(model.device)
            parts = Parts(model, ids, positions, self.pool_of_all(), stream_for("capture", model.device))
            parts.check(seen.calls, logits)
        except (RuntimeError, NotImplementedError) as error:  # out of memory is one, too
            self.parts = {}
            self.forget_pool()
            self.why_not = f"capturing a step failed: {first_cause(error)}"
            return logits
        self.parts[len(ids)] = parts
        if len(self.parts) > MOST:
            del self.parts[next(iter(self.parts))]
        return logits


def first_cause(error: BaseException) -> str:
    """The first line of what went wrong first: a capture that is broken off fails once more when it is ended."""
    while error.__context__ is not None:
        error = error.__context__
    return str(error).partition("\n")[0]
