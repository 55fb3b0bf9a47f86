"""People's own chats, as messengers and assistants export them -> conversations."""

import itertools
import shlex
from collections.abc import Iterable, Iterator, Mapping

from smallmind.checks import count_of
from smallmind.corpus.decoding import decoded
from smallmind.corpus.entry import Entry, Piece
from smallmind.corpus.json_values import parsed
from smallmind.corpus.reading import Reading, Unusable, shown
from smallmind.corpus.turns import TurnFields, Turns
from smallmind.text.chat import ASSISTANT
from smallmind.text.dialogue import MAX_TURNS, PAUSE_HOURS, Message, divided, joined
from smallmind.text.exports import EXPORTS, field, messages_in
from smallmind.text.whatsapp import parse

MAX_SPEAKERS = 12  # in an error
NOTHING = "of a service or without text"
UNASKED = "at the start, by the assistant"


def read_exported(entry: Entry, program: str, records: Iterable[object]) -> Iterator[Piece]:
    """The records of a program's export -> the turns of the conversations in them."""
    chats = messages_in(program, records, _people(entry) if program == "Slack" else {})
    return _read(entry, program, chats, ASSISTANT if EXPORTS[program].parent else None)


def read_whatsapp(entry: Entry) -> Iterator[Piece] | Iterator[str]:
    """Returns the conversations in a chat that WhatsApp has exported as a text."""
    messages = parse("".join(decoded(entry)).replace("\r\n", "\n").split("\n"))
    if not any(messages):
        return decoded(entry)
    return _read(entry, "WhatsApp", [messages])


def _read(
    entry: Entry, program: str, chats: list[list[Message | None]], assistant: str | None = None
) -> Iterator[Piece]:
    """Chats, with None for what nobody wrote -> the turns of the conversations in them.

    Unusable if it is not known who is the assistant.
    """
    reading, source = entry.reading, f"{program} chats"
    said = [[message for message in chat if message] for chat in chats]
    reading.count("Not read", "message", NOTHING, sum(map(len, chats)) - sum(map(len, said)))
    of_people = assistant is None
    if assistant is None:
        assistant = _assistant(entry, program, said)
        said = [messages for chat in said for messages in divided(chat)]
        source += (
            f", with {shown(assistant, 60)!r} as the assistant and a new conversation after "
            f"{PAUSE_HOURS} hours without a message, or {MAX_TURNS} turns,"
        )
    turns = Turns(entry, TurnFields("messages"), source=source)
    for number, messages in enumerate(said, 1):
        asked = list(itertools.dropwhile(lambda x: x.speaker == assistant, messages))
        reading.count("Not read", "message", UNASKED, len(messages) - len(asked))
        chat = joined(asked, assistant)
        size = MAX_TURNS if of_people else len(chat)
        # A last question, which nobody answers, begins no conversation.
        for start in range(0, max(1, len(chat) - 1), max(1, size)):
            stop = None if start + size >= len(chat) - 1 else start + size
            record = {"messages": chat[start:stop]}
            if piece := turns.read(record, f"conversation {number:,}"):
                yield piece


def _assistant(entry: Entry, program: str, chats: list[list[Message]]) -> str:
    """Returns the name of the one who answers. Unusable if --assistant does not say it."""
    reading, wanted = entry.reading, (entry.reading.assistant or "").strip()
    names = [message.speaker for chat in chats for message in chat]
    reading.program = program
    found = [name for name in names if name.casefold() == wanted.casefold()]
    if not found:
        reading.speakers.update(name for name, _ in itertools.groupby(names))
        raise unassigned(entry.name, reading)
    return wanted if wanted in found else found[0]


def unassigned(name: str, reading: Reading, paths: Iterable[str] = ()) -> Unusable:
    """Returns the error for chats in which nobody is known to be the assistant."""
    common = reading.speakers.most_common()
    listed = [f"{shown(who, 60)} ({count_of(n, 'turn')})" for who, n in common[:MAX_SPEAKERS]]
    listed += [f"{len(common) - len(listed):,} more"] * (len(common) > len(listed))
    likely = common[0][0] if common else "NAME"
    reason = f"is a {reading.program} chat, and nothing says who the assistant is"
    if reading.assistant:
        reason = f"is a {reading.program} chat without {shown(reading.assistant, 60)!r} in it"
    command = shlex.join(["smallmind", "train", *(paths or [name]), "--assistant", likely])
    return Unusable(name, reason, f"choose a speaker, {', '.join(listed)}: {command}")


def _people(entry: Entry) -> Mapping[str, str]:
    """Returns the names of Slack's users by their ids, from the file beside their folders."""
    users = entry.beside("users.json")
    if users is None:
        return {}
    known = entry.reading.people
    if users.name not in known:
        with entry.reading.paused():
            listed = parsed("".join(decoded(users)))
        fields = "profile.display_name profile.real_name real_name name"
        known[users.name] = {field(user, "id"): field(user, fields) for user in listed}
    return known[users.name]
