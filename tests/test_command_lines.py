"""Command lines of all kinds, composed and prepared in this process: a cell is ready, or one sentence says why not.

Half of them are made from what conf/ has (real groups, keys and values, values at the edges, of the wrong type,
misspelt, swept, deleted, moved), the others from letters that mean something to a shell, to Hydra or to YAML.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra._internal.hydra import Hydra
from hypothesis import Phase, given
from hypothesis import settings as budget_of
from hypothesis import strategies as st

from kvbench.engine.shapes import Checkpoint, ModelShape
from kvbench.evals import models, overrides, runner
from kvbench.evals.overrides import CONF, config_groups
from kvbench.evals.settings import Settings
from kvbench.run import main
from kvbench.tasks import sources as data

QUICK = (Phase.explicit, Phase.generate)  # a command line is short enough as it was found
SMOLLM2 = ModelShape("smollm2-135m", 30, 9, 3, 64, 8192, tuple(range(30)), 576)
GROUPS = {name: files for name, files in config_groups().items() if name != "experiment"}
TOP = [*yaml.safe_load((CONF / "config.yaml").read_text())]
EDGES = (
    *("0", "1", "-1", "2", "0.5", "-0.0", "1e-9", "1e30", "1/3", "1/0", "nan", "inf", "-inf", "8192", "8193"),
    *("9223372036854775807", "9223372036854775808", "1000000000001", "1" * 299, "1" * 5000, "'1e-99999999'"),
    *("true", "null", "", "' '", "auto", "x", "é", "~", "~nobody/x", "/dev/null", "..", "a" * 300, "/" + "b" * 300),
    *("[]", "[1]", "[nan]", "[1,1]", "[[1]]", "[a,b]", "{}", "{a:1}", "{_target_:os.system}", "[" * 19 + "]" * 19),
    *("[" * 5000, ",".join("1" * 2000), "[" + ",".join("1" * 900) + "]", "a" * 20_000, "\0", "\udcff", "a\nb", "\x1b"),
    *("${seed}", "${oc.env:HOME}", "${oc.env:NOT_SET}", "${x}", "${", "${unless:1}", "${method}", "$", "'", '"'),
    *("1,2", "choice(1,2)", "range(0,3)", "range(0,1e12)", "range(0,2,0)", "interval(0,1)", "glob(*)", "sort(2,1)"),
    *("int(1.5)", "tag(a,choice(1,2))", "shuffle(range(0,3))", "a=b", "os.system", "kvbench.methods.full.Full", "[/b]"),
)  # fmt: skip


KEYS = {  # with values that are right
    "ratio": ("0.1", "1/5", "1", "0.9"), "budget": ("64", "300", "8192"), "comm": ("1/64", "1/8", "0", "1"),
    "compensate": ("true", "false"), "cache.tokens": ("0", "128", "4096"), "cache.block_len": ("1", "64", "128"),
    "cache.k_cache": ("1", "32"), "cache.policy": ("lfu", "lru"), "compression_scope": ("full_prompt", "context_only"),
    "seed": ("1", "9223372036854775807"), "limit": ("1", "null"), "trace": ("true",), "accesses": ("true",),
    "sweep.max_variants": ("auto", "3"), "sweep.refused": ("skip", "stop"),
    "compose": ("null", "kivi", "kivi_2bit", "kvarn", "hf_quantized_cache", "turboquant"),
    "compose_order": ("drop_first", "quantise_first"), "memory": ("1/2", "0.4", "1", "64KB", "1GB"),
    "out": ("x", "runs/a[/b]c", "~/x"), "dtype": ("float32", "auto"),
    "device": ("cpu",), "kernels": ("auto", "torch"), "weights": ("trained",), "data_dir": ("null",),
    "hydra.verbose": ("true",), "hydra/launcher": ("fused", "ray"), "model": ("opt-6.7b", "a/b"), "scale": ("smoke",),
}  # fmt: skip
WRONG = ("hydra", "hydra.run.dir", "hydra.callbacks", "hydra.launcher.shards", "hydra.launcher._target_", "foo",
         "method._target_", "task._target_", "cache", "cache.foo", "sweep", "logger", "experiment", "a.b")  # fmt: skip


def own_keys(group: str, name: str) -> dict[str, tuple[str, ...]]:
    """The keys that a file sets, with their values and those that its comments name; those of files below included."""
    found: dict[str, tuple[str, ...]] = {}
    text = (CONF / group / f"{name}.yaml").read_text()
    for entry in yaml.safe_load(text).get("defaults", ()):
        if entry != "_self_":
            found |= own_keys(group, entry)
    for key, value, comment in re.findall(r"^(\w+): *([^#\n]*[^#\n ]) *(?:#(.*))?$", text, re.MULTILINE):
        others = re.findall(r"(?:^|\|) *([\w.]+)(?=[ :]*(?:\||$|[a-z ]*:))", comment)
        found[key] = (value, *others, "1", "8") if key != "_target_" else ()
    return {key: values for key, values in found.items() if values}


OWN = {(group, name): own_keys(group, name) for group in ("method", "task", "prefill") for name in GROUPS[group]}


@st.composite
def made(draw: Callable[..., Any]) -> list[str]:
    """A command line in the words of conf/, most of them right."""

    def word(key: str, values: Sequence[str]) -> str:
        right = values and draw(st.integers(0, 3))
        return f"{key}={draw(st.sampled_from(values if right else EDGES))}"

    words = []
    for group in draw(st.lists(st.sampled_from(("method", "task", "prefill")), max_size=3, unique=True)):
        name = draw(st.sampled_from(GROUPS[group]))
        words.append(f"{group}={name}")
        if "source" in OWN[group, name] and draw(st.integers(0, 3)):
            words.append("task.source=embedded")  # which needs no files
        own = OWN[group, name]
        if own and draw(st.integers(0, 2)):
            key = draw(st.sampled_from(sorted(own)))
            words.append(word(f"{group}.{key}", own[key]))
    for key in draw(st.lists(st.sampled_from(sorted(KEYS)), max_size=2, unique=True)):
        words.append(word(key, KEYS[key]))
    spoil = draw(st.integers(0, 9))
    if spoil == 0:
        words.append(word(draw(st.sampled_from(WRONG)), ()))
    if spoil == 1 and words:
        at = draw(st.integers(0, len(words) - 1))
        key, _, value = words[at].partition("=")
        words[at] = draw(st.sampled_from((
            "+" + words[at], "++" + words[at], "~" + key, f"{key}@foo={value}", f"+{key}@foo={value}", key, "=" + value,
            key[:-1] + "=" + value, key + "x=" + value, f"{key}.x={value}", "--" + words[at], key.upper() + "=" + value,
        )))  # fmt: skip
    if draw(st.integers(0, 3)) == 0:
        flag = draw(st.sampled_from(("-m", "-m", "-m", "--run", "-x", "--resolve")))
        words.insert(draw(st.integers(0, len(words))), flag)
    return words


junk = st.lists(
    st.one_of(
        st.text("=,[]{}()'\"\\$~+@./:-_ ab1é\0\n\udc80", max_size=12),
        st.builds("{}={}".format, st.sampled_from(TOP), st.text(max_size=8)),
        st.builds("{}{}".format, st.sampled_from(("", "+", "~", "-", "--")), st.sampled_from((*TOP, *GROUPS, "hydra"))),
    ),
    max_size=3,
)


class Prepared(BaseException):
    """In place of a run."""


@pytest.fixture(scope="module")
def embedded() -> Any:
    """A runner that stops where it would load the model, without data.

    Quicker than a user's: Hydra composes each choice of files once for the look-up of keys, not once more to read
    `hydra.mode`, and its YAML is read in C.
    """
    composed, known, roots = overrides.composed, {}, data.data_roots

    def once(chosen: dict[str, list[str]]) -> Any:
        key = repr(chosen)
        if key not in known:
            known[key] = composed(chosen)
        return known[key]

    def run_cells(cells: list[Settings]) -> None:
        runner.prepare(cells)
        raise Prepared

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "look_up", lambda settings: SMOLLM2)
        patch.setattr(models, "name_of", lambda settings: "digest")
        patch.setattr(models, "look_into", lambda settings: Checkpoint(SMOLLM2, ("digest",), SMOLLM2.d_h))
        patch.setattr(runner, "run_cells", run_cells)
        patch.setattr(data, "data_roots", lambda folder: roots(folder) if folder else [])
        patch.setattr(overrides, "composed", once)
        patch.setattr(Hydra, "get_mode", lambda *args, **kwargs: None)
        patch.setattr(yaml, "SafeLoader", getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        patch.setattr("sys.argv", ["run.py"])
        patch.setenv("HYDRA_FULL_ERROR", "0")
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        yield


def ends(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """How the command line ends: "prepared", "refused", or "printed" where nothing was to be run."""
    capsys.readouterr()
    try:
        code = main(argv)
    except Prepared:
        return "prepared"
    except SystemExit as stop:
        code = stop.code
    said = capsys.readouterr().err
    if code == 0:
        return "printed"
    assert code == 2, said
    left_out = r"(left out(, \d+ cells)?: [^\n]+\n)*"  # of sweeps with sweep.refused=skip
    assert re.fullmatch(rf"{left_out}run\.py: [^\n]+\n", said.split("UserWarning")[-1]), said
    assert len(said) < 8_000
    return "refused"


@pytest.mark.usefixtures("embedded")
@pytest.mark.parametrize("n", [100, pytest.param(300, marks=pytest.mark.slow)])
def test_command_lines_are_prepared_or_refused_in_one_sentence(
    n: int, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    seen: Counter[str] = Counter()

    @budget_of(max_examples=n * 4 // 5, phases=QUICK)
    @given(made())
    def from_conf(argv: list[str]) -> None:
        seen[ends(argv, capsys)] += 1

    @budget_of(max_examples=n // 5, phases=QUICK)
    @given(junk)
    def from_letters(argv: list[str]) -> None:
        seen["junk " + ends(argv, capsys)] += 1

    from_conf()
    from_letters()
    assert seen["prepared"] > n // 16, seen  # most tasks that are drawn have no data here
    assert seen["refused"] > n // 4, seen
    assert seen["junk refused"] > n // 8, seen
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("embedded")
@pytest.mark.parametrize(
    ("words", "end"),
    [
        ("-m method=snapkv,pqcache compose=null,kivi ratio=0.2", "prepared"),
        ("method=clusterkv compose=kivi_2bit memory=1/4", "prepared"),
        ("method=keydiff_kvpress compose=hf_quantized_cache compose_order=quantise_first memory=1/8", "prepared"),
        ("-m method=snapkv,kivi memory=1/2,1/32 sweep.refused=skip", "prepared"),
        ("-m method=snapkv,kivi memory=1/2,1/32", "refused"),
        ("method=sparq compose=kivi", "refused"),
        ("method=kivi compose=kivi memory=1/2", "refused"),
        ("method=snapkv compose=rkv", "refused"),
        ("method=snapkv compose_order=quantise_first", "refused"),
        ("method=pqcache compose=kivi compose_order=quantise_first", "refused"),
    ],
)
def test_compositions_are_prepared_or_refused(words: str, end: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ends(words.split(), capsys) == end
