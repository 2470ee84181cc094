"""docs/tour.ipynb: it uses public names only, its stored outputs are whole, and it runs."""

import ast
import base64
import importlib
import re
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[1]
TOUR = ROOT / "docs" / "tour.ipynb"
LARGEST_PICTURE = 100_000  # bytes


@pytest.fixture(scope="module")
def tour() -> nbformat.NotebookNode:
    notebook = nbformat.read(TOUR, as_version=4)
    nbformat.validate(notebook)
    return notebook


def code_of(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_its_code_uses_public_names_only(tour: nbformat.NotebookNode) -> None:
    tree = ast.parse("\n\n".join(cell.source for cell in code_of(tour)))
    rooms: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.module
            rooms.add(node.module)
            module = importlib.import_module(node.module)
            assert all(hasattr(module, alias.name) for alias in node.names), node.module
            assert not any(part.startswith("_") for part in node.module.split("."))
        private = {ast.Attribute: lambda n: n.attr, ast.Name: lambda n: n.id, ast.alias: lambda n: n.name}.get(
            type(node), lambda n: ""
        )
        assert not private(node).startswith("_"), ast.unparse(node)
    assert rooms == {"kvbench.evals.notebook", "kvbench.plots.style"}


def test_its_stored_outputs_are_of_one_run_without_errors(tour: nbformat.NotebookNode) -> None:
    cells = code_of(tour)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    progress = "".join(output.text for output in outputs if output.get("name") == "stderr")
    assert all(re.match(r"needle .*: \d/3 ", line) for line in progress.splitlines())
    pictures = [
        base64.b64decode(output.data["image/png"]) for output in outputs if "image/png" in output.get("data", {})
    ]
    assert pictures and max(map(len, pictures)) < LARGEST_PICTURE
    said = "".join(output.text for output in outputs if output.output_type == "stream")
    for title in ("Oracle", "PQCache", "SnapKV (C)"):
        assert title in said


@pytest.mark.slow
def test_it_runs(tour: nbformat.NotebookNode) -> None:
    """A minute; where a machine computes otherwise, what variants say may differ, so outputs are not compared."""
    from nbclient import NotebookClient

    stored = [len(cell.outputs) for cell in code_of(tour)]
    NotebookClient(tour, timeout=900, resources={"metadata": {"path": str(TOUR.parent)}}).execute()
    test_its_stored_outputs_are_of_one_run_without_errors(tour)
    assert [len(cell.outputs) for cell in code_of(tour)] == stored
