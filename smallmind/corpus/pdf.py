"""The text of PDF documents, by way of pypdf."""

import importlib
import logging
from collections.abc import Iterator
from typing import Any

from smallmind.console import activity
from smallmind.corpus.compressed import opened_file
from smallmind.corpus.entry import Entry
from smallmind.corpus.reading import Unusable, shown
from smallmind.files.encoding import PDF


def read_pdf(entry: Entry) -> Iterator[str]:
    """Yields the pages, each in lines of its own. Unusable without pypdf, or without text."""
    try:
        pypdf: Any = importlib.import_module("pypdf")
    except ImportError:
        advice = 'to read it: pip install "smallmind[pdf]", or convert it to text with pdftotext'
        raise Unusable(entry.name, f"is {PDF}", advice) from None
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # it reports what it mends
    entry.reading.note("read the text of .pdf, without layout and pictures,")
    has_text = False
    with opened_file(entry) as file:
        try:
            reader = pypdf.PdfReader(file)
            if reader.is_encrypted and not reader.decrypt(""):
                raise Unusable(entry.name, "is encrypted", "save it without a password")
            for page in reader.pages:
                activity.tick()
                if text := page.extract_text().strip():
                    yield f"\n{text}" if has_text else text
                    has_text = True
        except (Unusable, MemoryError):
            raise
        except Exception as error:  # of many kinds, for damaged files
            raise Unusable(
                entry.name, f"is damaged: {shown(error, 200)}", "save it again"
            ) from None
    if not has_text:
        raise Unusable(entry.name, "has no text in it, as if scanned", "make text with ocrmypdf")
