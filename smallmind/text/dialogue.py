"""Messages between people -> conversations in which one of them is the assistant."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from smallmind.text.chat import ASSISTANT, USER

PAUSE_HOURS = 8  # without a message, after which a new conversation begins: a night
MAX_TURNS = 20  # after which one begins too: the last tenth of all conversations is held out


class Message(NamedTuple):
    """A text in a chat, and who wrote it."""

    speaker: str
    text: str
    seconds: float | None = None  # since any moment


def divided(chat: Iterable[Message]) -> Iterator[list[Message]]:
    """Sorts a chat by time, and divides it where a pause is -> the messages of each part."""
    chat = list(chat)
    if all(message.seconds is not None for message in chat):
        chat.sort(key=lambda message: message.seconds or 0)
    part: list[Message] = []
    for message in chat:
        before = part[-1].seconds if part else None
        if before is not None and (message.seconds or before) - before > PAUSE_HOURS * 3600:
            yield part
            part = []
        part.append(message)
    if part:
        yield part


def joined(messages: Iterable[Message], assistant: str) -> list[dict[str, str]]:
    """Joins neighbours -> turns with role and content."""
    turns: list[dict[str, str]] = []
    for message in messages:
        role = ASSISTANT if message.speaker == assistant else USER
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] += f"\n{message.text}"
        else:
            turns.append({"role": role, "content": message.text})
    return turns
