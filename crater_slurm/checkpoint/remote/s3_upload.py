"""One file's upload to S3 in parts, which can be gone on with by anybody who has its number.

The note kept meanwhile is the upload's number and the size of its parts. Which parts are there is
asked of the server alone; what they must be is in the manifest. So a changed or old note can only
cost time.
"""

from __future__ import annotations

import base64
import hashlib
import threading
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

from crater_slurm.checkpoint import checksum
from crater_slurm.checkpoint.remote.store import RemoteError, Source, StoppedError, Transfer, pieces
from crater_slurm.job import layout

if TYPE_CHECKING:
    from crater_slurm.checkpoint.remote.s3 import S3Store

MOST_PARTS = 10_000
#: Answers of stores that do not know checksums of whole objects.
_UNKNOWN = {"NotImplemented", "InvalidArgument", "InvalidRequest", "MalformedXML"}


class Upload:
    """Brings one file there. ``answered`` is the whole object's CRC-32, where the store says it."""

    def __init__(
        self,
        store: S3Store,
        source: Source,
        key: str,
        entry: layout.FileEntry,
        transfer: Transfer,
    ) -> None:
        self._store = store
        self._source = source
        self._key = key
        self._entry = entry
        self._transfer = transfer
        self._failed = threading.Event()
        self.answered: int | None = None

    def run(self) -> None:
        """Send what is not there yet, and make it one object."""
        size = self._entry.size
        if size <= self._store.part_bytes(size) and "upload" not in self._transfer.resume:
            self._transfer.check()
            self._transfer.limiter.take(size)
            data = self._source.read(0, size)
            self.answered = self._store.put_bytes(self._key, data, stop=self._transfer.stop)
            self._transfer.progress(size)
            return
        there = self._begun()
        parts = self._send(there)
        self._complete(parts)
        self._transfer.resume.clear()
        self._transfer.keep()

    def _begun(self) -> dict[int, str]:
        """ETags of the parts that the server has; begins an upload when there is none."""
        resume = self._transfer.resume
        number, size = resume.get("upload"), resume.get("part_bytes")
        if isinstance(number, str) and type(size) is int and self._cuts(size):
            try:
                return self._listed(number, size)
            except RemoteError as error:
                if not error.missing and error.status != 400:
                    raise
        resume.clear()
        resume.update(upload=self._create(), part_bytes=self._store.part_bytes(self._entry.size))
        self._transfer.keep()
        return {}

    def _cuts(self, size: int) -> bool:
        """Whether parts of this size are whole chunks, and not too many."""
        good = size > 0 and size % layout.CHUNK_BYTES == 0
        return good and -(-self._entry.size // size) <= MOST_PARTS

    def _create(self) -> str:
        what = f"begin the upload of {self._key}"
        key = self._store.full(self._key)
        if self._store.with_checksums:
            wanted: dict[str, Any] = {"ChecksumAlgorithm": "CRC32", "ChecksumType": "FULL_OBJECT"}
            try:
                answer = self._store.call("create_multipart_upload", what, Key=key, **wanted)
                return str(answer["UploadId"])
            except RemoteError as error:
                if error.code not in _UNKNOWN:
                    raise
                self._store.drop_checksums()
        return str(self._store.call("create_multipart_upload", what, Key=key)["UploadId"])

    def _listed(self, number: str, size: int) -> dict[int, str]:
        there: dict[int, str] = {}
        marker = 0
        lengths = dict(enumerate((count for _, count in pieces(self._entry.size, size)), start=1))
        while True:
            answer = self._store.call(
                "list_parts",
                f"list the parts of {self._key}",
                Key=self._store.full(self._key),
                UploadId=number,
                PartNumberMarker=marker,
            )
            for part in answer.get("Parts") or ():
                if lengths.get(part["PartNumber"]) == part["Size"]:
                    there[part["PartNumber"]] = part["ETag"]
            marker = int(answer.get("NextPartNumberMarker") or 0)
            if not answer.get("IsTruncated") or not marker:
                return there

    def _send(self, there: dict[int, str]) -> list[dict[str, Any]]:
        size = self._transfer.resume["part_bytes"]
        plan = list(enumerate(pieces(self._entry.size, size), start=1))
        with ThreadPoolExecutor(self._store.connections, "crater-part") as pool:
            waiting = [
                pool.submit(self._part, number, start, count, there.get(number))
                for number, (start, count) in plan
            ]
            done, _ = wait(waiting, return_when=FIRST_EXCEPTION)
            failed = [error for future in done if (error := future.exception())]
            if failed:
                self._failed.set()
                pool.shutdown(cancel_futures=True)
                raise next((e for e in failed if not isinstance(e, StoppedError)), failed[0])
        return [future.result() for future in waiting]

    def _part(self, number: int, start: int, count: int, tag: str | None) -> dict[str, Any]:
        self._transfer.check()
        if self._failed.is_set():
            raise StoppedError
        crc = encoded(checksum.of_range(self._entry, start, count))
        if tag is None or not self._same(tag, start, count):
            self._transfer.limiter.take(count)
            tag = self._put(number, self._source.read(start, count), crc)
        self._transfer.progress(count)
        more = {"ChecksumCRC32": crc} if self._store.with_checksums else {}
        return {"PartNumber": number, "ETag": tag, **more}

    def _same(self, tag: str, start: int, count: int) -> bool:
        """Whether a part that is there is ours; with CRC-32 the whole object's sum tells later."""
        if self._store.with_checksums:
            return True
        data = self._source.read(start, count)
        return tag.strip('"') == hashlib.md5(data).hexdigest()  # noqa: S324

    def _put(self, number: int, data: bytearray, crc: str) -> str:
        answer = self._store.call(
            "upload_part",
            f"put part {number} of {self._key}",
            Key=self._store.full(self._key),
            UploadId=self._transfer.resume["upload"],
            PartNumber=number,
            data=data,
            stop=self._transfer.stop,
            **self._store.sums(data),
        )
        if answer.get("ChecksumCRC32") not in (None, crc):
            raise RemoteError(f"{self._store.where}: part {number} of {self._key} arrived damaged.")
        return str(answer["ETag"])

    def _complete(self, parts: list[dict[str, Any]]) -> None:
        """Make one object of the parts. An answer lost on the way is found out by looking."""
        expected = checksum.of_file(self._entry)
        sums: dict[str, Any] = {}
        if self._store.with_checksums:
            sums = {"ChecksumCRC32": encoded(expected), "ChecksumType": "FULL_OBJECT"}
        try:
            answer = self._store.call(
                "complete_multipart_upload",
                f"complete {self._key}",
                Key=self._store.full(self._key),
                UploadId=self._transfer.resume["upload"],
                MultipartUpload={"Parts": parts},
                **sums,
            )
        except RemoteError as error:
            self._after(error)
            return
        if answer.get("ChecksumType") != "COMPOSITE":
            self.answered = decoded(answer.get("ChecksumCRC32"))

    def _after(self, error: RemoteError) -> None:
        """A failed completion: fine when the object is whole; else the parts are worth nothing."""
        if error.missing:
            there = self._store.head(self._key)
            if there is not None and there.size == self._entry.size:
                return
        # Refused for what the parts are, not for who asks: they are of no use any more.
        if error.missing or error.status == 400:
            self._store.discard(self._key, self._transfer.resume)
            self._transfer.resume.clear()
            self._transfer.keep()
        raise error


def encoded(value: int) -> str:
    """CRC-32 as S3 writes it."""
    return base64.b64encode(value.to_bytes(4, "big")).decode()


def decoded(text: object) -> int | None:
    """CRC-32 of a store's answer; None for none, or for one over parts (``...-2``)."""
    if not isinstance(text, str) or "-" in text:
        return None
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError:
        return None
    return int.from_bytes(data, "big") if len(data) == 4 else None
