"""`ModelShape`: everything that budget arithmetic and checks need to know of a model, without the model.

`Checkpoint` is what its files say beyond that, before any weight is read.

Not here: reading them from a checkpoint (`engine/checkpoints/load.py`), so that this file imports without torch.
"""

from dataclasses import dataclass
from fractions import Fraction

DRAWN = "random-"  # in front of the digest of a model whose weights are drawn


@dataclass(frozen=True)
class ModelShape:
    name: str
    n_layers: int
    h: int  # query heads
    h_kv: int  # KV heads
    d_h: int  # dimensions of a key as it is cached, and of the queries that meet it
    window: int  # longest sequence the model was made for, prompt and answer together
    attention_layers: tuple[int, ...]  # with full softmax attention: the ones that methods compress
    d_model: int = 0  # values of a token between two layers; 0: not known
    chunked_layers: tuple[int, ...] = ()  # whose tokens see their own chunk of the text alone; nobody compresses them
    chunk: int = 0  # tokens of such a chunk
    hybrid_layers: tuple[int, ...] = ()  # compressed ones with a state besides K and V, which the model keeps to itself
    value_width: int = 0  # dimensions of a value, where it has others than a key; 0: as many
    is_latent: bool = False  # a token is one latent for all heads: a value is the first numbers of its key
    is_capped: bool = False  # some layers bend their logits towards a cap
    readers: tuple[tuple[int, int], ...] = ()  # layers that attend to K and V of a compressed one, and which that is
    left: tuple[tuple[int, int], ...] = ()  # numbers of a token, and of so many tokens, in layers that keep K and V
    state_bytes: int = 0  # of layers with a state in 16 bits, or as they keep it, whatever the text's length
    choosing_layers: tuple[int, ...] = ()  # of a model that chooses its tokens itself; none is compressed

    def __post_init__(self) -> None:
        assert self.h % self.h_kv == 0, f"h={self.h} is no multiple of h_kv={self.h_kv}"
        assert not self.is_latent or (self.h_kv == 1 and self.d_v <= self.d_h), (self.h_kv, self.d_h, self.d_v)

    @property
    def g(self) -> int:
        """Query heads per KV head."""
        return self.h // self.h_kv

    @property
    def d_v(self) -> int:
        """Dimensions of a value."""
        return self.value_width or self.d_h

    @property
    def width(self) -> int:
        """Numbers that are kept of a token of one KV head: its key and its value, which a latent has within its key."""
        return self.d_h if self.is_latent else self.d_h + self.d_v

    @property
    def key_share(self) -> Fraction:
        """Which share of what is kept of a token its key is: half, all of a latent."""
        return Fraction(self.d_h, self.width)

    def compressed_share(self, s: int) -> float:
        """Which share of the cache's bytes the layers that methods compress have, for `s` tokens in 16 bits."""
        kept = 2 * s * len(self.attention_layers) * self.h_kv * self.width
        return kept / (kept + self.left_bytes(s)) if kept else 0.0

    def left_bytes(self, s: int) -> int:
        """Bytes that no method changes: K and V within windows and chunks, and states, for `s` tokens in 16 bits."""
        return self.state_bytes + sum(2 * numbers * min(s, most) for numbers, most in self.left)

    @property
    def kept_layers(self) -> tuple[int, ...]:
        """Layers that keep something of every token: methods' own, or those of a model that chooses by itself."""
        return self.attention_layers or self.choosing_layers

    @property
    def n_own(self) -> int:
        """Layers of which the model keeps something to itself: those that nobody compresses, and those with a state."""
        return self.n_layers - len(self.attention_layers) + len(self.hybrid_layers)


@dataclass(frozen=True)
class Checkpoint:
    """Which model this is, and what of it decides whether a method can work with it."""

    shape: ModelShape
    digests: tuple[str, ...]  # names of what its files hold, its own first
    n_rotary: int  # dimensions of a head that its positions turn by a formula that is known; 0: none
    unturned: tuple[int, ...] = ()  # compressed layers that turn none all the same, once weights have shown it
    where: str = ""  # folder or hub name of its files; empty: it has none

    @property
    def is_drawn(self) -> bool:
        """Whether its weights are drawn at random."""
        return self.digests[0].startswith(DRAWN)
