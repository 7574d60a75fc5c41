"""S3 and what speaks like it, as a destination.

An object appears whole, once all its bytes have arrived and their checksum is the manifest's. Big
files go up in parts that several connections share; a part that the server has is not sent again,
also after a crash.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from crater_slurm.checkpoint import checksum, sums
from crater_slurm.checkpoint.destination import Place
from crater_slurm.checkpoint.remote.retry import Patience
from crater_slurm.checkpoint.remote.s3_client import Client, PartBody
from crater_slurm.checkpoint.remote.s3_upload import MOST_PARTS, Upload, decoded, encoded
from crater_slurm.checkpoint.remote.store import (
    Listed,
    RemoteError,
    Source,
    Stat,
    Transfer,
    is_ours,
)
from crater_slurm.job import layout

OPTIONS = {
    "endpoint": "https://host:port of a store that is not AWS's",
    "region": "region, where the store has several",
    "addressing": "auto, path or virtual",
    "ca_bundle": "file of certificates that the store's own must match",
    "connections": "parts on their way at once; 4",
    "part_bytes": "least size of a part; 16 MiB",
    "checksums": "auto, or off for a store that refuses CRC-32",
    "verify": "auto, or read_back to fetch each object again after it was put",
    "read_seconds": "longest silence of the store; 60",
}
_ORPHAN_DAYS = 7
_DELETE_AT_ONCE = 1000


class S3Store:
    """Steps below a prefix of a bucket."""

    def __init__(
        self,
        place: Place,
        client: Client,
        options: dict[str, Any] | None = None,
        patience: Patience | None = None,
    ) -> None:
        chosen = options or {}
        self._bucket = place.bucket
        self._prefix = place.prefix
        self._client = client
        self._patience = patience or Patience()
        self._connections = max(1, min(64, int(chosen.get("connections", 4))))
        self._least_part = int(chosen.get("part_bytes", 16 << 20))
        self._checksums = bool(chosen.get("checksums", "auto") != "off")
        self._read_back = chosen.get("verify", "auto") == "read_back"

    @property
    def where(self) -> str:
        return self._client.where

    def list_steps(self) -> list[str]:
        pages = self._pages("list_objects_v2", "list steps", Prefix=self._prefix, Delimiter="/")
        found = (
            item["Prefix"][len(self._prefix) : -1]
            for page in pages
            for item in page.get("CommonPrefixes") or ()
        )
        return sorted(name for name in found if layout.parse_step_name(name))

    def list_files(self, step: str) -> list[Listed]:
        return [file for file in self.objects(f"{step}/") if "/" not in file.name]

    def objects(self, prefix: str) -> list[Listed]:
        """Everything whose key begins so, with what is left of its key as the name."""
        whole = self.full(prefix)
        pages = self._pages("list_objects_v2", f"list {prefix}", Prefix=whole)
        return [
            Listed(item["Key"][len(whole) :], item["Size"], item["LastModified"].timestamp())
            for page in pages
            for item in page.get("Contents") or ()
        ]

    def put_file(
        self, source: Source, key: str, entry: layout.FileEntry, transfer: Transfer
    ) -> None:
        upload = Upload(self, source, key, entry, transfer)
        upload.run()
        self.verify(key, entry, upload.answered)

    def verify(self, key: str, entry: layout.FileEntry, answered: int | None) -> None:
        """Compare what arrived with the manifest; removes it and raises when they differ."""
        expected = checksum.of_file(entry)
        there = Stat(entry.size, answered) if answered is not None else self.head(key)
        wrong: bool = (
            there is None or there.size != entry.size or there.crc32 not in (None, expected)
        )
        if not wrong and self._read_back:
            wrong = self._fetched(key, entry) != expected
        if wrong:
            self.call("delete_object", f"delete {key}", Key=self.full(key))
            raise RemoteError(f"{self.where}: {key} arrived damaged; it is sent again.")

    def _fetched(self, key: str, entry: layout.FileEntry) -> int:
        total = 0
        for start in range(0, entry.size, layout.CHUNK_BYTES):
            buffer = memoryview(bytearray(min(layout.CHUNK_BYTES, entry.size - start)))
            self.get_range(key, start, buffer)
            total = sums.combined(total, sums.crc32(buffer), len(buffer))
        return total

    def put_text(self, key: str, text: str) -> None:
        self.put_bytes(key, text.encode())

    def put_bytes(self, key: str, data: bytes | bytearray, **more: Any) -> int | None:
        """Put a small object with its checksum; the CRC-32 that the store answers, if any."""
        sums = self.sums(data)
        answer = self.call(
            "put_object", f"put {key}", data=data, Key=self.full(key), **sums, **more
        )
        return decoded(answer.get("ChecksumCRC32"))

    def sums(self, data: bytes | bytearray) -> dict[str, Any]:
        """What makes the store refuse a body that was damaged on the way."""
        if self._checksums:
            return {"ChecksumCRC32": encoded(sums.crc32(data))}
        return {"ContentMD5": base64.b64encode(hashlib.md5(data).digest()).decode()}  # noqa: S324

    def claim(self, key: str, text: str) -> str:
        there = self.get_text(key)
        if there is None:
            try:
                self.put_bytes(key, text.encode(), IfNoneMatch="*")
            except RemoteError as error:
                status = error.status
                if status in (400, 501):  # a store without conditional writes
                    self.put_text(key, text)
                elif status not in (409, 412):
                    raise
            there = self.get_text(key)
        return there or ""

    def get_text(self, key: str) -> str | None:
        def work() -> str:
            answer = self._client.call(
                "get_object", f"get {key}", Bucket=self._bucket, Key=self.full(key)
            )
            return str(
                self._client.guard(answer["Body"].read, f"get {key}").decode("utf-8", "replace")
            )

        try:
            return self._patience.call(work)
        except RemoteError as error:
            if error.missing:
                return None
            raise

    def get_range(self, key: str, start: int, into: memoryview) -> None:
        if not into:
            return
        last = start + len(into) - 1

        def work() -> None:
            what = f"get bytes {start}-{last} of {key}"
            answer = self._client.call(
                "get_object",
                what,
                Bucket=self._bucket,
                Key=self.full(key),
                Range=f"bytes={start}-{last}",
            )
            self._client.guard(lambda: _drain(answer["Body"], into), what)

        self._patience.call(work)

    def head(self, key: str) -> Stat | None:
        try:
            answer = self.call(
                "head_object", f"look at {key}", Key=self.full(key), ChecksumMode="ENABLED"
            )
        except RemoteError as error:
            if error.missing:
                return None
            raise
        whole = answer.get("ChecksumType", "FULL_OBJECT") == "FULL_OBJECT"
        return Stat(
            answer["ContentLength"], decoded(answer.get("ChecksumCRC32")) if whole else None
        )

    def delete(self, step: str, names: list[str]) -> None:
        # Manifests first: without them nobody takes what is left for a checkpoint.
        ours = sorted(filter(is_ours, names), key=lambda name: not layout.is_part(name))
        groups = [
            [n for n in ours if layout.is_part(n)],
            [n for n in ours if not layout.is_part(n)],
        ]
        for group in groups:
            with ThreadPoolExecutor(self._connections) as pool:
                list(pool.map(lambda name: self._delete(f"{step}/{name}"), group))

    def _delete(self, key: str) -> None:
        self.call("delete_object", f"delete {key}", Key=self.full(key))

    def discard(self, key: str, resume: dict[str, Any]) -> None:
        if isinstance(resume.get("upload"), str):
            self.abort(self.full(key), resume["upload"])

    def abort(self, full_key: str, upload_id: str) -> None:
        """Give up a multipart upload; one that is gone already is no error."""
        try:
            self.call("abort_multipart_upload", "abort an upload", Key=full_key, UploadId=upload_id)
        except RemoteError as error:
            if not error.missing:
                raise

    def tidy(self, own: set[str], active: set[str]) -> int:
        pages = self._pages("list_multipart_uploads", "list uploads", Prefix=self._prefix)
        old = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=_ORPHAN_DAYS)
        count = 0
        for found in (upload for page in pages for upload in page.get("Uploads") or ()):
            key = found["Key"]
            if not key.startswith(self._prefix) or found["UploadId"] in active:
                continue
            if key[len(self._prefix) :] in own or found["Initiated"] < old:
                self.abort(key, found["UploadId"])
                count += 1
        return count

    def close(self) -> None:
        self._client.close()

    def without_slash(self) -> S3Store:
        """The same store whose keys are what follows its prefix at once, slash or not."""
        self._prefix = self._prefix.rstrip("/")
        return self

    # For Upload, too.

    @property
    def connections(self) -> int:
        return self._connections

    @property
    def with_checksums(self) -> bool:
        return self._checksums

    def drop_checksums(self) -> None:
        """The store refuses CRC-32: go on with MD5, which all know."""
        self._checksums = False

    def part_bytes(self, size: int) -> int:
        """Size of a file's parts: at most 10,000 of them, whole chunks each."""
        return part_bytes(size, self._least_part)

    def full(self, key: str) -> str:
        return self._prefix + key

    def call(
        self,
        operation: str,
        what: str,
        data: bytes | bytearray | None = None,
        stop: threading.Event | None = None,
        **parameters: Any,
    ) -> Any:
        """An operation on the bucket, again when it fails for a moment. ``stop`` ends that.

        ``data`` is the request's body.
        """
        event = stop or threading.Event()

        def once() -> Any:
            body = {} if data is None else {"Body": PartBody(data, event)}
            return self._client.call(operation, what, Bucket=self._bucket, **body, **parameters)

        return self._patience.call(once, event)

    def _pages(self, operation: str, what: str, **parameters: Any) -> list[Any]:
        return self._patience.call(
            lambda: self._client.pages(operation, what, Bucket=self._bucket, **parameters)
        )


def part_bytes(size: int, least: int = 16 << 20, most_parts: int = MOST_PARTS) -> int:
    """Least multiple of CHUNK_BYTES, not under ``least``, that cuts a file in ``most_parts``."""
    wanted = max(least, -(-size // most_parts), layout.CHUNK_BYTES)
    return -(-wanted // layout.CHUNK_BYTES) * layout.CHUNK_BYTES


def _drain(body: Any, into: memoryview) -> None:
    got = 0
    while got < len(into):
        data = body.read(min(1 << 20, len(into) - got))
        if not data:
            raise ValueError(f"the answer ended after {got} of {len(into)} bytes")
        into[got : got + len(data)] = data
        got += len(data)
