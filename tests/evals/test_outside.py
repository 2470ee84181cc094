"""A method in a file outside the repository runs like ours, and what is wrong with the file is said in a sentence."""

import pickle
import re
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hydra import compose

from kvbench.engine.declared import build_params
from kvbench.engine.errors import ConfigError
from kvbench.evals.composing import composing
from kvbench.evals.overrides import check_overrides
from kvbench.evals.settings import Settings, load_class, settings
from kvbench.results import read_runs
from kvbench.run import main
from kvbench.tests.tiny_run import CONF, example_file, save_tiny

HEAD = (
    "from dataclasses import dataclass, field\nfrom kvbench.engine.placement import Whole\n"
    "from kvbench.methods.base import SelectiveAttention\n"
)
BODY = "    title, drops = 'Mine', True\n    def arrange(self, layer):\n        return Whole()\n"
TASK = ("task=needle", "task.source=embedded", "task.lengths=[400]", "task.depths=[50]", "task.max_new_tokens=4")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


def composed(*words: str) -> Settings:
    checked = check_overrides([*words])
    with composing(CONF):
        cfg = compose("config", checked, return_hydra_config=True)
    return settings(cfg, cfg.hydra.runtime.choices)


def write(folder: Path, text: str, name: str = "mine.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def refused(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        composed(*words)
    return str(caught.value)


def test_the_file_of_the_docs_runs_beside_ours_and_stands_in_the_table(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = example_file(tmp_path / "elsewhere"), tmp_path / "out"
    words = [*TASK, "model=any", f"model.id={model}", "ratio=0.3", "dtype=float32", "device=cpu", f"out={out}"]
    assert main(["-m", f"method=snapkv,{path}", *words, "method.n_recent=20"]) == 2
    assert "no method key 'n_recent'" in said(capsys)  # of snapkv
    assert main(["-m", f"method=snapkv,{path}", *words]) == 0
    table = said(capsys)
    assert "SnapKV (C)" in table and "Smallest keys (C)" in table
    found = {result.method: (folder, result) for folder, result in read_runs(out)}
    folder, result = found["smallest_keys"]
    assert folder.name.startswith("needle-smallest_keys-tiny-")
    assert result.params == {"n_recent": 32} and result.within_budget
    assert main(["-m", f"method=snapkv,{path}", *words]) == 0  # finds its own work
    assert len(read_runs(out)) == 2


def said(capsys: pytest.CaptureFixture[str]) -> str:
    both = capsys.readouterr()
    return both.out + both.err


def test_defaults_of_params_are_the_configuration_and_keys_are_checked_as_for_ours(tmp_path: Path) -> None:
    path = example_file(tmp_path)
    method = composed(f"method={path}").method
    assert (method.name, dict(method.params)) == ("smallest_keys", {"n_recent": 32})
    assert dict(composed(f"method={path}", "method.n_recent=3").method.params) == {"n_recent": 3}
    assert "did you mean 'n_recent'?" in refused(f"method={path}", "method.n_recnt=3")
    with pytest.raises(ConfigError, match=r"method\.n_recent=x is not a whole number"):
        made(composed(f"method={path}", "method.n_recent=x"))
    with pytest.raises(ConfigError, match=r"method\.n_recent=0 is out of range; it is a number of tokens"):
        made(composed(f"method={path}", "method.n_recent=0"))


def test_a_misspelt_trait_is_named_with_its_line(tmp_path: Path) -> None:
    path = example_file(tmp_path)
    path.write_text(path.read_text().replace("    drops = True", "    drop = True"))
    assert re.search(
        r"line \d+: TypeError: SmallestKeys\.drop=True is no trait; did you mean 'drops'\?", refused(f"method={path}")
    )


def made(cell: Settings) -> Any:
    return build_params(load_class(cell.method), cell.method.params, "method")


def test_defaults_of_every_type_survive_the_configuration(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        HEAD
        + "from fractions import Fraction\nfrom pathlib import Path\nfrom typing import Literal\n"
        + "class Mine(SelectiveAttention):\n    @dataclass(frozen=True)\n    class Params:\n"
        + "        a: Fraction = Fraction(1, 3)\n        b: Path = Path('x/y')\n        c: Literal['u', 'v'] = 'v'\n"
        + "        d: tuple[int, ...] = field(default_factory=lambda: (1, 2))\n        e: float | None = None\n"
        + "        f: bool = False\n"
        + BODY,
    )
    cell = composed(f"method={path}")
    assert made(cell) == load_class(cell.method).Params()


def test_an_edited_file_is_another_run_and_a_worker_refuses_it(tmp_path: Path) -> None:
    path = write(tmp_path, HEAD + "class Mine(SelectiveAttention):\n" + BODY)
    before = composed(f"method={path}")
    kind = load_class(before.method)
    assert load_class(before.method) is kind, "rows of one class are decoded together"
    sent = pickle.loads(pickle.dumps(before.method))
    del sys.modules[kind.__module__]  # as in a worker
    assert load_class(sent).__name__ == "Mine"
    path.write_text(path.read_text().replace("'Mine'", "'Mind'"))  # within the same second, of the same length
    after = composed(f"method={path}")
    assert load_class(after.method).title == "Mind"
    assert after.resolved() != before.resolved()
    assert set(after.resolved()["method"]) == {"name", "params", "digest"}
    with pytest.raises(ConfigError, match="not what it was when the command was given"):
        load_class(sent)


def test_an_experiment_takes_a_file_as_its_method(tmp_path: Path) -> None:
    path = example_file(tmp_path)
    words = check_overrides(["-m", "experiment=pqcache_table2", "scale=smoke", f"method=full,{path}"])
    assert "method=full,smallest_keys" in words


def test_a_file_with_several_methods_is_asked_for_one(tmp_path: Path) -> None:
    text = HEAD + "class A(SelectiveAttention):\n" + BODY + "class B(A):\n    title = 'B'\n"
    path = write(tmp_path, text)
    assert "holds 2 methods; say which: method=mine.py:A or :B" in refused(f"method={path}")
    assert composed(f"method={path}:B").method.name == "mine-B"
    assert "holds no method C; it has A and B" in refused(f"method={path}:C")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def f(:\n", r"cannot be imported: line 1: SyntaxError: invalid syntax"),
        ("import nothing_of_the_kind\n", r"line 1: ModuleNotFoundError: No module named 'nothing_of_the_kind'"),
        ("x = 1\nraise SystemExit(3)\n", r"line 2: SystemExit: 3"),
        ("x = 1\n", r"mine\.py holds no method; write a class"),
        ("from kvbench.methods.dropping.snapkv import SnapKV\n", r"holds no method"),
        ("class Mine(SelectiveAttention):\n    title, drops = 'Mine', True\n", r"Mine of .*mine\.py has no arrange"),
        ("class Mine(SelectiveAttention):\n    def arrange(self, layer): ...\n", r"has no title and no drops"),
        ("class Mine(SelectiveAttention):\n    class Params:\n        a = 1\n" + BODY, r"Params of .* is no dataclass"),
        (
            "class Mine(SelectiveAttention):\n    @dataclass\n    class Params:\n        a: int\n        b: int\n"
            + BODY,
            r"no default for a, b; give each a value, like a: int = 32",
        ),
        (
            "class Mine(SelectiveAttention):\n    @dataclass\n    class Params:\n        a: int = 'x'\n" + BODY,
            r"cannot be made of its defaults: method\.a=x is not a whole number",
        ),
        (
            "class Mine(SelectiveAttention):\n    @dataclass\n    class Params:\n        a: set = None\n" + BODY,
            r"method\.a is declared as <class 'set'>",
        ),
    ],
)
def test_what_is_wrong_with_a_file_is_one_sentence(text: str, says: str, tmp_path: Path) -> None:
    head = HEAD.replace("\n", ";")  # in one line, so that the cases count theirs
    path = write(tmp_path, text if text.startswith(("def", "import", "x", "from")) else head + "\n" + text)
    with pytest.raises(ConfigError, match=says):
        composed(f"method={path}")


def test_files_that_are_not_there_or_are_called_like_another_are_refused(tmp_path: Path) -> None:
    text = HEAD + "class Mine(SelectiveAttention):\n" + BODY
    assert "cannot be read (No such file or directory)" in refused(f"method={tmp_path}/none.py")
    assert "has the name of another method, snapkv" in refused(f"method={write(tmp_path, text, 'snapkv.py')}")
    assert "rename it" in refused(f"method={write(tmp_path, text, '2nd.py')}")
    (tmp_path / "other").mkdir()
    two = f"method={write(tmp_path, text)},{write(tmp_path / 'other', text)}"
    with pytest.raises(ConfigError, match="has the name of another method, mine"):
        check_overrides(["-m", two])
    assert "is a sweep; add -m" in refused(f"method=snapkv,{tmp_path}/other/mine.py")
    composed(f"method={tmp_path}/other/mine.py")  # in a command of its own it is the only one
    assert "no method 'mine'" in refused("method=mine")


@pytest.mark.parametrize(("base", "comm"), [("StreamingLLMDecode", 0), ("StreamingLLM", Fraction(1, 64))])
def test_what_a_file_defines_decides_its_comm_whichever_file_it_is(base: str, comm: Fraction, tmp_path: Path) -> None:
    module = {"StreamingLLMDecode": "decoding.streamingllm_decode", "StreamingLLM": "dropping.streamingllm"}[base]
    fields = {
        "StreamingLLMDecode": "interval: int = 8\n        n_sink: int = 4\n        schedule: str = 'position'\n"
        "        at_prefill: bool = False\n",
        "StreamingLLM": "n_sink: int = 4\n        generated: str = 'inside'\n        position: str = 'original'\n",
    }[base]
    path = write(
        tmp_path,
        f"from dataclasses import dataclass\nfrom kvbench.methods.{module} import {base}\n"
        f"class Mine({base}):\n    title = 'Mine'\n    @dataclass(frozen=True)\n"
        f"    class Params({base}.Params):\n        {fields}",
    )
    assert composed(f"method={path}").budget.comm == comm


@pytest.mark.parametrize("name", ["rkv", "triattention", "full_stopped", "snapkv", "oracle", "full"])
def test_our_own_methods_keep_the_comm_that_they_had(name: str) -> None:
    wanted = 0 if name in ("rkv", "triattention", "full_stopped") else Fraction(1, 64)
    assert composed(f"method={name}", "budget=100").budget.comm == wanted


def test_a_method_that_places_nothing_is_told_what_to_return(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = "    title, drops = 'Mine', True\n    def arrange(self, layer):\n        pass\n"
    path, out = write(tmp_path, HEAD + "class Mine(SelectiveAttention):\n" + body), tmp_path / "out"
    words = [*TASK, "model=any", f"model.id={model}", "ratio=0.3", "dtype=float32", "device=cpu", f"out={out}"]
    assert main([f"method={path}", *words]) == 2
    assert "Mine.arrange says nothing of layer 0; return where its tokens go, such as Kept" in said(capsys)
