"""Who may import whom: the arrows between the rooms, read from the source."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# A room, and what of ours it may import. `evals` says nothing of kernels: attention is the engine's.
MAY_IMPORT = {
    "kernels": {"kernels"},
    "engine": {"kernels", "engine"},
    "methods": {"kernels", "engine", "methods"},
    "evals": {"engine", "methods", "evals"},
    "plots": {
        "plots",
        "evals.results",
        "evals.tasks.needle.heatmap",
        "evals.foreign",
        "engine.errors",
        "engine.checkpoints.digests",
    },
    "hydra_plugins": set[str](),
    "run": {"engine.errors", "evals"},
}
FOR_TYPES = {"engine": {"methods"}}  # under `if TYPE_CHECKING:` only
OURS = {*MAY_IMPORT, "tests", "benchmarks"}
FILES = [ROOT / "run.py", *(file for room in MAY_IMPORT for file in (ROOT / room).rglob("*.py"))]
WITHOUT_TORCH = (
    *("engine.errors", "engine.shapes", "engine.budget", "engine.ledger", "run"),
    *("evals.results", "evals.settings", "evals.overrides", "evals.table"),
    *(f"plots.{file.stem}" for file in sorted((ROOT / "plots").glob("*.py"))),
)


def imports(tree: ast.AST, for_types: bool = False) -> Iterator[tuple[str, bool]]:
    """Dotted names of modules imported anywhere below, and whether only for type checking."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, for_types) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative imports hide the room"
            assert node.module
            yield from ((f"{node.module}.{alias.name}", for_types) for alias in node.names)
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            yield from imports(ast.Module(node.body, []), for_types=True)
            yield from imports(ast.Module(node.orelse, []), for_types)
        else:
            yield from imports(node, for_types)


def strays(room: str, source: str) -> list[str]:
    """Our modules that `room` imports and may not."""
    found = []
    for name, for_types in imports(ast.parse(source)):
        allowed = MAY_IMPORT[room] | (FOR_TYPES.get(room, set()) if for_types else set())
        if name.split(".")[0] in OURS and not any(f"{name}.".startswith(f"{a}.") for a in allowed):
            found.append(name)
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_imports_follow_the_arrows(file: Path) -> None:
    room = file.relative_to(ROOT).parts[0].removesuffix(".py")
    assert strays(room, file.read_text()) == []


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_this_module_imports_without_torch(module: str) -> None:
    code = f"import sys, {module}; assert not {{'torch', 'transformers'}} & sys.modules.keys()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_this_file_sees_a_stray_import() -> None:
    assert strays("engine", "def f():\n    import methods.full\n") == ["methods.full"]
    assert strays("engine", "if TYPE_CHECKING:\n    from methods.base import X\n") == []
    assert strays("engine", "if TYPE_CHECKING:\n    x = 1\nelse:\n    import methods\n") == ["methods"]
    assert strays("plots", "from evals.results import X\nfrom evals import runner\n") == ["evals.runner"]
    assert strays("plots", "import evals.results_of_others\n") == ["evals.results_of_others"]
    assert strays("kernels", "import torch\nfrom engine import store\n") == ["engine.store"]
    assert strays("evals", "from tests.conftest import x\nimport run\n") == [
        "tests.conftest.x",
        "run",
    ]


def test_hydra_finds_its_plugins_in_a_namespace_folder() -> None:
    assert not (ROOT / "hydra_plugins" / "__init__.py").exists()
