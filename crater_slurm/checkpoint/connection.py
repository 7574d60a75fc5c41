"""One connection of the worker, which must never make it wait: bounded both ways.

What can't be sent at once is queued; an end that doesn't read is dropped when the queue is full.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections import deque

from crater_slurm.job.wire import Channel, WireError

_MOST_QUEUED = 512
#: Messages of one connection before the others have their turn.
_AT_ONCE = 64
_MOST_MISTAKES = 20


class Connection:
    """A trainer's or the daemon's. ``closed`` once it is of no use; subclasses take messages."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.channel = Channel(connection)
        self.closed = False
        self._queued: deque[tuple[dict[str, object], tuple[int, ...]]] = deque()
        self._mistakes = 0

    def fileno(self) -> int:
        return self.channel.fileno()

    @property
    def sending(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self._queued)

    def send(self, message: dict[str, object], fds: tuple[int, ...] = ()) -> None:
        """Send a message and open files (copies: the caller keeps its own), now or later."""
        if self.closed:
            return
        if len(self._queued) >= _MOST_QUEUED:
            self.close()
            return
        self._queued.append((message, tuple(os.dup(fd) for fd in fds)))
        self.flush()

    def flush(self) -> None:
        """Send what is queued, as far as the other end takes it."""
        try:
            while self._queued and not self.closed:
                message, fds = self._queued[0]
                self.channel.send(message, fds)
                self._drop_first()
        except BlockingIOError:
            return
        except WireError:  # longer than a message may be: nothing that others wait for
            self._drop_first()
        except OSError:
            self.close()

    def _drop_first(self) -> None:
        _, fds = self._queued.popleft()
        for fd in fds:
            os.close(fd)

    def read(self) -> None:
        """Take the messages that are there."""
        for _ in range(_AT_ONCE):
            if self.closed:
                return
            try:
                message, fds = self.channel.receive(wait=False)
            except BlockingIOError:
                return
            except WireError as error:
                if "closed" in str(error):
                    self.close()
                    return
                self.mistake(f"The worker could not {error}.")
                continue
            except OSError:
                self.close()
                return
            self._take(message, fds)

    def _take(self, message: dict[str, object], fds: list[int]) -> None:
        try:
            self.take(message, fds)
        except WireError as error:
            self.mistake(f"The worker could not {error}.")
        except Exception as error:  # a defect of ours, or of a daemon's: the others go on
            self.mistake(f"The worker could not take a {message['op']!r:.40}: {error!r:.300}.")
        finally:
            for fd in fds:  # what was wanted has been taken out of the list
                with contextlib.suppress(OSError):
                    os.close(fd)

    def take(self, message: dict[str, object], fds: list[int]) -> None:
        """Do what a message asks. Raises WireError; takes out of ``fds`` what it keeps."""
        raise NotImplementedError

    def mistake(self, error: str) -> None:
        """Tell of a message that was wrong; who goes on with it is dropped."""
        self._mistakes += 1
        self.send({"op": "error", "error": error[:1000]})
        if self._mistakes >= _MOST_MISTAKES:
            self.close()

    def close(self) -> None:
        """Be of no use any more; the loop then lets the socket go."""
        if not self.closed:
            self.closed = True
            while self._queued:
                self._drop_first()
            with contextlib.suppress(OSError):
                self.channel.socket.shutdown(socket.SHUT_RDWR)

    def dispose(self) -> None:
        """Close the socket, which nothing watches any more."""
        self.channel.close()
