"""A method of ours is two files: one made up in a copy of this project is found wherever methods are listed."""

import shutil
from pathlib import Path

from kvbench.tests.warm import python

ROOT = Path(__file__).resolve().parents[1]
METHOD = '''"""Keep the tokens whose keys are long.

Figures   drop by place or chance: #123456, circle, --
"""

from torch import Tensor

from kvbench.methods.scoring import ScoringMethod


class MadeUp(ScoringMethod):
    title = "Made up"

    @staticmethod
    def score(keys: Tensor) -> Tensor:
        return keys.float().norm(dim=-1)
'''
FOUND = """
from kvbench.evals.overrides import config_groups
from kvbench.evals.every import every_method, methods_for, own_class
from kvbench.plots.looks import family_of, look
from kvbench.results.names import known
from kvbench.benchmarks.launches import BUDGETS, Cost
from kvbench.tests.conformance import METHODS

name = "made_up"
assert name in config_groups()["method"] and name in METHODS
assert own_class(name).title == "Made up"
assert all(name in methods_for(budget) for budget in ("ratio", "memory")) and name not in methods_for("answer")
assert name in every_method("ratio", "-random").split(",")
assert known("made_up_paper") == name
assert (look(name).colour, family_of(name)) == ("#123456", "drop by place or chance")
assert BUDGETS[name] == Cost(40, 0, 1)
"""
FOLDERS = "kvbench benchmarks conf engine evals hydra_plugins kernels methods plots results tasks tests"


def test_a_method_in_two_files_is_found_everywhere(tmp_path: Path) -> None:
    for folder in FOLDERS.split():
        shutil.copytree(
            ROOT / folder, tmp_path / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "golden")
        )
    (tmp_path / "methods" / "dropping" / "made_up.py").write_text(METHOD)
    (tmp_path / "conf" / "method" / "made_up.yaml").write_text("_target_: kvbench.methods.dropping.made_up.MadeUp\n")
    for words in (("-c", FOUND), ("-m", "kvbench.tests.conformance", "made_up")):
        done = python(*words, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
