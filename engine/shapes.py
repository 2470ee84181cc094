"""`ModelShape`: everything that budget arithmetic and checks need to know of a model, without the model.

Not here: reading it from a checkpoint (`engine/checkpoints/load.py`), so that this file imports without torch.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    name: str
    n_layers: int
    h: int  # query heads
    h_kv: int  # KV heads
    d_h: int  # dimensions of a head
    window: int  # longest sequence the model was made for, prompt and answer together
    attention_layers: tuple[int, ...]  # with full softmax attention: the ones that methods compress
    d_model: int = 0  # values of a token between two layers; 0: not known
    chunked_layers: tuple[int, ...] = ()  # whose tokens see their own chunk of the text alone; nobody compresses them
    chunk: int = 0  # tokens of such a chunk

    def __post_init__(self) -> None:
        assert self.h % self.h_kv == 0, f"h={self.h} is no multiple of h_kv={self.h_kv}"

    @property
    def g(self) -> int:
        """Query heads per KV head."""
        return self.h // self.h_kv
