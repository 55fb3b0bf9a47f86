"""Chats in JSON, as messengers and assistants export them -> messages."""

import html
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, NamedTuple

from smallmind.text.chat import ASSISTANT
from smallmind.text.dialogue import Message

# Messenger and Instagram write these texts in the name of people.
META_NOTICE = re.compile(
    r"Reacted .{1,40} to your message\s*|Liked a message|.{1,80} sent an? \w+( message)?\."
)


class Export(NamedTuple):
    """A form of exported chats. Fields have spaces between alternatives, dots between levels."""

    messages: str  # of a chat; empty: each record is a message
    speaker: str
    text: str
    time: str
    said: str  # values of fields in messages that somebody wrote; none: missing or false
    clean: Callable[[str], str] = str  # texts and names
    parent: str = ""  # of a message with a role, or the node of a tree: the one before it
    names: str = ""  # of fields that a record has which is a message


def _as_utf8(text: str) -> str:
    """Mends a text in which each byte of UTF-8 is a character, as Meta exports them."""
    with suppress(UnicodeError):
        text = text.encode("latin-1").decode()
    return "" if META_NOTICE.fullmatch(text) else text


def _as_shown(text: str) -> str:
    """Replaces Slack's `<https://x.org|label>`, `<#C1|name>` and `<!here>` by their words."""
    text = re.sub(r"<!(?:[^<>|]*\|)?@?([^<>]*)>", r"@\1", text)
    return html.unescape(re.sub(r"<(#?)(?:[^<>|]*\|)?([^<>]*)>", r"\1\2", text))


def _uncited(text: str) -> str:
    """Leaves out the marks with which ChatGPT cites its sources."""
    return re.sub("\ue200.*?\ue201", "", text, flags=re.DOTALL)


def _unthought(text: str) -> str:
    """Leaves out the thoughts that open-webui folds away."""
    return re.sub('<details type="reasoning".*?</details>\\s*', "", text, flags=re.DOTALL)


IN_META = "type=,Generic,Share call_duration= is_unsent="
IN_RECORDS = ("message", None)  # their types
LAST_NODE = "current_node chat.history.currentId"  # in a tree of messages
IN_SLACK = "type=message subtype=,bot_message,me_message,thread_broadcast,file_share"
IN_CHATGPT = (
    "content.content_type=text,multimodal_text recipient=,all "
    "metadata.is_visually_hidden_from_conversation="
)
# As in export_output_json.cpp of Telegram Desktop, JsonMessageWriter.cs and MessageKind.cs of
# DiscordChatExporter (20, 23: answers of bots), models.py of signal-export, and files that the
# others have exported.
EXPORTS = {
    "Telegram": Export(
        "messages", "from from_id", "text", "date_unixtime date", "type=message role="
    ),
    "Discord": Export(
        "messages", "author.name", "content", "timestamp", "type=Default,Reply,20,23"
    ),
    "Messenger or Instagram": Export(
        "messages", "sender_name", "content", "timestamp_ms", IN_META, _as_utf8
    ),
    "Messenger": Export("messages", "senderName", "text", "timestamp", "type=text,link isUnsent="),
    "Slack": Export("", "user username bot_id", "text", "ts", IN_SLACK, _as_shown, names="type ts"),
    "Signal": Export(
        "", "sender", "body", "date", "deleted= call=", names="date sender body quote reactions"
    ),
    "Google Chat": Export("messages", "creator.name creator.email", "text", "created_date", ""),
    "open-webui": Export(
        "chat.history.messages", "role", "content", "timestamp", "", _unthought, "parentId"
    ),
    "ChatGPT": Export(
        "mapping", "author.role", "content.parts", "create_time", IN_CHATGPT, _uncited, "parent"
    ),
    "Claude": Export(
        "chat_messages", "sender", "content text", "created_at", "", str, "parent_message_uuid"
    ),
}


def program_of(record: object) -> str:
    """Returns the name of the program that has exported a record; "" for any other."""
    for program, export in EXPORTS.items():
        messages = itertools.chain.from_iterable(_chats_in(record, export))
        if export.parent and (field(record, "uuid") or field(record, "current_node")):
            is_found = isinstance(record, dict) and export.messages in record
        else:  # Slack's messages are records, the first of which may be of a service
            is_found = any(not export.messages or _speaker(each, export) for each in messages)
        if is_found:
            return program
    return ""


def messages_in(
    program: str, records: Iterable[object], names: Mapping[str, str]
) -> list[list[Message | None]]:
    """The records of a program's export -> its chats, with None for what nobody wrote.

    `names` are those of speakers by their ids.
    """
    export = EXPORTS[program]
    chats = [chat for record in records for chat in _chats_in(record, export)]
    if not export.messages:  # threads are chats
        threads: dict[object, list[Any]] = {}
        for (message,) in chats:
            threads.setdefault(field(message, "thread_ts"), []).append(message)
        chats = list(threads.values())
    return [[_message(message, export, names) for message in chat] for chat in chats]


def _chats_in(record: object, export: Export) -> Iterator[list[Any]]:
    """Yields the messages of each chat in a record, in their order."""
    if not export.messages:
        names = record.keys() if isinstance(record, dict) else ()
        if all(x in names for x in export.names.split()) and field(record, "type") in IN_RECORDS:
            yield [record]
        return
    several = (field(record, f"{name}.list") or [] for name in ("chats", "left_chats"))
    for chat in itertools.chain([record], *several):
        found = field(chat, export.messages)
        if isinstance(found, list):
            found = {field(x, "uuid") or i: x for i, x in enumerate(found)}
        nodes = dict(found) if isinstance(found, dict) else {}
        messages = list(nodes.values())
        if any(field(node, export.parent) in nodes for node in messages):
            messages, key = [], field(chat, LAST_NODE) or next(reversed(nodes))
            while node := nodes.pop(key, None):
                messages.append(node)
                key = field(node, export.parent)
            messages.reverse()
        yield [field(x, "message") or x for x in messages]


def field(fields: Any, paths: str) -> Any:
    """Returns the first value at one of the paths that is neither missing nor empty."""
    for path in paths.split():
        value = fields
        for name in path.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        if value not in (None, "", []):
            return value
    return None


def _speaker(message: object, export: Export) -> str | None:
    """Returns who wrote a message; None for what a service or a tool writes."""
    for each in export.said.split():
        path, _, values = each.partition("=")
        if str(field(message, path) or "") not in values.split(","):
            return None
    name = field(message, export.speaker)
    is_known = not export.parent or name in ("user", "human", ASSISTANT)
    return str(name) if name is not None and is_known else None


def _message(message: object, export: Export, names: Mapping[str, str]) -> Message | None:
    """Returns None for what nobody wrote, and for a message without text."""
    parts, speaker = field(message, export.text), _speaker(message, export)
    parts = parts if isinstance(parts, list) else [parts]
    texts = [field(part, "text") if isinstance(part, dict) else part for part in parts]
    texts += [field(x, "extracted_content") for x in field(message, "attachments") or ()]
    between = "\n\n" if export.parent else ""
    text = export.clean(between.join(x for x in texts if isinstance(x, str))).strip("\n")
    text = re.sub(r"@(\w+)", lambda found: f"@{names.get(found[1], found[1])}", text)
    if speaker is None or not text.strip():
        return None
    profile = field(message, "user_profile.display_name user_profile.real_name")
    name = names.get(speaker) or profile or export.clean(speaker)
    return Message(str(name), text, _seconds(field(message, export.time)))


def _seconds(time: object) -> float | None:
    """A number of seconds or milliseconds, or a date -> seconds since 1970; None for others."""
    try:
        if isinstance(time, str) and time.endswith("UTC"):  # of Google
            written = " ".join(time.split())
            date = datetime.strptime(written, "%A, %B %d, %Y at %I:%M:%S %p %Z")
            return date.replace(tzinfo=UTC).timestamp()
        if isinstance(time, str) and "-" in time:
            date = datetime.fromisoformat(time)
            return date.replace(tzinfo=date.tzinfo or UTC).timestamp()
        seconds = float(time)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
    return seconds / 1000 if seconds > 1e11 else seconds
