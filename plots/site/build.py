"""`make site`: finished runs and submissions as a folder of plain files, for people and without a server.

    kvbench site RUNS… [--out site] [--verdicts FILE…] [--since OLD_SITE] [--most MB]
    kvbench site --diff OLD NEW

RUNS are folders of runs, or submissions with a manifest.json. Before a benchmark is chosen a reader loads the page, its
script and a list of benchmarks; then that benchmark's figures; and answers run by run as they are looked at. All of it
are scripts, since a page from disk may read nothing else, and each is text: packed data that the page unpacks.

Not here: whether what a submission says holds (`kvbench verify`, whose verdicts are shown).
"""

import argparse
import hashlib
import html
import json
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvbench.engine.errors import ConfigError
from kvbench.engine.foreign import NoJson, one_line, parse_json, read_bytes
from kvbench.engine.terminal import lines_of, say
from kvbench.plots.read import Run, load, told_apart
from kvbench.plots.report import page as report
from kvbench.plots.report.charts import vega_script
from kvbench.plots.report.origin import provenance
from kvbench.plots.report.overview import benchmark, full_once, overview
from kvbench.plots.report.samples import compact, iter_pieces, pack_samples, packed
from kvbench.plots.site.boards import evidence, machine, rank_all
from kvbench.plots.site.changes import LIST, changes, read_list
from kvbench.plots.site.methods import card
from kvbench.results import METRICS
from kvbench.results.files import unsealed

ASSETS = Path(__file__).resolve().parent
# The report's, in the order in which they need each other, and the pages around them.
SHARED = (
    *("dom", "state", "theme", "filters", "card", "downloads", "charts", "sheet", "results", "words", "samples"),
    "origins",
)
OWN = ("load", "board", "method", "run", "which", "main")
SAID = ("submitter", "licence", "hardware")
SELF_REPORTED = "self-reported"
POLICY = (
    "default-src 'none'; script-src 'self' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
    "form-action 'none'"
)
MARK = ".kvbench-site"  # in a folder that this command may replace


@dataclass
class Handed:
    """What submissions say of their runs besides the runs."""

    of: dict[Path, dict[str, str]] = field(default_factory=dict[Path, dict[str, str]])  # of each folder with a manifest
    corrects: dict[Path, str] = field(default_factory=dict[Path, str])  # id of the old run, by the new one's folder
    verdicts: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])  # by the run's id

    def said_of(self, run: Run) -> dict[str, str]:
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
    """The digest of result.json, which seals all that it was made of."""
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
    """The files of a site, by their paths, made one benchmark after the other."""

    def __init__(self, runs: Sequence[Run], root: Path, handed: Handed, most: int) -> None:
        self.handed, self.root, self.most = handed, root, most
        self.runs = {id_of(run): run for run in runs}  # the same run twice is one
        self.ids = {run.folder: id for id, run in self.runs.items()}
        self.superseded = handed.superseded(self.runs)
        self.list: dict[str, dict[str, Any]] = {}
        self.index: list[dict[str, Any]] = []
        self.evidence: list[dict[str, Any]] = []

    def files(self) -> Iterator[tuple[str, str]]:
        """Path and text of every file."""
        groups: dict[tuple[str, str], list[Run]] = {}
        for run in self.runs.values():
            groups.setdefault(benchmark(run), []).append(run)
        for (group, task), members in sorted(groups.items()):
            yield from self.benchmark(group, task, members, len(groups))
        names = sorted({run.result.method for run in self.runs.values()})
        yield "data/data-charts.js", data("data-charts", report.CHARTS)
        yield "data/data-vega.js", script("data-vega", packed(vega_script()))
        names += sorted({one["method"] for one in self.evidence} - {*names})
        methods = {name: one for name in names if (one := card(name))}
        yield "data/data-methods.js", data("data-methods", methods)
        yield "data/data-evidence.js", data("data-evidence", report.in_columns(report.short(self.evidence)))
        yield LIST, json.dumps(harmless(self.list), indent=0, sort_keys=True) + "\n"

    def benchmark(self, group: str, task: str, members: Sequence[Run], n: int) -> Iterator[tuple[str, str]]:
        """The files of one benchmark: runs that may be compared."""
        name = hashlib.sha256(f"{group}\n{task}".encode()).hexdigest()[:10]
        current = [run for run in members if self.ids[run.folder] not in self.superseded]
        old = [run for run in members if self.ids[run.folder] in self.superseded]
        once, same = full_once(current)
        told, past = overview(once, self.root), overview(old, self.root)
        rank_all(once, told["runs"])
        rank_all(old, past["runs"])
        every, told["runs"] = [*once, *old], [*told["runs"], *past["runs"]]
        told["looks"] = past["looks"] | told["looks"]
        for run, one in zip(every, told["runs"], strict=True):
            one |= self.about(run)
            for other in (run.folder, *same.get(run.folder, ())):
                self.remember(self.ids[other], run, one, f"{task}, {group}")
        self.evidence += evidence(name, told["runs"][: len(once)], once)
        samples = pack_samples(every, self.most // n, 0)
        words = group.split(" · ")
        model = every[0].model
        self.index.append({
            "id": name, "model": model, "task": task, "where": " · ".join(words[1:]), "n": len(every),
            "methods": len({run.method for run in every}), "cut": samples.cut,
        })  # fmt: skip
        origins = [provenance(run, same.get(run.folder, ())) for run in every]
        yield f"data/{name}/data-overview.js", data("data-overview", report.as_page_reads(told, samples.starts))
        for i, origin in enumerate(origins):
            yield f"data/{name}/data-origin-{i}.js", data(f"data-origin-{i}", origin)
        for place, text in iter_pieces(samples):
            yield f"data/{name}/{place}.js", script(place, text)

    def about(self, run: Run) -> dict[str, Any]:
        """What the site says of a run besides the report: who made it where, and how far it is believed."""
        id = self.ids[run.folder]
        judged = self.handed.verdicts.get(id, {"verdict": SELF_REPORTED, "why": [], "findings": []})
        return {
            "id": id, "machine": machine(run), "verdict": judged["verdict"],
            "why": "; ".join([*judged["why"], *judged["findings"]]),
            "by": " · ".join(filter(None, self.handed.said_of(run).values())),
            "superseded_by": self.superseded.get(id, ""), "preset": run.result.method,
        }  # fmt: skip

    def remember(self, id: str, run: Run, told: Mapping[str, Any], where: str) -> None:
        best = told["parts"][0] if told["parts"] else {"rank": None}
        self.list[id] = {
            "folder": run.folder.name, "benchmark": where, "variant": told["variant"], "score": run.result.score,
            "metric": run.result.metric or "score", "n": run.result.n_samples, "verdict": told["verdict"],
            "rank": best["rank"], "superseded_by": told["superseded_by"],
        }  # fmt: skip


def harmless(tree: Any) -> Any:
    """Texts in which whatever a terminal or a page might obey is escaped: controls, changes of direction."""
    if isinstance(tree, str):
        return lines_of(tree)
    if isinstance(tree, Mapping):
        return {harmless(str(key)): harmless(value) for key, value in tree.items()}
    return [harmless(value) for value in tree] if isinstance(tree, list | tuple) else tree


def data(name: str, tree: Any) -> str:
    return script(name, packed(compact(harmless(tree))))


def script(name: str, text: str) -> str:
    """A file that hands its content to the page; base64, so that no text can end it."""
    return f'kvbench("{name}","{text}")\n'


def page(site: Site, changed: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """The page itself, and what it loads first."""
    told = {
        "benchmarks": site.index, "n": len(site.runs), "changes": changed[:1000],
        "metrics": {name: {"better": one.better, "scale": one.scale} for name, one in METRICS.items()},
    }  # fmt: skip
    yield "data/data-index.js", data("data-index", told)
    scripts = [*((report.ASSETS / "js", name) for name in SHARED), *((ASSETS / "js", name) for name in OWN)]
    texts = [(folder / f"{name}.js").read_text(encoding="utf-8") for folder, name in scripts]
    yield "site.js", "\n".join(['(() => {\n"use strict";', *texts, "})();\n"])
    css = [file.read_text(encoding="utf-8") for file in (report.ASSETS / "page.css", ASSETS / "site.css")]
    template = (ASSETS / "site.html").read_text(encoding="utf-8")
    filled = {"policy": html.escape(POLICY), "style": "\n".join(css)}
    pieces = template.split("@@")
    yield "index.html", "".join(filled[piece] if i % 2 else piece for i, piece in enumerate(pieces))


def write(out: Path, files: Iterable[tuple[str, str]]) -> int:
    """Write the files; how many bytes they have."""
    n = 0
    for path, text in files:
        (out / path).parent.mkdir(parents=True, exist_ok=True)
        content = text.encode("utf-8", "replace")
        (out / path).write_bytes(content)
        n += len(content)
    return n


def make(roots: Sequence[Path], out: Path, verdicts: Sequence[Path], since: Path | None, most: int) -> str:
    """Make the site anew; what was made, in words. A folder that is no site of ours is refused."""
    if out.exists() and any(out.iterdir()) and not (out / MARK).exists():
        raise ConfigError(f"{out} is not empty and is no site; choose another folder with --out")
    runs = told_apart([run for root in roots for run in load(root)])
    if not runs:
        raise ConfigError(f"{', '.join(map(str, roots))}: there is no finished run")
    old = read_list(since) if since is not None else {}
    common = Path(*common_parts([run.folder.resolve() for run in runs]))
    runs = [replace(run, folder=run.folder.resolve()) for run in runs]
    handed = read_handed([root.resolve() for root in roots], verdicts)
    if out.exists():
        shutil.rmtree(out)
    out.mkdir(parents=True)
    (out / MARK).write_text("made by kvbench site\n")
    site = Site(runs, common, handed, most)
    n = write(out, site.files())
    changed = [] if since is None else sorted(changes(old, harmless(site.list)))
    first = write(out, page(site, changed))
    size = f"{(n + first) / 1e6:.1f} MB, of which {first / 1e3:.0f} kB are read before a benchmark is chosen"
    return f"{len(site.runs)} runs of {len(site.index)} benchmarks, {size}"


def common_parts(folders: Sequence[Path]) -> list[str]:
    parts = [folder.parts[:-1] for folder in folders]
    n = next((i for i, same in enumerate(zip(*parts, strict=False)) if len(set(same)) > 1), min(map(len, parts)))
    return list(parts[0][:n])


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="kvbench site", description="Make a site of finished runs.")
    parser.add_argument("runs", nargs="*", type=Path, help="folders of runs, or submissions")
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
        if not given.runs:
            raise ConfigError("give folders of runs; make some first, for example with make run")
        done = make(given.runs, given.out, given.verdicts, given.since, given.most * 10**6)
    except (ConfigError, OSError) as error:
        say("site:", one_line(str(error)), file=sys.stderr)
        return 2
    say(f"{one_line(str(given.out))}: {done}")
    return 0
