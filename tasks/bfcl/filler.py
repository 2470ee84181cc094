"""Other tools' outputs, which stand between the tools and the question of a long form: drawn work on records.

Not here: what an event is (`tasks/agent_traces/made.py`), how many fill a length (`task.py`).
"""

import json
import random

from kvbench.tasks.agent_traces import made
from kvbench.tasks.agent_traces.render import Message
from kvbench.tasks.agent_traces.task import Notes, schema
from kvbench.tasks.bfcl.plans import DONE, calling

N_RECORDS = 12
OUTPUT_TOKENS = 120
PER_EVENT = 170  # tokens, about
BEGIN = "Please keep the records in order first."
NAMES = [name for name, *_ in made.TOOLS]
TOOLS = [schema(*one) for one in made.TOOLS]


def messages(seed: str, n: int) -> list[Message]:
    """The first `n` events of drawn work as messages; none without events."""
    if not n:
        return []
    said: list[Message] = [{"role": "user", "content": BEGIN}]
    notes = Notes(random.Random(f"{seed} notes"), OUTPUT_TOKENS)
    for event in made.draw_events(random.Random(seed), n, N_RECORDS):
        output = event["output"] | {"notes": notes.one()}
        said.append(calling([{"name": event["tool"], "arguments": event["arguments"]}]))
        said.append({"role": "tool", "name": event["tool"], "content": json.dumps(output, ensure_ascii=False)})
    return [*said, {"role": "assistant", "content": DONE}]
