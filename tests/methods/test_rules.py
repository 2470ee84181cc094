"""A method is refused by its own class, which is in the file of its name, and before torch is loaded."""

import subprocess
import sys

import pytest
from hydra import compose, initialize_config_dir

from evals.overrides import CONF, config_groups
from evals.settings import Choice, choice, load_class
from results.names import known

CHECK = """
import sys
from engine.errors import ConfigError
from evals.asked import ask
from evals.settings import from_words
for name in sys.argv[1:]:
    try:
        ask([from_words([f"method={name}"])])
    except ConfigError as error:  # such as a ratio of prompt and answer together
        assert name in str(error), error
    assert "torch._C" not in sys.modules, name
"""


def chosen(name: str) -> Choice:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return choice("method", name, compose("config", [f"method={name}"]).method)


@pytest.mark.parametrize("name", config_groups()["method"])
def test_a_method_is_in_the_file_of_its_name(name: str) -> None:
    assert load_class(chosen(name)).__module__.split(".")[-1] == known(name)


def test_a_class_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(Exception, match="NoSuchMethod is no SelectiveAttention"):
        load_class(Choice("method", "x", "methods.base.NoSuchMethod", {}))


def test_no_method_is_checked_with_torch() -> None:
    command = [sys.executable, "-c", CHECK, *config_groups()["method"]]
    done = subprocess.run(command, cwd=CONF.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
