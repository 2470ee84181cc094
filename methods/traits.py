"""`Traits`: what a method is and can do, as data.

A method writes each of them as a line of its class, `drops = True`, and those that depend on its parameters in
`traits_of` (`methods/rules.py`). Everybody else reads `traits`; `methods/combinations.py` says what follows from them.

Not here: numbers, such as a plan's; what a method does with tokens (`methods/base.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, Literal

from kvbench.engine.post_processing import AS_THEY_ARE, PostProcessing
from kvbench.methods.allocator import Allocator

UNSAID: Any = None  # of a method that has to say it


@dataclass(frozen=True)
class Traits:
    """Each has the value that most methods have."""

    # Its budget.
    drops: bool = UNSAID  # dropped tokens are gone, and `comm` is paid back as tokens; False: it retrieves
    takes: tuple[str, ...] = ("ratio", "memory")  # a share of tokens; of bytes; "answer": prompt and answer
    has_budget: bool = True  # False: ratio, budget, comm and cache mean nothing to it; it runs once per sweep
    adapts: bool = False  # how much stays follows from each prompt alone: ratio, budget and comm mean nothing to it
    of_answers: bool = False  # its budget is of prompt and answer together, and `comm` means nothing
    skips: bool = False  # it leaves the first `params.full_layers` layers whole
    keeps_budget_in: Literal["step", "mean"] = "step"  # "mean": selections are random, and hold it in the mean
    pads: bool = False  # `select` may return -1 for "no token"
    sends_all: bool = True  # False: a retrieving one has not all of a prompt on the host while it is read
    attends_current: bool = True  # False: the current token has to be selected like all others

    # Scores of a dropping method.
    is_scorer: bool = False  # any allocator may divide its budget
    comparable: Literal["none", "set", "heads", "layers"] = "none"  # over which they may be pooled, from least to most;
    # "set": all heads of a layer keep one set of tokens
    allocator: Allocator | None = None  # how the method itself divides its budget over layers and heads; None: alike
    by_keys: bool = False  # what a token is worth follows from the keys that are there
    judges: Literal["", "keys", "input"] = ""  # by what it scores a single new token; "": it cannot
    weighs_values: bool = False  # the norms of values are in its numbers
    is_query_wide: bool = False  # every query head may keep tokens of its own, so that a KV head holds more
    asks_question: bool = False  # it has to know where in the prompt the question begins
    is_question_free: bool = False  # made for contexts without their question, and labelled elsewhere

    # How it works.
    prunes_prompt: bool = False  # it has a prefill of its own, as `pruning` says
    reads_inputs: bool = False  # it observes what attention modules are called with
    rolls_back: bool = True  # False: its state lies where `fork_of` cannot copy it, and no turn can be undone
    extends: bool = False  # `extend` holds a budget that grows with a conversation
    in_chunks: Mapping[str, Any] | None = None  # parameters that differ where it reads a prompt in chunks
    reads_in_chunks: bool = False  # these parameters are of such a prompt alone
    post_processing: PostProcessing = AS_THEY_ARE  # its own, where no key asks for another

    # Codes.
    changes: bool = False  # what it keeps is not what the model made, such as codes
    composes: bool = False  # it can make codes for another method (`compose=`)
    codes_singly: bool = False  # nothing spans tokens, so that layers and heads may keep other numbers of them
    packs_host: bool = False  # what it fetches may lie on the host as codes; it searches elsewhere

    # Why not, as the end of a sentence; "": it can.
    evicts: str = ""  # why all heads have to keep equal counts, where it goes on dropping tokens
    uneven: str = ""  # how its layers or heads differ in tokens, where no allocator says so
    uncodable: str = ""  # why what it keeps cannot become codes, in addition to what follows from the others
    unchangeable: str | None = None  # why what it keeps stays as it is; None: what follows from the others
    unreadable: str | None = None  # why it cannot read a prompt in chunks with eviction between them; None: likewise
    no_growth: str = ""  # why its budget cannot grow with a conversation, where `grows` says so
    no_widths: str = ""  # why it makes no sense where keys and values have other widths
    no_latents: str = ""  # why it makes no sense where a token is one latent for all heads
    turns_queries: str = ""  # what makes queries meet some tokens turned, which is the queries' own
    eager: str = ""  # what its steps do that no CUDA graph of a whole step could hold

    @property
    def grows(self) -> bool:
        """Whether its budget can grow with a conversation."""
        return not self.has_budget or self.extends or (self.by_keys and not self.evicts)


USUAL = {field.name: field.default for field in fields(Traits)}


def declared(cls: type) -> Traits:
    """The traits of a class: those of its bases, and over them what its body says, which leaves the body."""
    own = {name: value for name, value in vars(cls).items() if name in USUAL}
    for name, value in own.items():
        if callable(value) or isinstance(value, classmethod | staticmethod | property):
            raise TypeError(f"{cls.__name__}.{name} is a trait, and no value; what parameters change is for traits_of")
        delattr(cls, name)
    for name, value in vars(cls).items():
        if isinstance(value, bool) and (near := get_close_matches(name, USUAL, 1, 0.8)):
            raise TypeError(f"{cls.__name__}.{name}={value} is no trait; did you mean {near[0]!r}?")
    said = dict[str, Any]()
    for base in reversed(cls.__bases__):
        traits = vars(getattr(base, "traits", Traits()))
        said |= {name: value for name, value in traits.items() if name not in said or value != USUAL[name]}
    return Traits(**said | own)
