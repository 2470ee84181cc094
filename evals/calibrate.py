"""`kvbench calibrate KIND model=NAME`: measure what methods have to know of a model, once, and keep it.

    kvbench calibrate channels model=smollm2-135m
    kvbench calibrate pca model=smollm2-135m text=book.txt tokens=8192 out=book.npz

Without `text` it reads the embedded prose and writes where runs with this model look by themselves; they would do the
same at first use. With a text or a length of your own say where to write (`out`), and name the file in
`method.calibration_file`. Besides `model` the command takes `device` and `dtype`.

kinds      channels  Double Sparsity's scores of channels
           pca       Loki's principal components of keys
           heads     DuoAttention's table, as text: conf/heads/MODEL.tsv, or out=FILE
           qfilters  Q-Filters' directions of queries
           queries   TriAttention's means of queries
           reuse     how well each layer's choice serves those above it, for reuse=file
           gate      a linear gate, with method=kvzap: fitted to KVzip's scores; minutes for the embedded model
exit code  0 written, 2 wrong input

Not here: the kinds (`methods/calibration/`).
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from kvbench.engine.declared import Count, expanded, reader
from kvbench.engine.errors import ConfigError, first_line
from kvbench.engine.foreign import read_text
from kvbench.engine.model import Model
from kvbench.engine.terminal import say
from kvbench.evals.models import load_model, resolve_hardware
from kvbench.evals.settings import from_words
from kvbench.methods.calibration import files
from kvbench.methods.calibration.files import Calibration, place
from kvbench.methods.calibration.kinds import KINDS, kind_of
from kvbench.methods.calibration.known import calibrate, last_tokens
from kvbench.methods.calibration.prose import embedded_prose, prose_name
from kvbench.methods.dropping.duo_attention import TABLES
from kvbench.methods.gates import files as gates
from kvbench.methods.gates.training import N_TOKENS, fit

GATE = "gate"
Made = tuple[Path, Callable[[Path], object]]
OWN = ("text", "tokens", "out")  # keys of this command
OF_A_RUN = ("model", "device", "dtype")


def main(words: Sequence[str]) -> int:
    if {"-h", "--help"} & {*words}:
        say((__doc__ or "").partition("\nNot here")[0].strip())
        return 0
    try:
        say(written(words))
    except ConfigError as error:
        say("kvbench calibrate:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    return 0


def written(words: Sequence[str]) -> Path:
    """Calibrate as the command line says: the file."""
    kinds = [word for word in words if "=" not in word]
    if len(kinds) != 1:
        raise ConfigError(f"give one kind of calibration, such as {' or '.join(KINDS)}, and model=NAME")
    given = dict(word.split("=", 1) for word in words if "=" in word)
    name, usual_tokens = usual_of(kinds[0], given)
    for key in given:
        if key not in OWN and key.partition(".")[0] not in OF_A_RUN:
            raise ConfigError(f"{key}={given[key]} means nothing here; give {', '.join((*OF_A_RUN, *OWN))}")
    tokens = given.get("tokens", str(usual_tokens))
    n_tokens = reader(Count)(int(tokens) if tokens.isdecimal() else tokens, "tokens")
    text, out = given.get("text"), given.get("out")
    if out is None and (text is not None or n_tokens != usual_tokens):
        raise ConfigError("a calibration of your own text or length is no default; say where to write it with out=FILE")
    if text is not None and not expanded("text", text).is_file():
        raise ConfigError(f"text={text} is no file; give a text file in UTF-8")
    prose, source = (embedded_prose(), prose_name()) if text is None else (read_text(expanded("text", text)), text)
    model = load_model(resolve_hardware(from_words([f"{key}={x}" for key, x in given.items() if key not in OWN])))
    ids = last_tokens(model, prose, n_tokens)
    if len(ids) < n_tokens:
        raise ConfigError(
            f"{source} has {len(ids)} tokens, and tokens={n_tokens} are asked for; use a longer text or fewer tokens"
        )
    with model.hooked():
        usual, write = fitted(model, name, ids, source) if kinds[0] == GATE else measured(model, name, ids, source)
    path = usual if out is None else expanded("out", out)
    try:
        write(path)
    except OSError as error:
        reason = error.strerror or first_line(error)
        raise ConfigError(f"{path} cannot be written ({reason}); give another out=FILE") from None
    return path


def usual_of(kind: str, given: dict[str, str]) -> tuple[str, int]:
    """A calibration's name, and how many tokens it takes; a gate's name is its method, taken from `given`."""
    if kind != GATE:
        return kind_of(kind).name, kind_of(kind).n_tokens
    method = given.pop("method", "none")
    if method != "kvzap":
        raise ConfigError(f"method={method} has no gate that is fitted here; use method=kvzap")
    return method, N_TOKENS


def measured(model: Model, name: str, ids: Sequence[int], source: str) -> Made:
    """A calibration: where it goes usually, and what writes it."""
    found = calibrate(model, name, ids, source)
    if name == "heads":
        return TABLES / f"{model.shape.name}.tsv", lambda path: write_table(path, found)
    return place(name, model.digest), lambda path: files.write(path, found)


def fitted(model: Model, name: str, ids: Sequence[int], source: str) -> Made:
    """A fitted gate, once it has said how well it orders the tokens of texts that it has not seen."""
    found = fit(model, ids, lambda text: say(text, file=sys.stderr))
    say(f"rank correlation with KVzip's scores of unseen text: {found.correlation:.3f}")
    facts = {
        "kind": name, "model": model.shape.name, "model_digest": model.digest, "text": source, "tokens": str(len(ids)),
        "rank_correlation": f"{found.correlation:.4f}",
    }  # fmt: skip
    return gates.place(name, model.digest), lambda path: gates.written(path, found.layers, facts)


def write_table(path: Path, found: Calibration) -> None:
    """A table of heads as DuoAttention reads it, with where it comes from."""
    about, shape_layers = found.about, found.about.layers
    facts = {
        "model": about.model,
        "model_digest": about.digest,
        "method": "largest weight of any token while the text is repeated, behind its full cache",
        "text": about.text,
        "tokens": about.n_tokens,
        "made": about.made,
        "command": f"kvbench calibrate heads model={about.model}",
    }
    if [*shape_layers] != [*range(len(shape_layers))]:
        raise ConfigError(f"{about.model} has layers without full attention, and a table of heads has a line for each")
    lines = [f"# {key}: {value}" for key, value in facts.items()]
    lines += ["\t".join(f"{x:.6f}" for x in row) for row in found.arrays["heads"]]
    path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
