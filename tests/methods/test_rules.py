"""A method is refused by its own class, which is in the file of its name, and before torch is loaded."""

import json
import subprocess
import sys
from functools import cache
from typing import Any

import pytest
from hydra import compose
from omegaconf import OmegaConf

from kvbench.evals.composing import composing
from kvbench.evals.overrides import CONF, config_groups
from kvbench.evals.settings import Choice, choice, load_class
from kvbench.results.names import known

CHECK = """
import json
import sys
from omegaconf import open_dict
from kvbench.engine.errors import ConfigError
from kvbench.evals.cells import ask
from kvbench.evals.composing import composition
from kvbench.evals.overrides import CONF
from kvbench.evals.settings import settings
cfg = composition(CONF, ())
for name, tree in json.load(sys.stdin).items():
    with open_dict(cfg):
        cfg.method = tree
    try:
        ask([settings(cfg, {**cfg.hydra.runtime.choices, "method": name})])
    except ConfigError as error:  # such as a ratio of prompt and answer together
        assert name in str(error), error
    assert "torch._C" not in sys.modules, name
"""


@cache
def composed(name: str) -> Any:
    """The method's part of a command line that names it."""
    with composing(CONF):
        return OmegaConf.to_container(compose("config", [f"method={name}"]).method)


def chosen(name: str) -> Choice:
    return choice("method", name, composed(name))


def test_a_method_is_in_the_file_of_its_name() -> None:
    for name in config_groups()["method"]:
        assert load_class(chosen(name)).__module__.split(".")[-1] == known(name)


def test_a_class_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(Exception, match="NoSuchMethod is no SelectiveAttention"):
        load_class(Choice("method", "x", "kvbench.methods.base.NoSuchMethod", {}))


def test_no_method_is_checked_with_torch() -> None:
    trees = json.dumps({name: composed(name) for name in config_groups()["method"]})  # half of the time is Hydra's
    done = subprocess.run([sys.executable, "-c", CHECK], cwd=CONF.parent, input=trees, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
