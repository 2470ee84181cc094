"""In a checkout: `import kernels` never finds our folder of that name, whose modules are `kvbench.kernels`.

Python looks for modules in the working directory too, and there stand `kernels/`, `tasks/`, `results/`: names that
other packages have (transformers imports Hugging Face's `kernels`), and a second name for each of our modules. So the
checkout's folder is searched for everything but them. `make setup` writes a .pth file that runs this file whenever
Python starts, so that it holds before anything of ours is asked for.
"""

import os
import sys
from importlib.abc import PathEntryFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

VERSION = "0.2.0"
PACKAGE = os.path.dirname(os.path.realpath(__file__))
ROOT = os.path.dirname(PACKAGE)
if os.path.isfile(os.path.join(PACKAGE, "engine")):  # what git leaves where it may make no links
    raise ImportError(f"{PACKAGE}/engine is no link to engine/: git clone -c core.symlinks=true, or install a wheel")
LINKS = {name for name in os.listdir(PACKAGE) if os.path.islink(os.path.join(PACKAGE, name))}
ROOMS = frozenset(LINKS | {"run"} if LINKS else LINKS)  # what is hidden, run.py among it; nothing in a wheel
# A line of a .pth file. It leaves no module: what `kvbench` is, the program's own search finds.
AT_START = """import os; f = {file!r}; t = {{"__name__": "kvbench.checkout", "__file__": f}}; \
os.path.isfile(f) and (exec(open(f, encoding="utf-8").read(), t), t["hide_rooms"]())
"""


def runs() -> str:
    """The folder where runs go by default: in the checkout, or the working directory of an installed KVBench."""
    return os.path.join(ROOT if ROOMS else os.getcwd(), "runs")


def hide_rooms() -> None:
    if not ROOMS:
        return

    def finder(path: str) -> PathEntryFinder:
        """Python's own finder of the checkout's folder, but for our rooms; other folders are other hooks' matter."""
        try:
            if not os.path.samefile(path, ROOT):
                raise ImportError(path=path)
        except OSError:
            raise ImportError(path=path) from None
        behind = sys.path_hooks[sys.path_hooks.index(finder) + 1 :]
        own = next(made for hook in behind if (made := tried(hook, path)))
        find = own.find_spec

        def find_spec(fullname: str, target: ModuleType | None = None) -> ModuleSpec | None:
            return None if fullname.partition(".")[0] in ROOMS else find(fullname, target)

        own.find_spec = find_spec
        return own

    sys.path_hooks.insert(0, finder)
    for path in [*sys.path_importer_cache]:  # as it was searched until now
        try:
            known = os.path.samefile(path, ROOT)
        except OSError:
            continue
        if known:
            del sys.path_importer_cache[path]


def tried(hook: object, path: str) -> PathEntryFinder | None:
    """What a hook makes of a path; None where it is not its kind."""
    try:
        return hook(path)  # pyright: ignore[reportCallIssue]
    except ImportError:
        return None


def hide_at_start() -> None:
    """Hide the rooms whenever this Python starts; for `make setup`."""
    import sysconfig

    with open(os.path.join(sysconfig.get_path("purelib"), "kvbench-rooms.pth"), "w", encoding="utf-8") as file:
        file.write(AT_START.format(file=os.path.join(PACKAGE, "checkout.py")))
