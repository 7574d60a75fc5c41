"""Google Cloud Storage and Azure Blob Storage as destinations, through the obstore library.

The library sends a file's parts itself, so an upload that broke off begins again with that file;
files that arrived are not sent again. It tells no checksum, so an object is fetched again to be
compared, unless the site says otherwise.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from crater_slurm.checkpoint import checksum
from crater_slurm.checkpoint.destination import Place
from crater_slurm.checkpoint.remote.body import Body
from crater_slurm.checkpoint.remote.credentials import scrub
from crater_slurm.checkpoint.remote.retry import Patience
from crater_slurm.checkpoint.remote.store import (
    Listed,
    RemoteError,
    Source,
    Stat,
    StoppedError,
    Transfer,
    is_ours,
)
from crater_slurm.checkpoint.spec import Remote
from crater_slurm.job import layout

Result = TypeVar("Result")

OPTIONS = {
    "endpoint": "https://host:port of a store that is not the cloud's own",
    "connections": "parts on their way at once; 4",
    "part_bytes": "size of a part; 16 MiB",
    "verify": "read_back (the default here), or size",
}
#: What a credentials file may hold, by kind, and the library's names for it.
_KEYS = {
    "gs": {"service_account_key": "service_account_key"},
    "az": {
        "account_name": "account_name",
        "account_key": "account_key",
        "sas_token": "sas_token",
        "client_id": "client_id",
        "client_secret": "client_secret",
        "tenant_id": "tenant_id",
    },
}


def connect(place: Place, remote: Remote, home: str) -> ObjectStore:
    """The store of a destination. Raises RemoteError for missing libraries or credentials."""
    try:
        from obstore.store import AzureStore, GCSStore
    except ImportError:
        raise RemoteError(
            f"Checkpoints to {place.kind}:// need obstore on the node: "
            "pip install 'crater-slurm[remotes]'.",
            lasting=True,
        ) from None
    given = _credentials(place, remote, home)
    config: dict[str, Any] = {_KEYS[place.kind][key]: given[key] for key in given}
    endpoint = str(remote.options.get("endpoint", ""))
    if endpoint and place.kind == "az":
        config["endpoint"] = endpoint
    elif endpoint:
        config["base_url"] = endpoint
    client: Any = {"allow_http": endpoint.startswith("http://"), "timeout": "300s"}
    prefix = "/".join(place.pieces) or None
    try:
        if place.kind == "gs":
            kind: Any = GCSStore
        else:
            kind = AzureStore
        store = kind(place.bucket, prefix=prefix, config=config, client_options=client)
    except Exception as error:  # the library has an error of its own for each wrong setting
        reason = scrub(str(error), tuple(given.values()))
        raise RemoteError(f"{place.url}: the store can't be used: {reason}", lasting=True) from None
    return ObjectStore(store, place.url, remote.options, tuple(given.values()))


def _credentials(place: Place, remote: Remote, home: str) -> dict[str, str]:
    given = dict(remote.credentials)
    if remote.profile and place.kind == "gs":
        # The library would look for the same file by itself; here the user chose it.
        given = {"service_account_key": _user_key(home)}
    elif remote.profile:
        raise RemoteError(f"{place.url}: there are no profiles for Azure.", lasting=True)
    known = _KEYS[place.kind]
    wrong = sorted(set(given) - set(known))
    if wrong or not given:
        raise RemoteError(
            f"{place.url}: the credentials have {', '.join(wrong) or 'nothing'}; known are "
            f"{', '.join(known)}.",
            lasting=True,
        )
    return given


def _user_key(home: str) -> str:
    path = f"{home}/.config/gcloud/application_default_credentials.json"
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(1 << 20)
        if json.loads(text).get("type") == "service_account":
            return text
    except (OSError, ValueError, AttributeError):
        pass
    raise RemoteError(f"{path} is no key of a service account that can be read.", lasting=True)


class ObjectStore:
    """Steps in a store of the library's, made by ``connect``."""

    def __init__(
        self,
        store: Any,
        where: str,
        options: dict[str, Any] | None = None,
        secrets: tuple[str, ...] = (),
        patience: Patience | None = None,
    ) -> None:
        import obstore

        chosen = options or {}
        self._store = store
        self._library: Any = obstore
        self._where = where
        self._secrets = secrets
        self._patience = patience or Patience(attempts=3)
        self._connections = max(1, min(64, int(chosen.get("connections", 4))))
        self._part = int(chosen.get("part_bytes", 16 << 20))
        self._read_back = chosen.get("verify", "read_back") == "read_back"

    @property
    def where(self) -> str:
        return self._where

    def list_steps(self) -> list[str]:
        def work() -> list[str]:
            found = self._library.list_with_delimiter(self._store, None)["common_prefixes"]
            return sorted(p.rstrip("/").rpartition("/")[2] for p in found)

        return [name for name in self._do(work, "list steps") if layout.parse_step_name(name)]

    def list_files(self, step: str) -> list[Listed]:
        def work() -> list[Listed]:
            return [
                Listed(path, item["size"], item["last_modified"].timestamp())
                for page in self._library.list(self._store, prefix=step)
                for item in page
                if "/" not in (path := item["path"].rpartition(f"{step}/")[2])
            ]

        return sorted(self._do(work, f"list {step}"), key=lambda file: file.name)

    def put_file(
        self, source: Source, key: str, entry: layout.FileEntry, transfer: Transfer
    ) -> None:
        what = f"put {key}"

        def work() -> None:
            body = _FileBody(source, entry, transfer)
            least = -(-entry.size // 10_000)
            try:
                self._library.put(
                    *(self._store, key, body),
                    chunk_size=max(self._part, least),
                    max_concurrency=self._connections,
                )
            except Exception:
                body.reraise()  # the library wraps what reading raises in an error of its own
                raise

        self._do(work, what, transfer.stop)
        self._verify(key, entry)

    def _verify(self, key: str, entry: layout.FileEntry) -> None:
        there = self.head(key)
        wrong = there is None or there.size != entry.size
        for start in range(
            0, 0 if wrong or not self._read_back else entry.size, layout.CHUNK_BYTES
        ):
            buffer = memoryview(bytearray(min(layout.CHUNK_BYTES, entry.size - start)))
            self.get_range(key, start, buffer)
            wrong = wrong or checksum.wrong_chunk(entry, start, buffer) is not None
        if wrong:
            self._delete(key)
            raise RemoteError(f"{self._where}: {key} arrived damaged; it is sent again.")

    def put_text(self, key: str, text: str) -> None:
        self._do(lambda: self._library.put(self._store, key, text.encode()), f"put {key}")

    def claim(self, key: str, text: str) -> str:
        from obstore.exceptions import AlreadyExistsError, NotSupportedError

        def work() -> None:
            with contextlib.suppress(AlreadyExistsError):
                try:
                    self._library.put(self._store, key, text.encode(), mode="create")
                except (NotSupportedError, NotImplementedError):
                    if self.get_text(key) is None:
                        self._library.put(self._store, key, text.encode())

        self._do(work, f"put {key}")
        return self.get_text(key) or ""

    def get_text(self, key: str) -> str | None:
        def work() -> str:
            data = bytes(self._library.get(self._store, key).bytes())
            return data.decode("utf-8", "replace")

        return self._or_none(work, f"get {key}")

    def get_range(self, key: str, start: int, into: memoryview) -> None:
        if not into:
            return

        def work() -> None:
            got = self._library.get_range(self._store, key, start=start, length=len(into))
            if len(got) != len(into):
                raise RemoteError(f"{self._where}: {key} ends early.")
            into[:] = memoryview(got)

        self._do(work, f"get {key}")

    def head(self, key: str) -> Stat | None:
        return self._or_none(
            lambda: Stat(self._library.head(self._store, key)["size"]), f"look at {key}"
        )

    def delete(self, step: str, names: list[str]) -> None:
        for manifests in (True, False):  # first: then nobody takes what is left for a checkpoint
            for name in names:
                if is_ours(name) and layout.is_part(name) is manifests:
                    self._delete(f"{step}/{name}")

    def _delete(self, key: str) -> None:
        self._or_none(lambda: self._library.delete(self._store, key), f"delete {key}")

    def discard(self, key: str, resume: dict[str, Any]) -> None:
        del key, resume  # the library gives up what it did not finish

    def tidy(self, own: set[str], active: set[str]) -> int:
        del own, active
        return 0

    def close(self) -> None:
        return None

    def _do(
        self, work: Callable[[], Result], what: str, stop: threading.Event | None = None
    ) -> Result:
        from obstore import exceptions as known

        def once() -> Result:
            try:
                return work()
            except (FileNotFoundError, known.NotFoundError):
                raise RemoteError(
                    f"{self._where}: couldn't {what}: it is not there.", missing=True
                ) from None
            except (known.BaseError, OSError, ValueError) as error:
                lasting = isinstance(
                    error, known.PermissionDeniedError | known.UnauthenticatedError
                )
                reason = scrub(str(error), self._secrets)
                raise RemoteError(
                    f"{self._where}: couldn't {what}: {reason}", lasting=lasting
                ) from None

        return self._patience.call(once, stop)

    def _or_none(self, work: Callable[[], Result], what: str) -> Result | None:
        try:
            return self._do(work, what)
        except RemoteError as error:
            if not error.missing:
                raise
            return None


class _FileBody(Body):
    """A file that the library reads: checked chunk by chunk, counted, and stopped when told."""

    def __init__(self, source: Source, entry: layout.FileEntry, transfer: Transfer) -> None:
        super().__init__(entry.size)
        self._source = source
        self._transfer = transfer
        self._chunk = (-1, bytearray())
        self._error: Exception | None = None

    def reraise(self) -> None:
        """Raise again what a read raised, if one did."""
        if self._error is not None:
            raise self._error

    def read(self, size: int | None = -1) -> bytes:
        left = self.size - self.at
        count = left if size is None or size < 0 else min(size, left)
        out = bytearray()
        try:
            while len(out) < count:
                out += self._piece(count - len(out))
        except (StoppedError, RemoteError, Exception) as error:
            self._error = error
            raise
        return bytes(out)

    def _piece(self, most: int) -> bytearray:
        self._transfer.check()
        start = self.at - self.at % layout.CHUNK_BYTES
        if self._chunk[0] != start:
            count = min(layout.CHUNK_BYTES, self.size - start)
            self._transfer.limiter.take(count)
            self._chunk = (start, self._source.read(start, count))
            self._transfer.progress(count)
        data = self._chunk[1][self.at - start : self.at - start + most]
        self.at += len(data)
        return data
