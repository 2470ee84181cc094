"""`kvbench submit RUNS --out FOLDER --submitter NAME --licence TERMS`: a submission of finished runs.

What a submission may hold is copied, pictures and locks are left out. A run that corrects one that was handed in before
says so with `--supersedes RUN=ID`, ID being what the site shows of it.

Not here: whether it holds (`evals/verify.py`).
"""

import argparse
import json
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from kvbench.engine.errors import ConfigError
from kvbench.engine.terminal import say
from kvbench.evals.submission.manifest import MANIFEST, RUN_FILES, Manifest
from kvbench.results.files import is_file


def submit(
    runs: Iterable[Path], out: Path, *, submitter: str, licence: str, hardware: str = "", methods: Iterable[Path] = (),
    supersedes: dict[str, str] | None = None,
) -> Manifest:  # fmt: skip
    """Copy finished runs to a new folder, with its manifest."""
    folders = sorted({path.parent for root in runs for path in Path(root).rglob("result.json")})
    if not folders:
        raise ConfigError("there is no finished run to hand in")
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} is not empty; give a new folder with --out")
    commits, machines = set[str](), set[str]()
    for folder in folders:
        to = out / "runs" / folder.name
        if to.exists():
            raise ConfigError(f"there are two runs {folder.name}; hand in one of them")
        to.mkdir(parents=True)
        for name in RUN_FILES:
            if is_file(folder / name):
                shutil.copyfile(folder / name, to / name)
        env = json.loads((folder / "env.json").read_text(encoding="utf-8"))
        commits.add(str(env.get("git_sha") or "unknown"))
        machines.add(f"{env.get('cpu', 'unknown')}, {env.get('n_cores', '?')} cores")
    for method in methods:
        (out / "methods").mkdir(exist_ok=True)
        shutil.copyfile(method, out / "methods" / method.name)
    words = {"commit": ", ".join(sorted(commits))[:500], "hardware": hardware or "; ".join(sorted(machines))[:500]}
    try:
        manifest = Manifest(
            submitter=submitter, licence=licence,
            supersedes={f"runs/{run}": old for run, old in (supersedes or {}).items()}, **words,
        )  # fmt: skip
    except ValueError as error:
        raise ConfigError(f"the submission cannot be made: {error}") from None
    (out / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
    return manifest


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="kvbench submit", description="Make a submission of finished runs.")
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("--out", type=Path, required=True, help="the submission, a new folder")
    parser.add_argument("--submitter", required=True, help="who hands it in")
    parser.add_argument("--licence", required=True, help="of the answers, such as CC-BY-4.0")
    parser.add_argument("--hardware", default="", help="the machine; as env.json has it where not given")
    parser.add_argument("--method", type=Path, action="append", default=[], help="a method's own file")
    parser.add_argument("--supersedes", action="append", default=[], metavar="RUN=ID", help="a run that is corrected")
    given = parser.parse_args(arguments)
    old = dict(word.partition("=")[::2] for word in given.supersedes)
    try:
        submit(
            given.runs, given.out, submitter=given.submitter, licence=given.licence, hardware=given.hardware,
            methods=given.method, supersedes=old,
        )  # fmt: skip
    except (ConfigError, OSError, ValueError) as error:
        say("submit:", error, file=sys.stderr)
        return 2
    say(f"{given.out}: {len([*given.out.glob('runs/*')])} runs; verify it with kvbench verify {given.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
