"""Other tools' outputs, which stand between the tools and the question of a long form: drawn work on records.

Not here: what an event is (`tasks/agent_traces/made.py`), how many fill a length (`task.py`).
"""

import json
import random

from kvbench.tasks.agent_traces import made
from kvbench.tasks.agent_traces.render import Message
from kvbench.tasks.agent_traces.task import schema, words
from kvbench.tasks.bfcl.plans import DONE, calling

N_RECORDS = 12
N_WORDS = 60  # of a note
PER_EVENT = 170  # tokens, about
BEGIN = "Please keep the records in order first."
NAMES = [name for name, *_ in made.TOOLS]
TOOLS = [schema(*one) for one in made.TOOLS]


def messages(seed: str, n: int) -> list[Message]:
    """The first `n` events of drawn work as messages; none without events."""
    if not n:
        return []
    said: list[Message] = [{"role": "user", "content": BEGIN}]
    for i, event in enumerate(made.draw_events(random.Random(seed), n, N_RECORDS)):
        at = random.Random(f"{seed} {i}").randrange(len(words()) - N_WORDS)
        output = event["output"] | {"notes": " ".join(words()[at : at + N_WORDS])}
        said.append(calling([{"name": event["tool"], "arguments": event["arguments"]}]))
        said.append({"role": "tool", "name": event["tool"], "content": json.dumps(output, ensure_ascii=False)})
    return [*said, {"role": "assistant", "content": DONE}]
