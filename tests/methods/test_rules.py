"""Rules stand where a wrong value is answered without torch, and a method obeys those that bear its name."""

import pytest
from hydra import compose, initialize_config_dir

from evals.overrides import CONF, config_groups
from evals.settings import Choice, choice, load_class, load_rules
from methods.rules.base import Rules
from plots.looks import known


def chosen(name: str) -> Choice:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return choice("method", name, compose("config", [f"method={name}"]).method)


@pytest.mark.parametrize("name", config_groups()["method"])
def test_a_method_inherits_from_the_rules_of_its_name(name: str) -> None:
    rules = load_rules(chosen(name))
    assert issubclass(load_class(chosen(name)), rules)
    assert rules.__module__.split(".")[:2] == ["methods", "rules"]
    assert rules.__module__.split(".")[2:] == load_class(chosen(name)).__module__.split(".")[1:]
    assert rules.__module__.split(".")[-1] == known(name)
    own = {key for key in vars(Rules) if not key.startswith("_")}
    assert not own & vars(load_class(chosen(name))).keys(), "a rule beside the rules, which start-up would not see"


def test_a_method_without_a_file_of_rules_holds_them_itself() -> None:
    bare = Choice("method", "x", "methods.base.NoSuchMethod", {})
    with pytest.raises(Exception, match="NoSuchMethod is no SelectiveAttention"):
        load_rules(bare)
