"""The text that WhatsApp exports: lines with a date and a time, as its languages write them."""

import re
from collections.abc import Iterable
from datetime import UTC, datetime
from itertools import accumulate, pairwise

from smallmind.text.dialogue import Message

# "[31.12.20, 23:59:59] ", "12/31/20, 11:59 PM - ", "31/12/2020 à 23:59 - ", "2020/12/31 下午1:59 -"
# with marks of the direction between numbers where people write from right to left.
BETWEEN = "[\u200e\u200f]?[./-][\u200e\u200f]? ?"
LINE = re.compile(
    "[\ufeff\u200e\u200f]*"
    rf"(\[)?(\d{{1,4}}){BETWEEN}(\d{{1,2}}){BETWEEN}(\d{{1,4}})([^\d\n]{{1,16}})"
    r"(\d{1,2})[:.](\d\d)(?:[:.]\d\d)?([^\d\n]{0,16}?)(?(1)\]|\s-)(?:\s|$)",
)
# "[23:59, 31/12/2020] ", as its page copies messages, and "23:59, 31/12/2020 - " in Vietnamese
TIME_FIRST = re.compile(r"^([^\d[]?\[?)(\d{1,2}[:.]\d\d[^\d\n]{0,8}), ([\d./-]{6,10})(?=\]|\s-)")
SPEAKER = re.compile(r'[\u200e\u200f~\s]*([^:"“\n]{1,80}):(?:\s|$)')  # a service has none
ORDERS = (2, 1, 0), (2, 0, 1), (0, 1, 2)  # where year, month and day are
AFTERNOON = re.compile(r"p\.?\s?m|下午|晚上|午後|오후|م|μ\.\s?μ|ös|अपराह्न", re.IGNORECASE)
FORENOON = re.compile(r"a\.?\s?m|上午|凌晨|早上|午前|오전|ص|π\.\s?μ|öö|पूर्वाह्न", re.IGNORECASE)
# WhatsApp writes these in the name of people: all after a left-to-right mark, words in angle
# brackets, and the names of files. The others stand for messages that are not there.
ADDED = re.compile(
    r"(?:^.* • ?)?\u200e.*|^\u200f.*|^<[^<>=/\n]*\s[^<>=/\n]*>|\s?<[^<>=/\n]*\s[^<>=/\n]*>$"
    r"|^(?:IMG|VID|AUD|PTT|STK|DOC)-\d{8}-WA\d+\.\w+ \(.*\)$",
    re.MULTILINE,
)
ABSENT = re.compile(
    r"null|(image|video|audio|sticker|gif|document|contact card) omitted"
    r"|(missed|silenced) (voice|video) call.*|waiting for this message.*"
    r"|(this message was deleted|you deleted this message|diese nachricht wurde gelöscht"
    r"|du hast diese nachricht gelöscht|se eliminó este mensaje|eliminaste este mensaje"
    r"|ce message a été supprimé|vous avez supprimé ce message|mensagem apagada|essa mensagem foi"
    r" apagada|você apagou esta mensagem|questo messaggio è stato eliminato)\.?",
    re.IGNORECASE,
)
MARKS = re.compile("[\u200e\u200f\u202a-\u202e\u2066-\u2069]")  # of the direction of writing


def parse(lines: Iterable[str]) -> list[Message | None]:
    """-> the messages, which may have several lines; None for what nobody wrote."""
    found: list[tuple[re.Match[str], list[str]]] = []
    for line in lines:
        line = TIME_FIRST.sub(r"\1\3, \2", line)
        if begun := LINE.match(line):
            found.append((begun, [line[begun.end() :]]))
        elif found:
            found[-1][1].append(line)
    times = _times([begun for begun, _ in found])
    return [_message("\n".join(rest), time) for (_, rest), time in zip(found, times, strict=True)]


def _message(content: str, seconds: float | None) -> Message | None:
    named = SPEAKER.match(content)
    if not named:
        return None
    text = MARKS.sub("", ADDED.sub("", content[named.end() :])).strip()
    is_said = text and not ABSENT.fullmatch(text)
    return Message(MARKS.sub("", named[1]).strip(), text, seconds) if is_said else None


def _times(found: list[re.Match[str]]) -> list[float | None]:
    """Returns seconds, in the order of year, month and day in which they hardly ever decrease."""

    def wrong(times: list[float | None]) -> int:
        steps = pairwise(time for time in times if time is not None)
        return 2 * times.count(None) + sum(after < before for before, after in steps)

    times = min(([_seconds(x, order) for x in found] for order in ORDERS), key=wrong)
    known = [time for time in times if time is not None]
    # Not all words for the halves of a day are known, and the file is in the right order.
    return [*accumulate(known, max)] if len(known) == len(times) else times


def _seconds(found: re.Match[str], order: tuple[int, int, int]) -> float | None:
    year, month, day = (int(found[2 + i]) for i in order)
    hour, words = int(found[6]), f"{found[5]}{found[8]}"
    if AFTERNOON.search(words):
        hour = hour % 12 + 12
    elif FORENOON.search(words):
        hour %= 12
    try:
        year += 2000 * (year < 100)
        return datetime(year, month, day, hour, int(found[7]), tzinfo=UTC).timestamp()
    except ValueError:
        return None
