"""The package `bfcl-eval`: where its files are, found without importing it.

It pins thirty packages at versions that are not ours (numpy among them), so that it is installed without them; what is
used here, its data and its simulated tools, needs none of them.

Not here: what its files mean (`task.py`), its tools (`world.py`).
"""

from importlib.util import find_spec
from pathlib import Path

NAME = "bfcl_eval"
INSTALL = "pip install --no-deps bfcl-eval==2026.3.23"


def data_file(relative: str) -> Path | None:
    """A file of the package's data; None where it, or the package, is not there."""
    spec = find_spec(NAME)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / "data" / relative
        if path.is_file():
            return path
    return None
