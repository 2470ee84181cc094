"""Pages of docs/ that are made of committed answers: `make pages`.

A page is a template (`*.md.j2`), and what it asks is a YAML file beside it; of the register that is docs/register.yaml.

    asked.py     what a page asks: sets of samples, comparisons fixed beforehand
    read.py      committed answers and those of runs, as frames: `committed`, `kept`
    columns.py   a set's answers by column, and how its methods compare
    fixed.py     comparisons fixed beforehand
    queries.py   what is asked of several sets, and of costs
    methods.py   what a method's file says of it
    words.py     names and numbers as they are printed
    figure.py    the pictures of pages
    write.py     pages and the files beside them

Not here: tables of any runs (`plots/tables`), pages that a user makes of his runs (`plots/turns.py`).
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pandas import DataFrame


def committed() -> "DataFrame":
    """The answers of all pages, a row each; the column `page` says of which."""
    from kvbench.plots.pages.read import committed

    return committed()


def kept(name: str) -> "DataFrame":
    """The answers of one page: "results", "register" or "formats"."""
    from kvbench.plots.pages.read import kept

    return kept(name)
