"""The parts of a first hour on a GPU: for each its question, and the jobs that answer it.

Jobs of one part run beside each other where they compile or test, and alone where they are timed. `a+b` runs the jobs
of both parts at once.

Standard library alone.

Not here: how jobs are run (`jobs.py`), what is measured (`benchmarks/gpu`).
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from kvbench.benchmarks.gpu.offline.jobs import Job

ROOT = Path(__file__).resolve().parents[3]
METHODS = ROOT / "methods"
FOUR = ("full", "snapkv", "quest", "pqcache")
OPS = ("attend", "codes", "pages", "clusters", "pq", "top")
RUNGS = ("shipped", "dropping", "visible", "pages")  # of `benchmarks/gpu/serving.py`
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
WAITED_FOR = ONE_THREAD | {"CUDA_LAUNCH_BLOCKING": "1"}  # a fault is the launch's that made it
# Warnings of packages that constraints.txt does not pin are none of a kernel's.
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default", "--tb=short", "--maxfail=8")
NEED_NO_GPU = {"test_build", "test_aot", "test_jit"}
SANITIZED = ("topk", "pages", "select_attend", "union", "values", "append", "blocks", "weights", "pq_scores", "logits")


@dataclass(frozen=True)
class Plan:
    """What the jobs of all parts need to know."""

    out: Path
    is_rehearsal: bool  # small, on a CPU and in Triton's interpreter
    methods: Sequence[str]

    @property
    def some(self) -> Sequence[str]:
        return FOUR if self.is_rehearsal else self.methods

    def bench(self, part: str, name: str, seconds: float, *words: str, env: dict[str, str] | None = None) -> Job:
        """A part of `kvbench.benchmarks.gpu`. Jobs with an `env` run beside others, and have a file of rows of their
        own."""
        small = ["--device", "cpu", "--small"] if self.is_rehearsal else []
        rows = self.out / "rows" / f"{part}-{name}.csv" if env else None
        command = [
            sys.executable,
            "-m",
            "kvbench.benchmarks.gpu",
            *small,
            "--csv",
            str(rows or self.out / "gpu.csv"),
            *words,
        ]
        return Job(part, name, command, seconds, env or {}, rows)

    def tests(self, part: str, name: str, seconds: float, *words: str) -> Job:
        return Job(part, name, [sys.executable, *PYTEST, *words], seconds, WAITED_FOR)

    def lengths(self, n: int) -> list[str]:
        return ["--lengths", str(300 if self.is_rehearsal else n)]


def facts(plan: Plan) -> list[Job]:
    small = ["--device", "cpu"] if plan.is_rehearsal else []
    return [Job("facts", "facts", [sys.executable, "-m", "kvbench.benchmarks.gpu.facts", *small], 180)]


def build(plan: Plan) -> list[Job]:
    return [Job("build", "c++", [sys.executable, "-m", "kvbench.kernels.build"], 300)]


def ops(plan: Plan) -> list[Job]:
    return [plan.bench("ops", name, 200, "--only", "kernels", "--ops", name, env=WAITED_FOR) for name in OPS]


def tests(plan: Plan) -> list[Job]:
    files = [file for file in sorted((ROOT / "tests/kernels").rglob("test_*.py")) if file.stem not in NEED_NO_GPU]
    if plan.is_rehearsal:
        return [plan.tests("tests", "pages", 300, "tests/kernels/test_pages.py")]
    kernels = [plan.tests("tests", file.stem.removeprefix("test_"), 240, str(file)) for file in files]
    return [plan.tests("tests", "marked", 240, "-m", "gpu", "tests/test_on_gpu.py"), *kernels]


def agreement(plan: Plan) -> list[Job]:
    words = ("--only", "agreement", "--methods")
    return [plan.bench("agreement", name, 200, *words, name, env=ONE_THREAD) for name in plan.some]


def kernels(plan: Plan) -> list[Job]:
    return [plan.bench("kernels", "all", 240, "--only", "copies", "kernels")]


def methods(plan: Plan, n: int, names: Sequence[str] = FOUR, batch: int = 1) -> list[Job]:
    words = ("--only", "methods", *plan.lengths(n), "--methods", *names, "--batches", str(batch))
    part = f"methods-{round(n / 1024)}k" + f"-by-{batch}" * (batch > 1)
    return [plan.bench(part, f"{len(names)}-methods", 600, *words)]


def steps(plan: Plan) -> list[Job]:
    small = ["--device", "cpu", "--small"] if plan.is_rehearsal else []
    return [Job("steps", "8k", [sys.executable, "-m", "kvbench.benchmarks.gpu.steps", *small, *FOUR], 240)]


def baseline(plan: Plan) -> list[Job]:
    return [plan.bench("baseline", "8k", 400, "--only", "baseline", *plan.lengths(8192))]


def memory(plan: Plan) -> list[Job]:
    return [plan.bench("memory", "32k", 400, "--only", "memory", *plan.lengths(32768))]


def sweep(plan: Plan) -> list[Job]:
    few = ["--methods", "snapkv", "quest"] if plan.is_rehearsal else []
    return [plan.bench("sweep", "8k", 300, "--only", "sweep", *plan.lengths(8192), *few)]


def run(plan: Plan) -> list[Job]:
    """The command line from end to end."""
    model, n = ("smollm2-135m", 300) if plan.is_rehearsal else ("llama-3.1-8b", 8192)
    words = ["method=pqcache", f"model={model}", "weights=random", "task=latency", f"task.lengths=[{n}]"]
    words += ["task.repeats=1", "task.n_new=8", "ratio=0.2", f"out={plan.out / 'run'}"]
    return [Job("run", "latency", [sys.executable, "run.py", *words], 300)]


def serving(plan: Plan) -> list[Job]:
    """vLLM with a method inside, by each kernel that it may choose."""
    command = [sys.executable, "-m", "kvbench.benchmarks.gpu.serving"]
    if find_spec("vllm") is None:
        return [Job("serving", "vllm-is-not-installed", [*command, "shipped"], 60)]
    kinds = {"float32": ["--dtype", "float32"]}
    if not plan.is_rehearsal:
        flashinfer = ["--dtype", "bfloat16", "--backend", "FLASHINFER"]
        kinds |= {"bfloat16": ["--dtype", "bfloat16"], "flashinfer": flashinfer}
    cases = [(rung, kind) for kind in kinds for rung in RUNGS if (rung, kind) != ("pages", "flashinfer")]
    return [Job("serving", f"{rung}-{kind}", [*command, rung, *kinds[kind]], 300) for rung, kind in cases]


def sanitize(plan: Plan) -> list[Job]:
    """Kernels' tests under CUDA's memory checker, without torch's own cache of memory: reads beside a tensor show."""
    tool = [] if plan.is_rehearsal else ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9"]
    env = ONE_THREAD | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    names = SANITIZED[1:2] if plan.is_rehearsal else SANITIZED
    return [
        Job("sanitize", name, [*tool, sys.executable, *PYTEST, f"tests/kernels/test_{name}.py"], 300, env)
        for name in names
    ]


@dataclass(frozen=True)
class Part:
    question: str
    jobs: Callable[[Plan], list[Job]]
    is_alone: bool = False  # one job at a time, since it is timed


PARTS = {
    "facts": Part("do launches, graphs, pinned memory and Triton work, and how fast is the card?", facts, True),
    "build": Part("do the C++ kernels compile?", build),
    "ops": Part("does each group of Triton kernels agree with its reference, in a process each?", ops),
    "tests": Part("do the tests pass that need a GPU, and those of the kernels, a file a process?", tests),
    "agreement": Part("does every method say what it says on a CPU, a method a process?", agreement),
    "kernels": Part("how long does each kernel take, as a share of a copy's bandwidth?", kernels, True),
    "methods-8k": Part("time to the second token and per token, memory", lambda plan: methods(plan, 8192), True),
    "methods-32k": Part("the same behind 32,768 tokens", lambda plan: methods(plan, 32768), True),
    "methods-128k": Part("the same behind 131,000", lambda plan: methods(plan, 131_000), True),
    "methods-32k-by-8": Part("the same for eight requests at once", lambda plan: methods(plan, 32768, batch=8), True),
    "memory": Part("how many requests of 32,768 tokens fit at once, and what do they give?", memory, True),
    "methods-all": Part("the same of every method", lambda plan: methods(plan, 8192, plan.some), True),
    "steps": Part("where does a step's time go, and how long is the GPU busy in it?", steps, True),
    "baseline": Part("how fast is a step of transformers with a static cache and one graph?", baseline, True),
    "sweep": Part("what do twenty variants in one batch cost, beside full attention alone?", sweep, True),
    "run": Part("does run.py time a method of Llama-3.1-8B's shape from end to end?", run, True),
    "serving": Part("does a method inside vLLM, if it is installed, say what KVBench's engine says?", serving, True),
    "sanitize": Part("does any kernel read or write beside its tensors?", sanitize),
}
USUAL = ("facts", "build+ops+tests+agreement", "kernels", "methods-8k", "steps", "run", "baseline", "sweep")
USUAL = (*USUAL, "methods-32k", "methods-128k", "methods-32k-by-8", "memory", "serving")
