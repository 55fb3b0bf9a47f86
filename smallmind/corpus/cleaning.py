"""Cleans the text of every document: line ends become LF, lone surrogates are replaced."""

import io
import re

from smallmind.corpus.entry import Piece
from smallmind.corpus.reading import Tally

HALVES = re.compile("[\ud800-\udfff]")  # JSON can write one half of a UTF-16 pair; UTF-8 cannot
LINE_ENDS = {
    "\r\n": "CRLF line ends became LF",
    "\r": "CR line ends became LF",
}


class Cleaner:
    """Cleans the pieces of one document after the other, and counts them."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        # It holds back a CR at the end of a piece: an LF may follow.
        self._newlines = io.IncrementalNewlineDecoder(None, translate=True)

    def clean(self, piece: Piece) -> Piece | None:
        """The piece with its text cleaned; None if nothing is left of it."""
        text = self._newlines.decode(piece.text, piece.ends)
        self._tally.characters += len(text)
        if piece.ends:
            self._end_document()
        return Piece(self._whole(text), piece.ends) if text else None

    def _end_document(self) -> None:
        self._tally.documents += 1
        ends = self._newlines.newlines or ()
        for end in (ends,) if isinstance(ends, str) else ends:
            if end in LINE_ENDS:
                self._tally.note(LINE_ENDS[end])
        self._newlines.reset()

    def _whole(self, text: str) -> str:
        try:
            text.encode()  # ten times as fast as looking for them
        except UnicodeEncodeError:
            self._tally.note("half characters became U+FFFD")
            return HALVES.sub("\ufffd", text)
        return text
