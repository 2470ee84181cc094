"""`python -m kvbench.serving.serve model=… method=snapkv ratio=0.2`: an OpenAI-compatible server, with a method in it.

The words are those of `run.py`. In addition: `rung=` (dropping where the method drops, visible where it retrieves),
`host=`, `port=`, `as_shipped=true` (vLLM without a method), `chains=16` (so many conversations are kept as the method
left them, and a next turn that begins with their tokens goes on from there), and vLLM's own flags as
`vllm.max_model_len=4096`.
`/v1/models` has the model's name with the method and its budget.

exit code: 0 it was stopped, 1 its engine died, 2 wrong input, in one sentence

Not here: vLLM (`serving/adapter`), in whose environment this runs: `make setup-serving`.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from kvbench.engine.checkpoints.load import locate
from kvbench.engine.errors import ConfigError
from kvbench.engine.terminal import say
from kvbench.serving.adapter.versions import need_vllm
from kvbench.serving.order import DROPPING, RUNGS, VISIBLE, Order, chosen
from kvbench.serving.rehearsal import BLOCK, rehearse


@dataclass
class Command:
    """A command line, read."""

    words: list[str] = field(default_factory=list)  # for run.py's conf
    flags: dict[str, Any] = field(default_factory=dict)  # vLLM's
    rung: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    as_shipped: bool = False
    chains: int = 0

    @classmethod
    def read(cls, argv: Sequence[str]) -> "Command":
        command = cls()
        for word in argv:
            key, is_one, text = word.partition("=")
            value = yaml.safe_load(text) if is_one else None
            if key.startswith("vllm."):
                command.flags[key.removeprefix("vllm.")] = value
            elif key in ("rung", "host", "port", "as_shipped", "chains"):
                usual = getattr(cls(), key)
                kind = str if usual is None else type(usual)
                if type(value) is not kind:
                    raise ConfigError(f"{word} is not allowed; {key} is of type {kind.__name__}, like {key}={usual}")
                setattr(command, key, value)
            else:
                command.words.append(word)
        return command

    def order(self) -> Order | None:
        """The order to vLLM; `ConfigError` where the method cannot be served."""
        if self.chains < 0 or (self.chains and self.as_shipped):
            raise ConfigError(
                f"chains={self.chains} must be the number of conversations that a method keeps, 0 or more"
            )
        if self.as_shipped:
            return None
        rung = self.rung or usual_rung(self.words)
        ranks = self.flags.get("tensor_parallel_size", 1)
        order = Order(tuple(self.words), rung, ranks=ranks, chains=self.chains)
        return rehearse(order, self.flags.get("block_size", BLOCK))


def usual_rung(words: Sequence[str]) -> str:
    """The rung on which a method saves what it can."""
    return DROPPING if chosen(tuple(words)).cell.traits.drops else VISIBLE


def model_of(words: Sequence[str]) -> tuple[str, str]:
    """Where the model lies, and what it is called."""
    spec = chosen(tuple(words)).settings.model
    return locate(spec.id, spec.revision, spec.trust_remote_code)[0], spec.name


def served_name(name: str, order: Order | None) -> str:
    """The model's name in `/v1/models`."""
    if order is None:
        return name
    return "-".join([name, *order.chosen.label.replace("ratio=", "").split()])


def main(argv: Sequence[str]) -> int:
    if {"-h", "--help"} & {*argv}:
        say(__doc__ or "")
        return 0
    try:
        command = Command.read(argv)
        if command.rung not in (None, *RUNGS):
            raise ConfigError(f"rung={command.rung} is unknown; use {', '.join(RUNGS[:-1])} or {RUNGS[-1]}")
        order = command.order()
        need_vllm()
        model, name = model_of(command.words)
        from kvbench.serving.adapter.server import serve

        flags = {"dtype": "float32"} | command.flags
        lived = serve(order, model, served_name(name, order), command.host, command.port, flags)
    except ConfigError as error:
        say("kvbench.serving.serve:", f"{error}", file=sys.stderr)
        return 2
    if not lived:
        say(
            "kvbench.serving.serve: the engine died, and requests under way got status 500; start it again",
            file=sys.stderr,
        )
    return 0 if lived else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
