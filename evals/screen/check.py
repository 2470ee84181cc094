"""`make check`, `python run.py --check`: one screen on what this machine has, and whether the main job would work.

Every line is a `Fact`: its name, what was found, and where it stops the main job a sentence on what to do. Nothing is
built, converted, downloaded or written. Importing this file does not import torch; asking for the facts does.

Not here: which memory a model takes (`evals/screen/fits.py`), what lies in the cache folder (`evals/screen/caches.py`).
"""

import os
import platform
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.table import Table

from kvbench.engine import terminal
from kvbench.engine.checkpoints import header
from kvbench.engine.checkpoints.packages import installed, out_of_bounds
from kvbench.engine.errors import ConfigError
from kvbench.evals.screen import fits
from kvbench.evals.screen.fits import FORMULA, Shipped, shipped
from kvbench.results.machine import cpu_model
from kvbench.results.sheet import Sheet, on_terminal

EXTRAS = {  # optional packages, and what they are for
    "flash-attn": "prompts on a GPU",
    "wandb": "logger=wandb, after `wandb login` or with WANDB_MODE=offline",
    "ray": "sweeps on many machines",
    "submitit": "on Slurm",
    "wandb-workspaces": "make dashboard",
    "faiss-cpu": "",
    "numba": "",
    "scikit-learn": "make bench",
}
ANTLR = "antlr4-python3-runtime==4.13.2"
SHORTEST = 4096  # tokens that the main job reads at most
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Fact:
    """A line of the screen."""

    name: str
    text: str
    problem: str | None = None  # why the main job would not work, and what to do


def main() -> int:
    """Print the screen: 0 where the main job would work, else 1."""
    console = terminal.console(highlight=False)
    facts = machine()
    if is_sound := not any(fact.problem for fact in facts):  # the others need what these found
        facts += folders()
    console.print(grid((fact.name, fact.text) for fact in facts))
    if is_sound:
        console.print(models())
        console.print(grid(((one.name, one.text) for one in data()), "data"))
    problems = [fact.problem for fact in facts if fact.problem]
    for problem in problems:
        console.print(f"\n{problem}", soft_wrap=True)
    if not problems:
        console.print("\nThe main job works here: make run", soft_wrap=True)
    return int(bool(problems))


def refuse_others(words: Iterable[str]) -> None:
    """Raise `ConfigError` for words that say nothing of a model, before anything is imported that would look at one."""
    for word in words:
        if not word.startswith(("model=", "model.", "dtype=", "tokens=", "memory=")):
            raise ConfigError(
                f"{word} says nothing of a model; give --check with model=NAME, tokens=32k and memory=4GB alone, or "
                "without any key"
            )


def grid(rows: Iterable[tuple[str, str]], title: str = "") -> Table:
    """Two columns; what is too long wraps in its own."""
    table = Table(box=None, pad_edge=False, show_header=bool(title))
    table.add_column(title, no_wrap=True, min_width=13)
    table.add_column("", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


# --- what the machine has ---


def machine() -> list[Fact]:
    """Packages, processors, kernels, memory."""
    missing = [name for name in ("torch", "transformers", "gguf", "hydra") if find_spec(name) is None]
    if missing:
        names = ", ".join(missing)
        return [
            Fact("Python", platform.python_version()),
            Fact("packages", f"missing: {names}", f"the packages {names} are not installed; run `make setup`"),
        ]
    return [python(), processors(), dtype(), kernels(), triton(), memory(), extras(), graders()]


def python() -> Fact:
    versions = {name: installed(name) or "" for name in ("torch", "transformers")}
    text = ", ".join([platform.python_version(), *(f"{name} {found}" for name, found in versions.items())])
    problems = [words for name in versions if (words := out_of_bounds(name))]
    return Fact("Python", text, f"{'; '.join(problems)}; run `make setup`" if problems else None)


def processors() -> Fact:
    torch = import_module("torch")
    cpu = f"{os.cpu_count()} cores of {cpu_model()}, {torch.backends.cpu.get_cpu_capability()}"
    if not torch.cuda.is_available():
        hint = ""
        if shutil.which("nvidia-smi"):
            hint = f"; nvidia-smi is there, but torch {torch.__version__} cannot use a GPU"
        return Fact("processors", f"{cpu}; no GPU{hint}")
    gpus = []
    for i in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(i)
        name = torch.cuda.get_device_properties(i).name
        gpus.append(f"cuda:{i} {name}, {gb(free)} of {gb(total)} free")
    return Fact("processors", f"{cpu}; CUDA {torch.version.cuda}: {'; '.join(gpus)}")


def dtype() -> Fact:
    """What `dtype=auto` is, by the same functions as a run."""
    load = import_module("kvbench.engine.checkpoints.load")
    device = load.resolve_device("auto")
    chosen = load.resolve_dtype("auto", device)
    if device != "cpu":
        why = "on a GPU it is fast"
    elif chosen == "bfloat16":
        why = "this CPU multiplies it (AVX512-BF16 or AMX)"
    else:
        why = "this CPU has neither AVX512-BF16 nor AMX, so bfloat16 would be emulated, and slower"
    return Fact("dtype", f"auto is {chosen} on {device}: {why}")


def kernels() -> Fact:
    build = import_module("kvbench.kernels.build")
    if os.environ.get("KVBENCH_KERNELS") == "torch":
        return Fact("C++ kernels", "switched off by KVBENCH_KERNELS=torch; torch does their work")
    names = sorted(file.stem for file in build.SOURCES.glob("*.cpp"))
    paths = [build.library_path(name, build.level()) for name in names]
    n_built = sum(os.path.isfile(path) for path in paths)  # noqa: PTH113 - Path.is_file raises in a closed folder
    if n_built == len(names):
        return Fact("C++ kernels", f"all {n_built} built for {build.level()} in {shown(paths[0].parent)}")
    rest = "their work" if not n_built else f"that of the other {len(names) - n_built}"
    try:
        compiler = " ".join(build.find_compiler())
    except RuntimeError as error:
        return Fact("C++ kernels", f"{n_built} of {len(names)} built: {error}; torch does {rest}, slower")
    if not writable(paths[0].parent):
        why = f"{shown(existing(paths[0].parent))} cannot be written"
        return Fact("C++ kernels", f"{n_built} of {len(names)} built: {why}; torch does {rest}, slower")
    return Fact("C++ kernels", f"{n_built} of {len(names)} built; {compiler} compiles the others when first used")


def triton() -> Fact:
    found = installed("triton")
    if found is None:
        return Fact("Triton", "not installed; a GPU is slower without (pip install -c constraints.txt triton)")
    words = f"; {said}: no kernel was tried with it" if (said := out_of_bounds("triton")) else ""
    if not has_gpu():
        return Fact("Triton", f"{found}; there is no GPU to use it on{words}")
    torch, fast = import_module("torch"), import_module("kvbench.kernels.fast")
    main_job = next(one for one in shipped() if one.id == "embedded").shape
    out = fast.verdicts(fast.shapes_of(main_job, torch.bfloat16), torch.device("cuda", 0))
    each = "; ".join(f"{op}, as {why}" for op, why in out.items())
    said = f"torch does the work of {each}" if out else "every kernel does what torch does"
    return Fact("Triton", f"{found}{words}; {said}")


def memory() -> Fact:
    """Free memory where models are loaded; a container's limit counts."""
    return Fact("memory", f"{gb(free_bytes())} free on {'cuda:0' if has_gpu() else 'this machine'}")


def extras() -> Fact:
    here = [f"{name} {found}" for name in EXTRAS if (found := installed(name))]
    absent = [f"{name} ({use})" if use else name for name, use in EXTRAS.items() if not installed(name)]
    missing = f"; pip install -c constraints.txt: {', '.join(absent)}" if absent else ""
    return Fact("extras", f"{', '.join(here) or 'none'}{missing}")


def graders() -> Fact:
    """What scores answers of some tasks, and the command for what is missing."""
    runtime = import_module("kvbench.tasks.reasoning.judge").RUNTIME
    uses: dict[str, list[str]] = {}
    for task, kind in tasks().items():
        for package, what in kind.packages.items():
            uses.setdefault(package, []).append(f"{task} {what}".rstrip())
    absent = [f"{name} ({', '.join(each)})" for name, each in uses.items() if not installed(name)]
    if absent:
        text = f"missing: {', '.join(absent)}; pip install -c constraints.txt -e '.[tasks]'"
    else:
        text = f"math-verify {installed('math-verify')}, langdetect, nltk, tree-sitter with six grammars"
    if not os.path.isdir(runtime):  # noqa: PTH112 - of a closed folder too
        text += f"; pip install --no-deps --target {shown(runtime)} {ANTLR}: without it math-verify reads no per cent"
    return Fact("graders", text)


# --- what lies on its disks ---


def folders() -> list[Fact]:
    """Where runs and conversions go."""
    digests = import_module("kvbench.engine.checkpoints.digests")
    runs, cache = import_module("kvbench.evals.cells").RUNS, digests.cache_home()
    return [
        folder("cache", cache, "set XDG_CACHE_HOME to another one"),
        folder("runs", runs, "give out=/somewhere/else with each command"),
        embedded(cache),
    ]


def folder(name: str, path: Path, remedy: str) -> Fact:
    if writable(path):
        return Fact(name, f"{shown(path)}, {gb(shutil.disk_usage(existing(path)).free)} free on its disk")
    problem = f"the folder {shown(path)} cannot be written; unlock it, or {remedy}"
    return Fact(name, f"{shown(path)} cannot be written", problem)


def embedded(cache: Path) -> Fact:
    """The model of the main job: installed, and small enough."""
    name = "embedded model"
    try:
        file = header.embedded_file()
    except ConfigError as error:
        return Fact(name, "not installed", str(error))
    model = next(one for one in shipped() if one.id == "embedded")
    if longest(model) < SHORTEST:
        problem = f"the main job needs about 2 GB of free memory and {gb(free_bytes())} are free; end other programs"
        return Fact(name, "does not fit into memory", problem)
    when = "converted in the cache" if converted(cache, file) else "converted at the first start, in a minute"
    return Fact(name, f"{file.stem}, {when}")


def converted(cache: Path, file: Path) -> bool:
    """Whether this version of transformers finds a conversion; which file it was made of, a run looks at."""
    pattern = f"{file.stem[:80]}-*-transformers-{installed('transformers')}/config.json"
    return any((cache / "models").glob(pattern))


# --- models ---


def models() -> Table:
    """Each shipped model that is here, and its longest prompt; the others by their names."""
    load = import_module("kvbench.engine.checkpoints.load")
    width = import_module("kvbench.engine.books.width")
    kind = load.resolve_dtype("auto", "auto")
    rows, others = list[list[str]](), list[str]()
    for model in shipped():
        if (place := where(model)) == model.id:
            others.append(model.name)
            continue
        n = longest(model)
        rows.append([model.name, place, gb(model.n_weights * ELEMENT_BYTES[kind]), tokens(n, model.shape.window)])
    table = on_terminal(Sheet(["model", "here", "weights", "longest prompt"], rows, n_keys=2))
    formula = FORMULA.format(share=width.SHARE, pass_values=width.PASS_VALUES)
    table.caption_justify = "left"
    table.caption = (
        f"{formula}; {kind}, full attention\n{len(others)} more have settings and are on the hub: {', '.join(others)}; "
        "what one has and which methods run on it: python run.py --check model=NAME"
    )
    return table


def longest(model: Shipped) -> int:
    """Tokens of the longest prompt that fits now, as runs plan with memory."""
    load, width = import_module("kvbench.engine.checkpoints.load"), import_module("kvbench.engine.books.width")
    element_bytes = ELEMENT_BYTES[load.resolve_dtype("auto", "auto")]
    return fits.longest(model.shape, model.n_weights, free_bytes(), element_bytes, width.SHARE, width.PASS_VALUES)


def tokens(n: int, window: int) -> str:
    """How long a prompt may be."""
    return "does not fit" if n == 0 else f"{n:,}" + (" (all)" if n == window else "")


def where(model: Shipped) -> str:
    """Whether a model's weights are here, or its name on the hub."""
    if model.id == "embedded":
        return "here, embedded" if find_spec(header.EMBEDDED_PACKAGE) else "make setup"
    hub = Path(import_module("huggingface_hub.constants").HF_HUB_CACHE)
    folder = hub / f"models--{model.id.replace('/', '--')}"
    snapshots = folder.glob("snapshots/*/config.json")
    if any(any(config.parent.glob(f"*.{kind}")) for config in snapshots for kind in ("safetensors", "bin")):
        return "here, in the hub's cache"
    return model.id


# --- data ---


def data() -> list[Fact]:
    """Per task, which of upstream's files a run would find, and how to get the others."""
    own_data = import_module("kvbench.tasks.known").own_data
    return [Fact(name, found(name, data)) for name, data in own_data().items()]


def found(name: str, data: Any) -> str:
    """Which of a task's files are here, and how to get the others."""
    sources = import_module("kvbench.tasks.sources")
    here = data.here(sources.find)
    where = f" in {shown(root_of(here[0], sources))}" if here else ""
    if len(here) == len(data.files):
        return f"{count(len(here), data.what)}{where}"
    ways = [f"kvbench fetch {name}"] if data.pieces else []
    if data.by_hand:
        ways.append(data.by_hand if ways else f"{data.by_hand}, into {shown(sources.data_roots(None)[-1])}")
    has = f"{len(here)} of {count(len(data.files), data.what)}{where}" if here else "none"
    return f"{has}; {data.without}; to get them: {'; '.join(ways)}"


def tasks() -> dict[str, Any]:
    """Every task's class, by its name."""
    return import_module("kvbench.tasks.known").known_tasks()


def root_of(path: Path, sources: Any) -> Path:
    """The data folder that a file lies in, or the folder of a package."""
    return next((root for root in sources.data_roots(None) if path.is_relative_to(root)), path.parent)


# --- words ---


def count(n: int, what: str) -> str:
    return f"{n} {what if n != 1 else what.removesuffix('s')}"


def has_gpu() -> bool:
    return import_module("torch").cuda.is_available()


def free_bytes() -> int:
    """What a model may take, where it would be loaded."""
    torch, width = import_module("torch"), import_module("kvbench.engine.books.width")
    return width.free_bytes(torch.device("cuda:0" if has_gpu() else "cpu"))


def existing(path: Path) -> Path:
    """The folder, or the one above it that is there."""
    return next(one for one in (path, *path.parents) if os.path.isdir(one))  # noqa: PTH112 - of a closed folder too


def writable(path: Path) -> bool:
    """Whether this user may write to the folder, or make it."""
    return os.access(existing(path), os.W_OK)


def shown(path: Path) -> str:
    """Short: from the present folder or from home, if it lies below."""
    for base, sign in ((Path.cwd(), "."), (Path.home(), "~")):
        if path.is_relative_to(base):
            return str(Path(sign) / path.relative_to(base))
    return str(path)


def gb(n: float) -> str:
    return f"{n / 1e9:,.1f} GB"


if __name__ == "__main__":
    sys.exit(main())
