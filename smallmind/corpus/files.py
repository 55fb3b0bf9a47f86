"""The streams of files on disk."""

import io
import os
from pathlib import Path

from smallmind.checks import InputError
from smallmind.corpus.reading import BytesRead, shown
from smallmind.files import durable


class FileStream(io.RawIOBase):
    """The bytes of a regular file; what has been read counts as progress.

    InputError naming the file if it cannot be opened or read.
    """

    def __init__(self, path: Path, bytes_read: BytesRead | None = None) -> None:
        super().__init__()
        self._name, self._bytes_read, self.count = shown(path), bytes_read, 0
        try:
            self._file = durable.open_regular(path)
        except OSError as error:
            raise InputError(f"cannot read {self._name}: {error.strerror}") from None
        except ValueError:
            raise InputError(not_regular(path)) from None

    def size(self) -> int:
        """Bytes."""
        return os.fstat(self._file.fileno()).st_size

    def read(self, size: int = -1, /) -> bytes:
        try:
            data = self._file.read(size)
        except OSError as error:
            raise InputError(f"cannot read {self._name}: {error.strerror}") from None
        self.count += len(data)
        if self._bytes_read:
            self._bytes_read.reach(self._file.tell())
        return data

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()
        super().close()


def not_regular(path: Path | str) -> str:
    """Says what to do about a FIFO, a socket or a device."""
    return (
        f"{shown(path)} is not a regular file, and texts are read more than once; "
        "write it to a file first"
    )
