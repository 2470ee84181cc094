"""Packs what a GPU machine without network may lack: `make gpu-kit`, into gpu-kit/ of the checkout.

Wheels at the versions of constraints.txt; all but Hypothesis' are Python alone and serve every machine, and that one is
for the Python of `--python` on Linux and x86-64. Torch, Triton, transformers and numpy must be there. pip takes wheels
from its cache where it can. The checkout travels with the folder: copied, or as one file by `--tar`.

Not here: what is done with them (`python3 -m kvbench.benchmarks.gpu.offline`).
"""

import argparse
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
KIT = ROOT / "gpu-kit"
# Hydra and what it needs; pytest, what Hypothesis needs; the terminal's tables; the embedded model's format.
PACKAGES = (
    *("hydra-core", "omegaconf", "antlr4-python3-runtime", "packaging", "filelock"),
    *("pytest", "iniconfig", "pluggy", "sortedcontainers"),
    *("rich", "markdown-it-py", "mdurl", "pygments", "gguf"),
)
COMPILED = ("hypothesis",)
PLATFORMS = ("manylinux2014_x86_64", "manylinux_2_17_x86_64", "manylinux_2_28_x86_64")
MOST = 64 << 20  # bytes of tree and kit


def pinned(names: Sequence[str], constraints: str) -> list[str]:
    """Each with its version."""
    lines = {line.partition("==")[0].lower(): line for line in constraints.split() if "==" in line}
    if lacking := [name for name in names if name not in lines]:
        raise SystemExit(f"gpu-kit: constraints.txt has no {', '.join(lacking)}")
    return [lines[name] for name in names]


def git(*words: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True).stdout


def tracked() -> list[Path]:
    paths = (ROOT / name for name in git("ls-files", "-z").split("\0") if name)
    return [path for path in paths if path.is_file() or path.is_symlink()]


def size(files: Sequence[Path]) -> int:
    return sum(file.stat().st_size for file in files)


def pip(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *words], check=True)


def pack(python: str) -> int:
    """Bytes of tree and kit."""
    shutil.rmtree(KIT, ignore_errors=True)
    wheels = KIT / "wheels"
    wheels.mkdir(parents=True)
    constraints = (ROOT / "constraints.txt").read_text()
    # By pip wheel, since antlr's runtime is on PyPI as source.
    pip("wheel", "--quiet", "--no-deps", "--wheel-dir", str(wheels), *pinned(PACKAGES, constraints))
    for_python = ["--only-binary=:all:", "--implementation=cp", f"--python-version={python}"]
    for_python += [f"--platform={name}" for name in PLATFORMS]
    pip("download", "--quiet", "--no-deps", "--dest", str(wheels), *for_python, *pinned(COMPILED, constraints))
    found = sorted(wheels.glob("*.whl"))
    (KIT / "commit").write_text(git("describe", "--always", "--dirty", "--exclude=*"))
    tree, kit = size(tracked()), size(found)
    print(f"gpu-kit: {len(found)} wheels, {kit / 1e6:.1f} MB, in {KIT}; the tree beside it has {tree / 1e6:.1f} MB")
    return tree + kit


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make gpu-kit", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tar", type=Path, help="one file of tree and kit, such as kvbench-gpu.tar.gz")
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    parser.add_argument("--python", default=own, help=f"version of the machine's Python; {own} without")
    asked = parser.parse_args(words)
    n_bytes = pack(asked.python)
    if n_bytes > MOST:
        print(f"gpu-kit: {n_bytes / 1e6:.1f} MB are more than the {MOST / 1e6:.1f} of a kit", file=sys.stderr)
        return 1
    if asked.tar is not None:
        with tarfile.open(asked.tar, "w:gz") as archive:
            for file in [*tracked(), *(file for file in KIT.rglob("*") if file.is_file())]:
                archive.add(file, Path("kvbench") / file.relative_to(ROOT))
        print(f"gpu-kit: {asked.tar}, {asked.tar.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
