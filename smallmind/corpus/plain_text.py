"""Plain text with something around it: the settings above Markdown, the times of subtitles."""

import html
import itertools
import re
from collections.abc import Iterator

from smallmind.corpus.decoding import decoded
from smallmind.corpus.entry import Entry
from smallmind.corpus.records import lines

MAX_FRONT_MATTER = 2**16  # characters
# YAML between lines of --- or TOML between lines of +++; a line above text begins neither.
FRONT_MATTER = re.compile(
    r"(?:---[ \t]*\r?\n(?:(?:[ \t#-].*|[\w\"'][^:\n]*:(?:[ \t].*)?)?\r?\n)*?(?:---|\.\.\.)"
    r"|\+\+\+[ \t]*\r?\n(?:.*\r?\n)*?\+\+\+)[ \t]*\r?(?:\n\s*|\Z)"
)
TIME = r"(?:\d+:)?\d{1,2}:\d{2}[.,]\d{1,3}"
TIMES = re.compile(rf"({TIME})\s*-->\s*({TIME})")
BRIEF = 0.05  # seconds: nobody reads what is shown for less
# Tags of SubRip, WebVTT (https://www.w3.org/TR/webvtt1/) and SubStation Alpha.
TAGS = re.compile(r"</?[A-Za-z][^>\n]*>|<[\d:.]+>|\{\\[^}\n]*\}")


def markdown(entry: Entry) -> Iterator[str]:
    """Yields a text without its front matter."""
    chunks, beginning = decoded(entry), ""
    for chunk in chunks:
        beginning += chunk
        if len(beginning) > MAX_FRONT_MATTER or beginning[:1] not in "-+":
            break
    if found := FRONT_MATTER.match(beginning):
        entry.reading.note("left out the front matter of Markdown")
    yield beginning[found.end() if found else 0 :]
    yield from chunks


def subtitles(entry: Entry) -> Iterator[str]:
    """Yields what is said in subtitles: no numbers, times, tags or notes."""
    entry.reading.note("read subtitles without their times")
    # The number or name of a cue is the line above its times, which therefore waits. Other lines
    # after a blank one are notes. Captions that scroll repeat a line: their words have times, or
    # lines are shown for a moment.
    waiting, is_said, scrolls, last = "", False, False, ""
    for line in itertools.chain(lines(entry), ("",)):
        line = line.strip()
        if times := TIMES.match(line):
            waiting = ""
            begin, end = (float(x.rpartition(":")[2].replace(",", ".")) for x in times.groups())
            scrolls = scrolls or 0 < end - begin < BRIEF
        if waiting and is_said and not (scrolls and waiting == last):
            last = waiting
            yield f"{waiting}\n"
        scrolls = scrolls or re.search(f"<{TIME}>", line) is not None
        is_said = times is not None or (is_said and bool(line))
        waiting = "" if times else html.unescape(TAGS.sub("", line)).strip()
