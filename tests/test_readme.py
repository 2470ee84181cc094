"""What the README and the docs promise: their commands compose, their files exist, their example method works."""

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir

from evals.overrides import check_overrides
from evals.settings import build_params, settings
from tests.vectors import request, row_of, step, trace_of

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "runs" / "README.md"]
COMMANDS = sorted({
    line.strip().split("#")[0].strip()
    for page in PAGES
    for line in page.read_text().splitlines()
    if line.strip().startswith("python run.py")
})  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_of_the_docs_composes(command: str) -> None:
    words = check_overrides(command.replace("…", "DATA").split()[2:])
    first = [re.sub(r"=([^,\[]*),.*", r"=\1", word) for word in words if word != "-m"]  # a sweep's first cell
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = compose("config", first, return_hydra_config=True)
    settings(cfg, cfg.hydra.runtime.choices)


def test_there_are_commands_to_check() -> None:
    assert len(COMMANDS) > 5


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_module_and_file_that_a_page_names_is_there(page: Path) -> None:
    text = page.read_text()
    for module in re.findall(r"python -m ([a-z_.]+[a-z])", text):
        assert (ROOT / f"{module.replace('.', '/')}.py").exists(), module
    for file in re.findall(r"`((?:benchmarks|conf|engine|evals|kernels|methods|plots|tests)/[\w/.]+\.\w+)`", text):
        assert (ROOT / file).exists() or "NAME" in file, file


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_make_targets_of_the_readme_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z-]+)", (ROOT / "README.md").read_text())) <= targets


def example() -> tuple[Any, dict[str, Any]]:
    """The class and the YAML of docs/adding-a-method.md."""
    import yaml

    page = (ROOT / "docs" / "adding-a-method.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (config,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    module = ModuleType("methods.largekeys")
    sys.modules[module.__name__] = module  # dataclasses look their module up
    imports = "from dataclasses import dataclass\nfrom methods.base import SelectiveAttention\n"
    exec(imports + code, vars(module))
    return module.LargeKeys, yaml.safe_load(config)


def test_the_example_method_does_what_its_page_says() -> None:
    kind, config = example()
    assert config.pop("_target_") == "methods.largekeys.LargeKeys"
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 201, 16, generator=draw) for heads in (4, 2, 2))
    row = row_of(kind, build_params(kind, config, "method"), trace_of(k, v, 4, 200), request(tokens=80))
    step(row, q[:, :, 200:], k[:, :, 200:], v[:, :, 200:])
    attended = row.store.attended(0)
    assert attended.sum(-1).tolist() == [81] * 4
    assert attended[:, 168:].all()
    largest = k[0, :, :168].norm(dim=-1).topk(48).indices
    assert attended[::2].gather(1, largest).all()
