"""Who may import whom: the arrows between the rooms, read from the source."""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# A room, and what of ours it may import; the longest name that fits a file is its room. `evals` says nothing of
# kernels: attention is the engine's.
MAY_IMPORT = {
    "kernels": {"kernels"},
    "engine": {"kernels", "engine"},
    "methods": {"kernels", "engine", "methods"},
    "results": {"engine.budget", "engine.declared", "engine.errors", "engine.foreign", "engine.terminal", "results"},
    "tasks": {"engine", "methods", "results.intervals", "tasks"},
    "evals.studies": {
        *("engine", "methods", "results", "evals.studies"),
        *("evals.models", "evals.overrides", "evals.settings"),
    },
    "evals.screen": {"engine", "kernels.build", "methods", "results", "tasks", "evals"},  # `make check` names kernels
    "evals": {"engine", "methods", "results", "tasks", "evals"},
    "plots.site": {*("plots", "results", "methods.cite", "engine.errors", "engine.foreign", "engine.terminal")},
    "serving": {"engine", "methods", "evals", "results", "tasks", "serving"},
    "plots": {
        *("plots", "results", "tasks.needle.heatmap", "tasks.calls.damage"),
        *("engine.budget", "engine.errors", "engine.foreign", "engine.terminal"),
    },
    "hydra_plugins": {"evals.composing"},  # within a function: Hydra imports its plugins at every start
    "kvbench": {"comparing", "plots", "results"},  # named for types, imported when asked for
    "checkout": set[str](),
    "run": {"engine.errors", "engine.terminal", "evals", "results", "serving.run"},
    "comparing": {"engine.declared", "engine.errors", "evals", "results", "run"},
    "command": {"run", "engine.terminal"},
    "__main__": {"command"},
    "first_look": {"run", "engine.machine", "engine.terminal", "results", "evals.screen.table", "plots"},
}
LARGEST_SHARE = 0.22  # of the code that a room at the top may hold
LONGEST_FILE = 600  # lines, of one thing; a longer one says "Long because" in its docstring
MOST_FILES = 24  # side by side in a folder, as a screen shows them; no file is there because another one was full
OURS = {*(room for room in MAY_IMPORT if "." not in room), "tests", "benchmarks"} - {"kvbench", "hydra_plugins"}
DOORS = sorted((ROOT / "kvbench").glob("*.py"))
TOP = sorted(name for name in (OURS | {"hydra_plugins"}) - {"tests", "benchmarks"} if (ROOT / name).is_dir())
FILES = [*DOORS, *(file for folder in TOP for file in sorted((ROOT / folder).rglob("*.py")))]
BENCHMARKS = sorted((ROOT / "benchmarks").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
ALL = [*FILES, *BENCHMARKS, *TESTS]


def module_of(file: Path) -> str:
    """The dotted name by which a file is imported, behind `kvbench.`."""
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__").removeprefix("kvbench.")


WITHOUT_TORCH = (
    *("engine.errors", "engine.shapes", "engine.budget", "engine.books.ledger", "run", "first_look"),
    *("results", "evals.settings", "evals.overrides"),
    *(f"evals.screen.{name}" for name in ("caches", "check", "fits", "table")),
    *("methods.rules", "methods.allocator"),
    *(module_of(file) for file in FILES if file.is_relative_to(ROOT / "plots") and file.stem != "__main__"),
)


@cache
def read(source: str) -> tuple[list[str], str]:
    """Dotted names of modules imported anywhere in a file: at the top, inside functions, for type checking. Ours stand
    without the package's name. And all its docstrings."""
    modules, texts = list[str](), list[str]()
    for node in ast.walk(ast.parse(source)):
        names = list[str]()
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative imports hide the room"
            assert node.module
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            texts.append(ast.get_docstring(node) or "")
        for name in names:
            assert name.split(".")[0] not in OURS, f"{name} is kvbench.{name}"
            modules.append(name.removeprefix("kvbench."))
    return modules, "\n".join(texts)


def room_of(module: str) -> str:
    """The innermost room that a module is in."""
    return max((room for room in MAY_IMPORT if f"{module}.".startswith(f"{room}.")), key=len)


def strays(room: str, source: str) -> list[str]:
    """Our modules that `room` imports and may not."""
    found = []
    for name in read(source)[0]:
        allowed = MAY_IMPORT[room] | {"checkout"}  # where our files are; it imports nothing
        if name.split(".")[0] in OURS and not any(f"{name}.".startswith(f"{a}.") for a in allowed):
            found.append(name)
    return found


def test_imports_follow_the_arrows() -> None:
    found = {module: strays(room_of(module), file.read_text()) for file in FILES for module in [module_of(file)]}
    assert {module: names for module, names in found.items() if names} == {}


def test_no_import_leads_back_to_where_it_came_from() -> None:
    """Imports inside functions count, as such a circle only shows itself later, and those for types alone."""
    files = {module_of(file): file.read_text() for file in ALL}
    assert in_circles(files) == []


def in_circles(sources: Mapping[str, str]) -> list[str]:
    """Modules that import each other in a circle, and those above one."""
    arrows = {module: targets(source, sources) - {module} for module, source in sources.items()}
    while free := [module for module, to in arrows.items() if not to & arrows.keys()]:
        for module in free:
            del arrows[module]
    return sorted(arrows)


def targets(source: str, modules: Collection[str]) -> set[str]:
    """Those of the modules that a file imports, or a name of which."""
    names = read(source)[0]
    return {at for name in names for at in [name if name in modules else name.rpartition(".")[0]] if at in modules}


def test_a_circle_is_seen_wherever_an_import_stands() -> None:
    below = {"a": "import b.c", "b.c": "x = 1"}
    assert in_circles(below) == []
    for back in ("from a import x", "def f():\n    import a", "if TYPE_CHECKING:\n    from a import x"):
        assert in_circles(below | {"b.c": back}) == ["a", "b.c"]


def test_no_room_holds_too_much_of_the_code() -> None:
    lines: Counter[str] = Counter()
    for file in [*FILES, *BENCHMARKS]:
        lines[module_of(file).partition(".")[0]] += file.read_text().count("\n")
    room, n = lines.most_common(1)[0]
    assert n <= LARGEST_SHARE * lines.total(), f"{room} holds {n} of {lines.total()} lines"


def test_a_folder_is_seen_at_a_glance() -> None:
    folders = {file.parent for file in [*FILES, *BENCHMARKS]} - {ROOT}
    sizes = {folder: len([*folder.glob("*.py")]) - (folder / "__init__.py").is_file() for folder in folders}
    assert {folder: n for folder, n in sizes.items() if n > MOST_FILES} == {}


def test_a_long_file_says_why() -> None:
    long = [file for file in FILES if file.read_text().count("\n") > LONGEST_FILE]
    assert [file for file in long if "Long because" not in (ast.get_docstring(ast.parse(file.read_text())) or "")] == []


def lost(text: str, folder: Path) -> list[str]:
    """What a docstring names that is neither in the file's folder nor below the root; NAME and * stand for any."""
    rooms = "|".join([*TOP, "tests", "benchmarks", "conf", "docs"])
    named = {*re.findall(r"`([\w/.]*\w\.(?:py|md|yaml)|[a-z_]+/(?:[a-z_]+/)*)`", text)}
    named |= {*re.findall(rf"(?<![\w/.`])((?:{rooms})/[\w/*]+\.(?:py|md|yaml))", text)}
    named = {name for name in named if not re.search("[A-Z]{3}", name)}
    return sorted(name for name in named if not any([*base.glob(name)] for base in (folder, ROOT)))


def test_every_file_that_a_docstring_names_is_there() -> None:
    found = {file: lost(read(file.read_text())[1], file.parent) for file in ALL}
    assert {file: names for file, names in found.items() if names} == {}


def test_a_file_that_is_not_there_is_seen() -> None:
    text = "Not here: steps (`engine/gone.py`, `decode.py`, `sparse/`), tests/test_layers.py, docs/gone.md, `old/`."
    assert lost(text, ROOT / "engine") == ["docs/gone.md", "engine/gone.py", "old/"]


def test_modules_above_the_engine_import_without_torch() -> None:
    """In one process, each after the others: the first that brings torch in is named."""
    assert len(WITHOUT_TORCH) > 50
    code = "import sys\n"
    for module in WITHOUT_TORCH:
        code += f"import kvbench.{module}\nassert not {{'torch', 'transformers'}} & sys.modules.keys(), '{module}'\n"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_torch_waits_while_methods_and_prefills_are_imported() -> None:
    """A command line is checked by them before anything is computed."""
    rooms = ROOT / "methods", ROOT / "engine" / "sparse"
    modules = [module_of(file) for file in FILES if any(map(file.is_relative_to, rooms))]
    code = "import sys, kvbench.engine.lazy as lazy\nlazy.wait_for_torch()\n"
    code += "".join(
        f"import kvbench.{module}\nassert 'torch._C' not in sys.modules, '{module}'\n" for module in modules
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_torch_itself_imported_is_not_run_again() -> None:
    """A file of a user's own may take names from modules below torch, one of which can run but once."""
    code = "import sys, kvbench.engine.lazy as lazy\nlazy.wait_for_torch()\n"
    code += "from torch.fft import rfft\nfrom torch.nn.functional import pad\nimport torch\n"
    code += "assert rfft is torch.fft.rfft and pad is torch.nn.functional.pad\n"
    code += "assert sys.modules['torch.fft'] is torch.fft and torch.fft.__spec__.loader is torch.fft.__loader__\n"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_this_file_sees_a_stray_import() -> None:
    assert strays("engine", "def f():\n    import kvbench.methods.full\n") == ["methods.full"]
    assert strays("engine", "if TYPE_CHECKING:\n    from kvbench.methods.base import X\n") == ["methods.base.X"]
    assert strays("engine", "if TYPE_CHECKING:\n    x = 1\nelse:\n    from kvbench import methods\n") == ["methods"]
    assert strays("plots", "from kvbench.results import X\nfrom kvbench.evals import runner\n") == ["evals.runner"]
    assert strays("plots", "import kvbench.tasks.needle.heatmaps\n") == ["tasks.needle.heatmaps"]
    assert strays("kernels", "import torch\nfrom kvbench.engine import store\n") == ["engine.store"]
    assert strays("evals", "from kvbench.tests.conftest import x\nfrom kvbench import run\n") == [
        "tests.conftest.x",
        "run",
    ]
    with pytest.raises(AssertionError, match="runner is kvbench"):
        strays("plots", "from evals import runner\n")


def test_hydra_finds_its_plugins_in_a_namespace_folder() -> None:
    assert not (ROOT / "hydra_plugins" / "__init__.py").exists()
