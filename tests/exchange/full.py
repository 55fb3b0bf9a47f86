"""A disk without room."""

from smallmind.files import durable


class Full(durable.Files):
    """A disk that is full after some bytes."""

    def __init__(self, left):
        self.left = left

    def write(self, file, data):
        self.left -= len(data)
        if self.left < 0:
            raise OSError(28, "No space left on device")
        return super().write(file, data)
