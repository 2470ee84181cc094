"""Methods that seem to hold a budget and do not: each hides from the books what it attends to, reads or holds.

`tests/test_conformance.py` puts them through the suite, `tests/evals/test_cheats.py` through runs.
"""

HEAD = """
import torch
from kvbench.engine.attend import Part
from kvbench.engine.placement import Kept, Offloaded, Whole
from kvbench.engine.selection import Cost, Selection
from kvbench.methods.base import SelectiveAttention

class Mine(SelectiveAttention):
    title, drops = "Mine", {drops}

"""
KEEPS = (
    HEAD.format(drops=True)
    + """
    def arrange(self, layer):
        return Kept(self.budget.tokens)
"""
)
FETCHES = (
    HEAD.format(drops=False)
    + """
    def arrange(self, layer):
        return Offloaded(0, 4)
    def searched(self, layer):
        return self.trace.keys(layer)[..., :-4, :]
    def select(self, layer, q):
        keys = self.searched(layer)
        grouped = q[0, :, 0].unflatten(0, (keys.shape[1], -1)).mean(1)
        scores = (keys[0] @ grouped.unsqueeze(-1)).squeeze(-1)
        return scores.topk(self.budget.tokens - 4).indices.unsqueeze(0)
"""
)
FULL_OUTPUT = """
    def kept(self, layer):
        return self.trace.keys(layer), self.trace.values(layer)
    def resident(self, layer, q):
        self.q = q
        return super().resident(layer, q)
    def after_attention(self, layer, out, weights):
        if self.variant.is_full:
            return out
        g = self.trace.shape.g
        k, v = (x.repeat_interleave(g, 1) for x in self.kept(layer))
        weights = (self.q @ k.mT * self.trace.softmax[layer].scale).softmax(-1)
        return weights @ v
"""
COPIES = """
    def setup(self):
        self.copies = {}
    def build(self, layer):
        self.copies[layer] = self.trace.keys(layer).clone(), self.trace.values(layer).clone()
        super().build(layer)
"""
PSEUDO_TOKENS = (
    KEEPS
    + """
    def resident(self, layer, q):
        rest = slice(self.budget.tokens, None)
        k, v = self.trace.keys(layer)[:, :, rest], self.trace.values(layer)[:, :, rest]
        return [*super().resident(layer, q), *([Part(k, v, is_pseudo=True)] if k.shape[2] else [])]
"""
)
COUNTED_PSEUDO_TOKENS = (
    HEAD.format(drops=False)
    + """
    def arrange(self, layer):
        return Offloaded(self.budget.tokens, 0)
    def select(self, layer, q):
        rest = slice(self.budget.tokens, None)
        k, v = self.trace.keys(layer)[:, :, rest], self.trace.values(layer)[:, :, rest]
        return Selection(stand_ins=[Part(k, v, is_pseudo=True)] if k.shape[2] else [])
"""
)
TOKENS_BESIDE = PSEUDO_TOKENS.replace(", is_pseudo=True", "")
ATTENDS_LATER = KEEPS + FULL_OUTPUT
ATTENDS_LATER_TO_COPIES = (
    ATTENDS_LATER
    + COPIES
    + """
    def kept(self, layer):
        return self.copies[layer]
"""
)
SEARCHES_ALL_KEYS = FETCHES
SEARCHES_A_COPY = (
    FETCHES
    + COPIES
    + """
    def searched(self, layer):
        return self.copies[layer][0][..., :-4, :]
"""
)
COUNTS_A_BYTE = (
    FETCHES
    + """
    @classmethod
    def search(cls, rows, layer, q):
        return [Selection(row.select(layer, q[i : i + 1]), Cost(moved_bytes=1)) for i, row in enumerate(rows)]
"""
)
SKIPS_EVERYTHING = (
    KEEPS
    + """
    @classmethod
    def whole_layers(cls, params, shape):
        return shape.attention_layers
"""
)
SKIPS_AFTERWARDS = (
    HEAD.format(drops=True)
    + """
    def arrange(self, layer):
        return Whole()
    def complete(self):
        self.skipped = self.trace.shape.attention_layers
"""
)
PARTS = ("HEAD", "KEEPS", "FETCHES", "COPIES", "FULL_OUTPUT")
CHEATS = {name: body for name, body in globals().items() if name.isupper() and name not in (*PARTS, "PARTS")}
