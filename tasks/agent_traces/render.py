"""A trace as one text, and where in it each decision stands.

Templates   `model`: the model's chat template with `tools=`, where it has them; `plain`: calls and outputs as words of
            ordinary turns, with the tools after the policy. A model without a chat template gets `User: ` and
            `Assistant: `.

Not here: what a trace is asked (`task.py`).
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.engine.errors import ConfigError, first_line
from kvbench.tasks.calls.read import CLOSE, OPEN
from kvbench.tasks.prompt import TODAY, dated, render

Message = Mapping[str, Any]
HOW = f"""\
A call of a tool is written as
{OPEN}
{{"name": …, "arguments": {{…}}}}
{CLOSE}"""


@dataclass(frozen=True)
class Talk:
    """A conversation with an agent."""

    policy: str
    tools: Sequence[Mapping[str, Any]]
    messages: Sequence[Message]


def has_tools(tokenizer: Any) -> bool:
    """Whether the model's chat template takes tools."""
    return "tools" in str(tokenizer.chat_template or "")


class Renderer:
    """The text of a talk up to any of its messages."""

    def __init__(self, tokenizer: Any, talk: Talk, template: str) -> None:
        self.tokenizer, self.talk = tokenizer, talk
        self.is_plain = template == "plain" or not has_tools(tokenizer)
        self.turns = self.plain() if self.is_plain else self.rich()

    @property
    def name(self) -> str:
        """The template's name as the result says it."""
        if not self.is_plain:
            return "the model's, with tools"
        return "plain turns of the model's" if self.tokenizer.chat_template else "plain, without a chat template"

    def plain(self) -> list[dict[str, Any]]:
        tools = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in self.talk.tools)
        turns = [{"role": "system", "content": f"{self.talk.policy.strip()}\n\n# Tools\n{tools}\n\n{HOW}"}]
        for message in self.talk.messages:
            if message["role"] == "tool":
                words = f"<tool_response>\n{message['content']}\n</tool_response>"
                turns.append({"role": "user", "content": words})
            else:
                turns.append({"role": message["role"], "content": spoken(message)})
        return turns

    def rich(self) -> list[dict[str, Any]]:
        turns: list[dict[str, Any]] = [{"role": "system", "content": self.talk.policy.strip()}]
        for message in self.talk.messages:
            turn = {key: value for key, value in message.items() if key in ("role", "name")}
            turn["content"] = message.get("content") or ""
            if calls := message.get("tool_calls"):
                turn["tool_calls"] = [
                    {"type": "function", "function": {
                        "name": call["function"]["name"], "arguments": arguments_of(call),
                    }} for call in calls
                ]  # fmt: skip
            turns.append(turn)
        return turns

    def before(self, index: int) -> str:
        """All that the agent reads before its message of this index: the policy and all messages before it."""
        turns = self.turns[: index + 1]
        if not self.tokenizer.chat_template:
            names = {"system": "System", "user": "User", "assistant": "Assistant"}
            return "".join(f"{names[turn['role']]}: {turn['content']}\n\n" for turn in turns) + "Assistant:"
        if self.is_plain:
            return render(self.tokenizer, turns, False)
        try:
            return self.tokenizer.apply_chat_template(
                turns, tools=list(self.talk.tools), tokenize=False, add_generation_prompt=True, enable_thinking=False,
                date_string=f"{TODAY:%d %b %Y}", **dated(self.tokenizer),
            )  # fmt: skip
        except Exception as error:
            raise ConfigError(
                f"this model's chat template cannot be rendered with tools ({first_line(error)}); use "
                "task.template=plain"
            ) from error

    def steps(self, indices: Sequence[int]) -> list[str]:
        """The text before each of these messages; each must go on where the one before it ended."""
        texts = [self.before(index) for index in indices]
        for text, longer in itertools.pairwise(texts):
            if not longer.startswith(text):
                raise ConfigError(
                    "this model's chat template writes earlier turns anew when later ones come; use task.template=plain"
                )
        return texts


def spoken(message: Message) -> str:
    """What an assistant's or a user's message says in words."""
    calls = [
        json.dumps({"name": call["function"]["name"], "arguments": arguments_of(call)}, ensure_ascii=False)
        for call in message.get("tool_calls") or ()
    ]
    written = [f"{OPEN}\n{call}\n{CLOSE}" for call in calls]
    return "\n".join(filter(None, [message.get("content") or "", *written]))


def arguments_of(call: Mapping[str, Any]) -> Any:
    arguments = call["function"]["arguments"]
    return json.loads(arguments) if isinstance(arguments, str) else arguments
