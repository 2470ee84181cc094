from kvbench.results import config_hash, run_name
from kvbench.tests.results.made_rows import CONFIG


def test_the_hash_ignores_order_and_what_changes_no_result() -> None:
    turned = dict(reversed(CONFIG.items())) | {"out": "elsewhere", "logger": {"name": "wandb"}}
    assert config_hash(turned) == config_hash(CONFIG) and len(config_hash(CONFIG)) == 10
    assert config_hash(CONFIG | {"seed": 1}) != config_hash(CONFIG)
    deep = CONFIG | {"method": {"name": "snapkv", "params": {"window": 33}}}
    assert config_hash(deep) != config_hash(CONFIG)


def test_the_name_of_a_run_is_readable_and_safe() -> None:
    assert run_name(CONFIG) == f"needle-snapkv-smollm2-135m-{config_hash(CONFIG)}"
    hostile = {"task": "../a b", "method": "x/y", "model": "org/Model:1" + "z" * 99}
    name = run_name(hostile)
    assert "/" not in name and " " not in name and not name.startswith(".") and len(name) < 140
