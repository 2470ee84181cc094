"""`make site`: finished runs, submissions and kept scores as a folder of plain files, for people, without a server.

    kvbench site [RUNS…] [--kept] [--out site] [--verdicts FILE…] [--since OLD_SITE] [--most MB]
    kvbench site --diff OLD NEW

RUNS are folders of runs, or submissions with a manifest.json. Without any the site is of what the repository has: the
scores that it keeps (which --kept puts beside other runs), its submissions, and finished runs below runs/. A reader
loads the page, its script, a list of benchmarks and the figures of one; then others, and answers as they are looked at.
All of it are scripts, since a page from disk may read nothing else, and each is text: packed data.

Not here: whether what a submission says holds (`kvbench verify`, whose verdicts are shown).
"""

import argparse
import hashlib
import json
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvbench.engine.errors import ConfigError
from kvbench.engine.foreign import NoJson, one_line, parse_json, read_bytes
from kvbench.engine.terminal import say
from kvbench.plots.read import Run, default_root, load, told_apart
from kvbench.plots.site.app import FIRST, MORE, as_page_reads, data, harmless, page, script_text
from kvbench.plots.site.boards import evidence, machine, rank_all
from kvbench.plots.site.changes import LIST, changes, read_list
from kvbench.plots.site.methods import card
from kvbench.plots.site.origin import Kept, provenance
from kvbench.plots.site.overview import benchmark, full_once, overview
from kvbench.plots.site.samples import in_columns, iter_pieces, pack_samples, short
from kvbench.results import METRICS
from kvbench.results.files import unsealed

SAID = ("submitter", "licence", "hardware")
REPORTED = "reported"  # of a run that nobody has verified
QUESTIONS = {"full_prompt": "shown", "context_only": "hidden"}
# The site opens on the model that came out last; one that is not named here counts as older than all of them.
RELEASED = {
    "llama-3.1-8b-instruct": "2024-07", "smollm2-135m": "2024-11-01", "qwen2.5-coder-0.5b": "2024-11-12",
    "qwen3-0.6b": "2025-04", "qwen3-4b": "2025-04", "qwen3-8b": "2025-04", "smollm3-3b": "2025-07",
}  # fmt: skip
PIECE = 200_000  # characters of answers that are loaded together
MARK = ".kvbench-site"  # in a folder that this command may replace
Files = Iterator[tuple[str, str]]  # path and packed data


@dataclass
class Handed:
    """What submissions say of their runs besides the runs."""

    of: dict[Path, dict[str, str]] = field(default_factory=dict[Path, dict[str, str]])  # of each folder with a manifest
    corrects: dict[Path, str] = field(default_factory=dict[Path, str])  # id of the old run, by the new one's folder
    verdicts: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])  # by the run's id

    def said_of(self, run: Run) -> dict[str, str]:
        if isinstance(run, Kept):
            return {}
        return next((said for root, said in self.of.items() if run.folder.is_relative_to(root)), {})

    def superseded(self, runs: Mapping[str, Run]) -> dict[str, str]:
        """Id of the run that corrects, by the old one's: nobody takes another's run away, nor one of another thing."""

        def same(run: Run) -> tuple[Any, ...]:
            return benchmark(run), run.result.method, self.said_of(run).get("submitter")

        found: dict[str, str] = {}
        for id, run in runs.items():
            old = self.corrects.get(run.folder)
            if old is None or old == id:
                continue
            if old in runs and same(runs[old]) == same(run):
                found[old] = id
            else:
                say(f"not superseded: {one_line(old)}, which is no run of the same by the same", file=sys.stderr)
        return found


def id_of(run: Run) -> str:
    """The digest of result.json, which seals all that it was made of; of kept scores theirs, and of what was asked."""
    if isinstance(run, Kept):
        text = json.dumps([run.result.config_hash, {row.id: row.score for row in run.rows}], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]
    return hashlib.sha256((run.folder / "result.json").read_bytes()).hexdigest()[:16]


def read_handed(roots: Iterable[Path], verdicts: Iterable[Path]) -> Handed:
    """`ConfigError` where a manifest or a file of verdicts is none."""
    found = Handed()
    for root in roots:
        if (root / "manifest.json").is_file():
            manifest = read_object(root / "manifest.json")
            found.of[root] = {key: one_line(str(manifest.get(key, "")), 200) for key in SAID}
            supersedes = manifest.get("supersedes")
            if isinstance(supersedes, Mapping):
                found.corrects |= {root / str(run): str(old) for run, old in supersedes.items()}
    for file in verdicts:
        runs = read_object(file).get("runs")
        for id, one in runs.items() if isinstance(runs, Mapping) else ():
            if not isinstance(one, Mapping) or not isinstance(one.get("verdict"), str):
                raise ConfigError(f"{file} holds no verdicts of kvbench verify")
            said = {key: [str(line) for line in one.get(key) or ()] for key in ("why", "findings")}
            found.verdicts[id] = {"verdict": one["verdict"], **said}
    return found


def read_object(path: Path) -> dict[str, Any]:
    try:
        text = read_bytes(path).decode()
        found = parse_json(unsealed(text.strip()))
        assert isinstance(found, dict)
        return found
    except (NoJson, ValueError, AssertionError) as error:
        raise ConfigError(f"{path} cannot be read ({error})") from None


class Site:
    """The data of a site, made one benchmark after the other."""

    def __init__(self, runs: Sequence[Run], root: Path, handed: Handed, most: int) -> None:
        self.handed, self.root, self.most = handed, root, most
        self.runs = {id_of(run): run for run in runs}  # the same run twice is one
        self.ids = {run.folder: id for id, run in self.runs.items()}
        self.superseded = handed.superseded(self.runs)
        self.methods = {run.method for run in self.runs.values()}
        self.list: dict[str, dict[str, Any]] = {}
        self.index: list[dict[str, Any]] = []
        self.evidence: list[dict[str, Any]] = []

    def files(self) -> Files:
        """Name and packed data of everything but the list of benchmarks."""
        groups: dict[tuple[str, str], list[Run]] = {}
        for run in self.runs.values():
            groups.setdefault(benchmark(run), []).append(run)
        for (group, task), members in sorted(groups.items()):
            yield from self.benchmark(group, task, members, len(groups))
        names = sorted({run.result.method for run in self.runs.values()} | {one["method"] for one in self.evidence})
        yield "data-methods", data({name: one for name in names if (one := card(name))})
        yield "data-evidence", data(in_columns(short(self.evidence)))

    def first(self, title: str, changed: Sequence[tuple[str, str]] = ()) -> tuple[str, str]:
        """The list of benchmarks, which the page reads first; it comes after all files."""
        about = {
            "title": title, "benchmarks": self.index, "n": len(self.runs), "start": self.start(),
            "changes": changed[:1000], "metrics": {name: [one.better, one.scale] for name, one in METRICS.items()},
        }  # fmt: skip
        return "data-index", data(about)

    def start(self) -> str:
        """The benchmark that the page opens on: of the newest model the largest, if somebody compressed anything."""

        def worth(one: Mapping[str, Any]) -> tuple[bool, str, int]:
            return one["methods"] > 1, RELEASED.get(one["model"], ""), one["answers"]

        return max(self.index, key=worth)["id"]

    def benchmark(self, group: str, task: str, members: Sequence[Run], n: int) -> Files:
        """The data of one benchmark: runs that may be compared."""
        name = hashlib.sha256(f"{group}\n{task}".encode()).hexdigest()[:10]
        current = [run for run in members if self.ids[run.folder] not in self.superseded]
        old = [run for run in members if self.ids[run.folder] in self.superseded]
        once, same = full_once(current)
        told, past = overview(once, self.root, self.methods), overview(old, self.root, self.methods)
        for runs, described in ((once, told["runs"]), (old, past["runs"])):
            rank_all(runs, described)
        every, told["runs"] = [*once, *old], [*told["runs"], *past["runs"]]
        told["looks"] = past["looks"] | told["looks"]
        for run, one in zip(every, told["runs"], strict=True):
            one |= self.about(run)
            for other in (run.folder, *same.get(run.folder, ())):
                self.remember(self.ids[other], run, one, f"{task}, {group}")
        self.evidence += evidence(name, told["runs"][: len(once)], once)
        samples = pack_samples(every, self.most // n, PIECE)
        run = every[0]
        words = [word for word in group.split(" · ") if word not in (run.model, run.result.protocol)]
        self.index.append({
            "id": name, "model": run.model, "task": task, "where": " · ".join(words), "group": group,
            "question": QUESTIONS.get(run.result.protocol, run.result.protocol), "n": len(every),
            "methods": len({run.method for run in every}), "answers": sum(len(run.rows) for run in every),
            "cut": samples.cut,
        })  # fmt: skip
        yield f"{name}/data-overview", data(as_page_reads(told, samples.starts))
        origins = [{"id": self.ids[run.folder]} | provenance(run, same.get(run.folder, ())) for run in every]
        yield f"{name}/data-origins", data(origins)
        for place, text in iter_pieces(samples):
            yield f"{name}/{place}", text

    def about(self, run: Run) -> dict[str, Any]:
        """What the site says of a run besides its scores: who made it where, and how far it is believed."""
        id = self.ids[run.folder]
        judged = self.handed.verdicts.get(id, {"verdict": REPORTED, "why": [], "findings": []})
        return {
            "machine": machine(run), "verdict": judged["verdict"],
            "why": "; ".join([*judged["why"], *judged["findings"]]),
            "by": " · ".join(filter(None, self.handed.said_of(run).values())),
            "superseded_by": self.superseded.get(id, ""), "preset": run.result.method,
        }  # fmt: skip

    def remember(self, id: str, run: Run, told: Mapping[str, Any], where: str) -> None:
        best = told["parts"][0] if told["parts"] else {}
        self.list[id] = {
            "folder": run.folder.name, "benchmark": where, "variant": told["variant"], "score": run.result.score,
            "metric": run.result.metric or "score", "n": run.result.n_samples, "verdict": told["verdict"],
            "rank": best.get("rank"), "superseded_by": told["superseded_by"],
        }  # fmt: skip


def as_script(name: str, text: str) -> str:
    """A file that hands its content to the page; base64, so that no text can end it."""
    return f'kvbench("{name}","{text}")\n'


def write(out: Path, files: Iterable[tuple[str, str]]) -> int:
    """Write the files; how many bytes they have."""
    n = 0
    for path, text in files:
        (out / path).parent.mkdir(parents=True, exist_ok=True)
        content = text.encode("utf-8", "replace")
        (out / path).write_bytes(content)
        n += len(content)
    return n


def make(
    roots: Sequence[Path], out: Path, verdicts: Sequence[Path], since: Path | None, most: int, kept: Sequence[Run] = ()
) -> str:
    """Make the site anew; what was made, in words. A folder that is no site of ours is refused."""
    if out.exists() and any(out.iterdir()) and not (out / MARK).exists():
        raise ConfigError(f"{out} is not empty and is no site; choose another folder with --out")
    runs = told_apart([run for root in roots for run in load(root)])
    if not runs and not kept:
        raise ConfigError(f"{', '.join(map(str, roots))}: there is no finished run; make some, as with make run")
    old = read_list(since) if since is not None else {}
    runs = [replace(run, folder=run.folder.resolve()) for run in runs]
    root = common_folder([run.folder for run in runs])
    handed = read_handed([root.resolve() for root in roots], verdicts)
    if out.exists():
        shutil.rmtree(out)
    out.mkdir(parents=True)
    (out / MARK).write_text("made by kvbench site\n")
    site = Site([*runs, *(replace(run, folder=root / run.folder) for run in kept)], root, handed, most)
    n = write(out, ((f"data/{name}.js", as_script(name, text)) for name, text in site.files()))
    listed = harmless(site.list)
    n += write(out, [(LIST, json.dumps(listed, indent=0, sort_keys=True) + "\n")])
    changed = [] if since is None else sorted(changes(old, listed))
    name, text = site.first("KVBench results", changed)
    n += write(out, [("more.js", script_text(MORE))])
    first = [(f"data/{name}.js", as_script(name, text)), ("site.js", script_text(FIRST)), ("index.html", page())]
    n_first = write(out, first) + (out / "data" / site.start() / "data-overview.js").stat().st_size
    size = f"{(n + n_first) / 1e6:.1f} MB, of which {n_first / 1e3:.0f} kB are read first"
    return f"{len(site.runs)} runs of {len(site.index)} benchmarks, {size}"


def common_folder(folders: Sequence[Path]) -> Path:
    parts = [folder.parts[:-1] for folder in folders] or [Path.cwd().parts]
    n = next((i for i, same in enumerate(zip(*parts, strict=False)) if len(set(same)) > 1), min(map(len, parts)))
    return Path(*parts[0][:n])


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="kvbench site", description="Make a site of finished runs.")
    parser.add_argument("runs", nargs="*", type=Path, help="folders of runs, or submissions; what the repository has")
    parser.add_argument("--kept", action="store_true", help="the scores that the repository keeps, beside RUNS")
    parser.add_argument("--out", type=Path, default=Path("site"), help="the site's folder")
    parser.add_argument("--verdicts", type=Path, action="append", default=[], help="what kvbench verify --out wrote")
    parser.add_argument("--since", type=Path, help="an earlier version, whose differences a page lists")
    parser.add_argument("--most", type=int, default=200, help="MB that answers may take")
    parser.add_argument("--diff", nargs=2, type=Path, metavar=("OLD", "NEW"), help="print what changed")
    given = parser.parse_args(argv)
    try:
        if given.diff:
            found = sorted(changes(*map(read_list, given.diff)))
            for kind, words in found:
                say(f"{kind}: {words}")
            return int(any(kind == "gone" for kind, _ in found))
        roots, verdicts, kept = given.runs, given.verdicts, list[Run]()
        if given.kept or not roots:
            from kvbench.plots.site.evidence import committed, kept_runs

            kept = kept_runs()
        if not roots:
            handed = committed()
            roots = [*filter(Path.is_dir, [default_root()]), *handed]
            verdicts = [*verdicts, *(file for one in handed if (file := one.with_suffix(".verdicts.json")).is_file())]
        done = make(roots, given.out, verdicts, given.since, given.most * 10**6, kept)
    except (ConfigError, OSError) as error:
        say("site:", one_line(str(error)), file=sys.stderr)
        return 2
    say(f"{one_line(str(given.out))}: {done}")
    return 0
