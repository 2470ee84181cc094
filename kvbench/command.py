"""`kvbench WORD …`: every command under one name.

A word is looked up here, and the module that has the command is imported then, so that help and a misspelt word answer
at once. `run`, `check` and `ls` are `kvbench/run.py`'s; the others are `main` of a module, which takes its own --help.

Not here: what any of them does.
"""

import sys
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path

from kvbench.checkout import VERSION
from kvbench.engine.terminal import lacks, say

WORDS = {  # what follows each, what it does, and the module of those whose `main` takes the words after
    "run": ("KEY=VALUE…", "run methods, print a table: method=snapkv ratio=0.2", ""),
    "check": ("[model=NAME]", "what this machine has; what a model has and fits", ""),
    "ls": ("KIND [NAME]", "methods, tasks, models, experiments, combinations", ""),
    "table": ("[RUNS]", "finished runs as a table: Markdown, LaTeX, HTML, CSV", "plots.table"),
    "report": ("[RUNS]", "finished runs as one HTML page", "plots.site.report"),
    "view": ("[RUNS]", "that page, opened in a browser", "plots.site.view"),
    "export": ("[RUNS…]", "finished runs as Parquet, CSV or others' formats", "plots.export.command"),
    "site": ("[RUNS…]", "a site of plain files, to which others can add", "plots.site.build"),
    "submit": ("RUNS…", "a submission of runs, for others to check", "evals.submit"),
    "verify": ("FOLDER", "what of a submission holds", "evals.verify"),
    "conformance": ("FILE", "whether a method or task holds what all must", "tests.conformance"),
    "calibrate": ("KIND", "measure what some methods have to know of a model", "evals.calibrate"),
    "fetch": ("TASK…", "a benchmark's files, ahead of time", "evals.fetch"),
    "cite": ("[METHOD…]", "the papers of methods, as BibTeX", "methods.cite"),
    "completion": ("SHELL", "completion of words for bash, zsh or fish", ""),
}
LISTS = ("methods", "tasks", "models", "experiments", "combinations")
SHELLS = {
    "bash": """\
_kvbench() {
    local IFS=$'\\n'
    COMPREPLY=($(kvbench --complete "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
}
COMP_WORDBREAKS=${COMP_WORDBREAKS//=/}
complete -o default -o nospace -F _kvbench kvbench
""",
    "zsh": """\
_kvbench() {
    local -a found
    found=("${(@f)$(kvbench --complete "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    if [[ -n "$found" ]]; then compadd -Q -S '' -a found; else _files; fi
}
compdef _kvbench kvbench
""",
    "fish": "complete -c kvbench -a '(kvbench --complete (commandline -opc)[2..] (commandline -ct) 2>/dev/null)'\n",
}


def main(argv: Sequence[str] | None = None) -> int:
    word, *rest = [*(sys.argv[1:] if argv is None else argv)] or ["--help"]
    if word in ("-h", "--help", "help"):
        say(help_text())
        return 0
    if word in ("-V", "--version"):
        say(f"kvbench {VERSION}")
        return 0
    if word == "--complete":
        for found in completions(rest):
            say(found)
        return 0
    if word not in WORDS:
        return refuse(word)
    if word == "completion":
        return completion(rest)
    if word in ("run", "check", "ls"):
        from kvbench.run import main as run
        from kvbench.run import stop_at_signals

        stop_at_signals()
        return run({"run": [], "check": ["--check"], "ls": ["--list"]}[word] + rest)
    try:
        return import_module(f"kvbench.{WORDS[word][2]}").main(rest)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("kvbench"):
            raise
        say(f"kvbench {word}:", lacks(error), file=sys.stderr)
        return 2


def help_text() -> str:
    lines = [f"  {word:<11} {given:<12}  {about}" for word, (given, about, _) in WORDS.items()]
    return "\n".join(
        [
            "KVBench: KV-cache compression methods under one budget, and what each costs",
            "",
            "usage: kvbench WORD …",
            "",
            *lines,
            "",
            "kvbench run --help lists what can be run; every other word has its own --help",
        ]
    )


def refuse(word: str) -> int:
    near = get_close_matches(word, WORDS, 1)
    if word in LISTS:
        hint = f"did you mean `kvbench ls {word}`?"
    elif "=" in word or word == "-m":
        hint = f"runs start with `kvbench run`: kvbench run {word} …"
    else:
        hint = f"did you mean {near[0]!r}?" if near else f"it is one of {', '.join(WORDS)}"
    say(f"kvbench: no command {word!r}; {hint}", file=sys.stderr)
    return 2


def completion(words: Sequence[str]) -> int:
    if len(words) != 1 or words[0] not in SHELLS:
        say(f"kvbench completion: give one of {', '.join(SHELLS)}", file=sys.stderr)
        return 2
    say(SHELLS[words[0]], end="")
    return 0


def completions(words: Sequence[str]) -> Iterator[str]:
    """What the last of these words may become; nothing where it is a file's name, which shells complete themselves."""
    *before, last = words or [""]
    if not before:
        yield from (f"{word} " for word in WORDS if word.startswith(last))
    elif before[0] in ("run", "calibrate", "check"):
        yield from (word for word in of_run(last) if word.startswith(last))
    elif before[0] == "cite":
        yield from (name for name in names("method") if name.startswith(last))
    elif before[0] in ("ls", "completion"):
        yield from (word for word in (LISTS if before[0] == "ls" else SHELLS) if word.startswith(last))
    elif before[0] == "fetch":
        yield from (name for name in names("task") if name.startswith(last))


def of_run(last: str) -> Iterator[str]:
    """Groups, keys, and the names in a group, of which a sweep has several after commas."""
    group, has_value, value = last.partition("=")
    if not has_value:
        groups = (path.name for path in conf().iterdir() if path.is_dir() and any(path.glob("*.yaml")))
        yield from (f"{group}=" for group in sorted(groups))
        from kvbench.run import keys_text

        keys = (line.partition(":") for line in keys_text().splitlines())
        yield from (f"{key}=" for key, colon, _ in keys if colon and key.isidentifier())
        return
    first, comma, _ = value.rpartition(",")
    yield from (f"{group}={first}{comma}{name}" for name in names(group))


def names(group: str) -> list[str]:
    return sorted(file.stem for file in (conf() / group).glob("*.yaml"))


def conf() -> Path:
    return Path(__file__).parent / "conf"


if __name__ == "__main__":
    sys.exit(main())
