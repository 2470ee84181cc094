"""The command line before Hydra sees it: what is refused, with which sentence, and what is rewritten."""

import os
import shutil
import time
from pathlib import Path

import pytest

import kvbench.evals.settings  # noqa: F401  names that files of conf/ use in ${…}
from kvbench.engine.errors import ConfigError
from kvbench.evals.composing import composition, hydra_of
from kvbench.evals.overrides import CONF, check_overrides
from kvbench.run import main


def refused(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check_overrides(list(argv))
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["method=full", "ratio=0.5"],
        ["ratio=1/10", "comm=1e-2", "task.lengths=[1000,2000]"],
        ["method.n_sink=8"],
        ["model=any", "model.id=org/name"],
        ["-c", "job", "method=full"],
        ["-c", "job", "-p", "method"],
        ["hydra.verbose=true"],
        ["-m", "method=full,oracle", "ratio=0.1,0.2", "seed=range(0,3)"],
        ["-m", "method=glob(*)"],
    ],
)
def test_what_is_spelt_right_is_passed_on(argv: list[str]) -> None:
    assert sorted(check_overrides(argv)) == sorted(argv)


@pytest.mark.parametrize(
    ("argv", "begins"),
    [
        (["method=orcale"], "no method 'orcale'; did you mean 'oracle'"),
        (["task=neddle"], "no task 'neddle'; did you mean 'needle'"),
        (["model=lama-3.1-8b"], "no model 'lama-3.1-8b'; did you mean 'llama-3.1-8b'"),
        (["method=null"], "no method 'null'"),
        (["rato=0.2"], "no key 'rato'; did you mean 'ratio'?"),
        (["+rato=0.2"], "no key 'rato'; did you mean 'ratio'?"),
        (["metod=full"], "no key 'metod'; did you mean 'method'"),
        (["n_sink=4"], "no key 'n_sink'; did you mean method.n_sink"),
        (["method=kvzap", "gate=g.safetensors"], "no key 'gate'; did you mean method.gate"),
        (["gate=g.safetensors"], "no key 'gate' (all"),
        (["method.agz=group_sum"], "no method key 'agz'; did you mean 'agg'?"),
        (["method.agg.x=1"], ""),
        (["task.lenghts=[1]"], "no task key 'lenghts'; did you mean 'lengths'"),
        (["cache.size=3"], "no cache key 'size' (all"),
        (["model.ids=x"], "no model key 'ids'; did you mean 'id'"),
        (["method=full", "method.agg=x"], "no method key 'agg'; method=full has no keys to set"),
        (["--multrun"], "no flag '--multrun'; did you mean '--multirun'"),
        (["--config-dir", "x"], "no flag '--config-dir'"),
        (["--dryrun"], "no flag '--dryrun'; did you mean '--dry-run'"),
        (["--lst", "tasks"], "no flag '--lst'; did you mean '--list'"),
        (["--task", "needle"], "--task is no flag; write task=VALUE"),
        (["--method=snapkv"], "--method is no flag; write method=snapkv"),
        (["--data-dir", "x"], "--data-dir is no flag; write data_dir=VALUE"),
        (["hardware=h100"], "hardware=… is for --dry-run"),
        (["task=path/to/mine.py"], "task=path/to/mine.py cannot be read (No such file or directory); give the path of"),
        (["task=mine.yaml"], "task=mine.yaml cannot be read (No such file or directory); give the path of a YAML file"),
        (["allocator=mine.py"], "allocator=mine.py is a file, and only methods and tasks are taken from one"),
        (["--cfg", "yaml"], "-c/--cfg: invalid choice: 'yaml'"),
        (["--cfg", "method=full"], "-c/--cfg: invalid choice: 'method=full' (choose from "),
        (["--package"], "-p/--package: expected one argument; python run.py --help says"),
        (["-m", "--cfg", "job"], "-c/--cfg: not allowed with argument -m"),
        (["ratio"], "'ratio' is no flag and no key=value"),
        (["ratio=0.1,"], "'ratio=0.1,' is no override that Hydra can read; write key=value, one comma between values"),
        (["-m", "ratio=0.1,,0.2"], "'ratio=0.1,,0.2' is no override that Hydra can read"),
        (["task.lengths=[500,]"], "'task.lengths=[500,]' is no override that Hydra can read"),
        (["x=[1"], "'x=[1' is no override that Hydra can read"),
        (["ratio=0.1,0.2"], "ratio=0.1,0.2 is a sweep; add -m"),
        (["method=full,oracle"], "method=full,oracle is a sweep; add -m"),
        (["seed=range(0,3)"], "seed=range(0,3) is a sweep; add -m"),
        (["-m", "method=full,foo"], "no method 'foo'"),
        (["-m", "method=oracle,full", "method.agg=x"], "no method key 'agg'; method=full"),
        (["-m", "model=org/name,opt-6.7b"], "model=org/name,opt-6.7b mixes files of conf/model"),
        (["model=/no/such/folder"], "model=/no/such/folder does not exist; give a folder"),
        (["model=model.gguf"], "model=model.gguf does not exist; give a folder"),
    ],
)
def test_what_is_misspelt_is_named_with_near_misses(argv: list[str], begins: str) -> None:
    if begins:
        assert refused(*argv).startswith(begins)
    else:
        check_overrides(argv)  # below a value there are no keys to look up; the value is checked


def test_near_misses_are_followed_by_what_lists_all() -> None:
    found = refused("method=snapvk")
    assert "did you mean 'snapkv' or " in found and found.endswith("? (all: python run.py --list methods)")
    assert refused("method=zzz") == "no method 'zzz' (all: python run.py --list methods)"
    prefills = sorted(file.stem for file in (CONF / "prefill").glob("*.yaml"))
    assert refused("prefill=zzzz").endswith(f"(all: {', '.join(prefills)})")
    assert refused("prefill=minferense").endswith("did you mean 'minference' or 'minference_short'?")


def test_flags_come_first_because_hydra_reads_no_override_behind_one() -> None:
    assert check_overrides(["ratio=0.1,0.2", "-m", "seed=1"]) == ["-m", "ratio=0.1,0.2", "seed=1"]
    assert check_overrides(["--cfg=job", "seed=1"]) == ["-c", "job", "seed=1"]
    assert check_overrides(["seed=1", "--info"]) == ["-i", "all", "seed=1"]
    assert check_overrides(["seed=1", "--cfg"]) == ["-c", "job", "seed=1"]


def test_a_hub_name_becomes_the_id_of_any_model() -> None:
    assert check_overrides(["model=org/Some-1B"]) == ["model=any", "model.id='org/Some-1B'"]


def test_hub_names_are_swept_like_files() -> None:
    argv = check_overrides(["-m", "model=a/b,c/d"])
    assert argv == ["-m", "model=any", "model.id='a/b','c/d'"]


def test_a_folder_or_file_becomes_the_id_of_any_model(tmp_path: Path) -> None:
    file = tmp_path / "it's a model.gguf"
    file.touch()
    quoted = str(file).replace("'", r"\'")
    assert check_overrides([f"model='{quoted}'"]) == ["model=any", f"model.id='{quoted}'"]
    assert check_overrides([f"model={tmp_path}"]) == ["model=any", f"model.id='{tmp_path}'"]


def test_a_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "HOME", str(tmp_path))
    (tmp_path / "x").mkdir()
    assert check_overrides(["model=~/x"]) == ["model=any", f"model.id='{tmp_path}/x'"]


def test_values_beyond_hydras_grammar_are_quoted() -> None:
    assert check_overrides(["out=~/résults"]) == ["out='~/résults'"]


def test_hydras_own_help_is_left_alone() -> None:
    assert check_overrides(["--hydra-help"]) == ["--hydra-help"]


# --- experiments: a paper's table as one file ---

EXPERIMENT = """\
# @package _global_
defaults:
  - override /method: full
seed: 7
hydra:
  sweeper:
    params:
      method: full,oracle
      ratio: 0.1,0.2
"""


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of conf/ with an experiment in it."""
    conf = tmp_path / "conf"
    shutil.copytree(CONF, conf)
    (conf / "experiment").mkdir(exist_ok=True)
    (conf / "experiment" / "paper.yaml").write_text(EXPERIMENT)
    monkeypatch.setattr("kvbench.evals.overrides.CONF", conf)
    return conf


@pytest.mark.usefixtures("conf")
def test_an_experiment_needs_no_plus() -> None:
    assert check_overrides(["-m", "experiment=paper"]) == ["-m", "+experiment=paper"]
    assert check_overrides(["-m", "+experiment=paper"]) == ["-m", "+experiment=paper"]


@pytest.mark.usefixtures("conf")
def test_a_misspelt_experiment_is_named() -> None:
    assert refused("-m", "+experiment=papre").startswith("no experiment 'papre'; did you mean 'paper'")


@pytest.mark.usefixtures("conf")
def test_an_experiment_that_sweeps_asks_for_the_flag() -> None:
    assert refused("+experiment=paper") == "experiment=paper is a sweep; add -m to run all of it"


@pytest.mark.usefixtures("conf")
def test_keys_are_looked_up_in_every_file_that_the_experiment_sweeps() -> None:
    assert refused("-m", "+experiment=paper", "method.agg=x").endswith("method=full has no keys to set")
    assert check_overrides(["-m", "+experiment=paper", "method=oracle", "method.agg=x"])


def test_what_an_experiment_sweeps_is_checked_too(conf: Path) -> None:
    file = conf / "experiment" / "paper.yaml"
    file.write_text(EXPERIMENT.replace("full,oracle", "full,orcale"))
    assert refused("-m", "+experiment=paper").startswith("no method 'orcale'; did you mean 'oracle'")
    composition.cache_clear()
    hydra_of.cache_clear()
    file.write_text(EXPERIMENT.replace("ratio: 0.1", "rato: 0.1"))
    assert refused("-m", "+experiment=paper").startswith("no key 'rato'; did you mean 'ratio'")


def test_a_key_of_the_task_that_an_experiment_chooses_can_be_set() -> None:
    # Hydra looks keys up in the files of the command line, before it takes those of the experiment's sweep.
    words = ["-m", "+experiment=register_ruler", "task.rows=2"]
    assert check_overrides(words) == [*words, "task=ruler"]
    assert check_overrides([*words, "task=ruler"]) == [*words, "task=ruler"]
    assert check_overrides([*words[:2], "seed=1"]) == [*words[:2], "seed=1"]


# --- what has no meaning, or would take for ever ---


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("task.grid=" + "[" * 4_000 + "]" * 4_000, "is no override that Hydra can read"),
        ("out=a\0b", r"holds the character '\x00'"),
        ("out=\udcff", r"holds the character '\udcff'"),
        ("model=~nobody-has-this-name/x", "the home folder of nobody"),
        ("model=", "model is empty"),
        ("++foo=1", "no key 'foo'"),
        ("~foo", "no key 'foo'"),
        ("+hydra.x=1", "hydra.x has no effect here"),
        ("++hydra.run.dir=x", "hydra.run.dir has no effect here"),
        ("hydra.launcher.shrads=1", "no hydra.launcher key 'shrads'"),
        ("method=[full,oracle]", "is no name; write method=NAME, or -m method=NAME,NAME for several"),
        ("method=glob(zz*)", "method=glob(zz*) stands for no value"),
        ("seed=glob(*)", "seed=glob(*) stands for no value"),
        ("seed=range(0,1000000000)", "more than 10000 cells"),
        ("method=interval(0,1)", "has no end; list the values"),
        ("seed=range(0,2,0)", "has no end; write range("),
        ("seed=range(5,0)", "stands for no value"),
        ("-m=1", "-m/--multirun: ignored explicit argument '1'"),
        ("--resolve", "write --cfg job --resolve"),
    ],
    ids=lambda text: text[:30].encode("ascii", "backslashreplace").decode(),
)  # fmt: skip
def test_what_has_no_meaning_is_refused_at_once(word: str, says: str) -> None:
    start = time.perf_counter()
    assert says in refused("-m", word)
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("method._target_=os.system", "is no SelectiveAttention of kvbench.methods"),
        ("~seed", "seed is missing; give seed="),
        ("method@foo=full", "method@foo=full puts method where nothing looks for it; write method=NAME"),
        ("+method@foo=full", "puts method where nothing looks for it; write method=NAME"),
        ("++method=full", "force-add of config groups is not supported"),
        ("cache.tokens={a:[{_target_:os.system}]}", "is not a whole number"),
        ("task.grid=[" + ",".join("a" * 4_000) + "]", "task.grid="),
        ("seed=" + "1" * 5_000, "seed="),
    ],
    ids=lambda text: text[:30],
)
def test_what_hydra_or_the_settings_refuse_is_one_sentence(
    word: str, says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main([word, f"out={tmp_path / 'run'}"]) == 2
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_key_of_the_chosen_launcher_is_found() -> None:
    argv = ["hydra/launcher=ray", "hydra.launcher.shards=3"]
    assert check_overrides(argv) == argv


def test_sweeps_multiply() -> None:
    assert check_overrides(["-m", "seed=range(0,100)", "ratio=0.1,0.2"])
    assert "more than 10000 cells" in refused("-m", "seed=range(0,6000)", "ratio=0.1,0.2")


def test_what_is_printed_must_be_there() -> None:
    assert "no key 'mehtod'" in refused("--cfg", "job", "-p", "mehtod")


def test_a_key_of_methods_that_a_sweep_goes_over_is_one_of_its_values() -> None:
    """Hydra looked it up in the default method, which has no such key."""
    words = check_overrides(["-m", "method=snapkv,adakv", "method.window=16", "ratio=0.1", "task.lengths=[1000,2000]"])
    assert words == ["-m", "method=snapkv,adakv", "method.window=choice(16)", "ratio=0.1", "task.lengths=[1000,2000]"]
    words = check_overrides(["-m", "method=snapkv", "method.window=16,32", "task=needle,gsm8k"])
    assert words == ["-m", "method=snapkv", "method.window=16,32", "task=needle,gsm8k"]
