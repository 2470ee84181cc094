"""Every file of conf/ composes, and every default in it is one that the code accepts."""

import re
from functools import cache

import pytest
import yaml
from hydra import compose

from kvbench.engine.declared import build_params
from kvbench.evals.composing import composing
from kvbench.evals.overrides import CONF, config_groups, default_groups
from kvbench.evals.settings import Settings, load_class, settings
from kvbench.results.names import STAND_INS, known

# Those of experiments are composed at both scales in tests/plots/test_experiments.py.
FILES = [(group, name) for group, names in config_groups().items() if group != "experiment" for name in names]
MADE = ["reuse.file=made.npz"]
NEEDS = {  # files that are incomplete on purpose
    **{"any": ["model.id=org/name"], "given": ["reuse.anchors=[0,8]"], "file": MADE, "kascade": MADE}
}


@cache
def composed(*words: str) -> Settings:
    with composing(CONF):
        cfg = compose("config", list(words), return_hydra_config=True)
    return settings(cfg, cfg.hydra.runtime.choices)


EXPERIMENTS = sorted((CONF / "experiment").glob("*.yaml"))


def task_of(name: str) -> str:
    """The task that a file of conf/task is, or presets: a preset has no class of its own and begins with a task."""
    text = (CONF / "task" / f"{name}.yaml").read_text()
    return name if "_target_" in text else re.findall(r"^defaults:\n  - (\w+)$", text, re.MULTILINE)[0]


def choice(group: str, name: str) -> list[str]:
    plus = "" if group in default_groups() else "+"
    return [f"{plus}{group}={name}", *NEEDS.get(name, [])]


@pytest.mark.parametrize(("group", "name"), FILES, ids=str)
def test_every_file_composes_and_its_defaults_are_accepted(group: str, name: str) -> None:
    run = composed(*choice(group, name))
    for part in (run.method, run.task):
        build_params(load_class(part), part.params, part.group)


def test_a_method_has_one_name_everywhere() -> None:
    """A preset is called after its method and whose setting it is: snapkv_paper."""
    for name in config_groups()["method"]:
        part = composed(f"method={name}").method
        assert part.name == name
        assert known(name) == part.target.split(".")[-2], name


def first_default(group: str, name: str) -> str:
    """What a preset changes."""
    return yaml.safe_load((CONF / group / f"{name}.yaml").read_text())["defaults"][0]


PRESETS = [("method", n, first_default("method", n)) for n in config_groups()["method"] if known(n) != n]
PRESETS += [("task", n, first_default("task", n)) for n in config_groups()["task"] if task_of(n) != n]


def test_a_preset_says_only_what_differs() -> None:
    for group, name, of in PRESETS:
        base, preset = (getattr(composed(f"{group}={word}"), group).params for word in (of, name))
        said = yaml.safe_load((CONF / group / f"{name}.yaml").read_text()).keys() - {"defaults"}
        assert {key for key in base if base[key] != preset[key]} == said != set(), name


def test_a_task_has_one_name_everywhere() -> None:
    """A preset is called after its task: needle_short is one of needle, longbench_v2 is a task of its own."""
    for name in config_groups()["task"]:
        part, task = composed(f"task={name}").task, task_of(name)
        assert part.target.startswith(f"kvbench.tasks.{task}."), name
        assert load_class(part).name == task  # type: ignore[attr-defined]


def test_a_model_file_is_named_after_its_model() -> None:
    for name in {*config_groups()["model"]} - {"any"}:
        assert composed(f"model={name}").model.name == name


def test_the_class_is_named_once_at_the_root_of_its_file() -> None:
    for group in ("method", "task"):
        for file in (CONF / group).glob("*.yaml"):
            lines = [line for line in file.read_text().splitlines() if "_target_" in line]
            is_preset = (group, file.stem) in {preset[:2] for preset in PRESETS}
            assert len(lines) == (not is_preset), file
            assert all(line.startswith("_target_: ") for line in lines), file


def test_hydra_makes_no_folders_of_its_own() -> None:
    with composing(CONF):
        hydra = compose("config", return_hydra_config=True).hydra
    assert hydra.output_subdir is None
    assert hydra.run.dir == "."
    assert hydra.job.chdir is False
    assert hydra.launcher._target_ == "hydra_plugins.kvbench_launcher.FusedLauncher"


def test_an_experiment_says_whether_it_asks_a_benchmark_or_what_stands_in_for_it() -> None:
    for path in EXPERIMENTS:
        text = path.read_text()
        for name in re.findall(r"^      task: ([\w,]+)$", text, re.MULTILINE)[0].split(","):
            preset = (CONF / "task" / f"{name}.yaml").read_text()
            says = r"^      task\.(source|path): " if task_of(name) == name else r"^source: (?!auto)"
            if task_of(name) in STAND_INS:
                assert re.search(says, text if task_of(name) == name else preset, re.MULTILINE), (path, name)
