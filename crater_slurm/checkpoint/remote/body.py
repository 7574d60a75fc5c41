"""What is sent as a file to a library that wants one: a position in a size, and no more."""

from __future__ import annotations

import io


class Body(io.RawIOBase):
    """Something to be read from a position on; subclasses read and move ``at``."""

    def __init__(self, size: int) -> None:
        self.size, self.at = size, 0

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = (0, self.at, self.size)[whence]
        self.at = max(0, base + offset)
        return self.at

    def tell(self) -> int:
        return self.at

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def __len__(self) -> int:
        return self.size
