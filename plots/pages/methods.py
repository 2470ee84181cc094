"""What a method's own file says of it: its title, whether it fetches, what it has fewer of.

Not here: a variant's name, which runs give (`words.py`).
"""

import re
from functools import cache

from kvbench.results.names import known, own_methods


@cache
def source(method: str) -> str:
    """A method's folder, from the repository's root, and what its file says; "" of a method that is not ours."""
    path = own_methods().get(method)
    return "" if path is None else f"methods/{path.parent.name}/\n{path.read_text(encoding='utf-8')}"


def title(method: str) -> str:
    """A method's title in its file; of a preset, the method's. A variant's label says more."""
    found = re.search(r'^    title = "(.+)"$', source(default_of(method)), re.MULTILINE)
    return method if found is None else found[1]


def default_of(method: str) -> str:
    """The method of a preset; of every other name itself."""
    return known(method) or method


def fetches(method: str) -> bool:
    """Whether it keeps all keys and values in host memory, and takes what a step needs from there."""
    return source(method).startswith("methods/retrieving/")


BITS, TOKENS, BOTH = "fewer bits", "fewer tokens", "fewer tokens in fewer bits"


def kind(method: str) -> str:
    """What a variant has fewer of than full attention, for the same bytes."""
    if "+" in method:
        return BOTH
    return BITS if source(default_of(method)).startswith("methods/quantising/") else TOKENS
