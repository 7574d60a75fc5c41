"""A boto3 client that takes nothing from its surroundings, and its errors as sentences.

boto3 reads environment variables, files and the cloud's metadata service for keys, endpoints and
proxies. Here each of them is given or switched off: what a job's checkpoints go through is what
the site or the user chose, nothing else.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from crater_slurm.checkpoint.remote.body import Body
from crater_slurm.checkpoint.remote.credentials import Access, scrub
from crater_slurm.checkpoint.remote.store import RemoteError, StoppedError

if TYPE_CHECKING:
    from collections.abc import Callable

_CONNECT_SECONDS = 10
_READ_SECONDS = 60
#: Codes that only say what went wrong on the way; trying again is right.
_PASSING = {
    *("BadDigest", "XAmzContentChecksumMismatch", "IncompleteBody", "InternalError", "SlowDown"),
    *("RequestTimeout", "ServiceUnavailable", "Throttling", "ThrottlingException", "InvalidDigest"),
    *("XAmzContentSHA256Mismatch", "OperationAborted", "ContentSHA256Mismatch"),
}
_HINTS = {
    "AccessDenied": "the credentials may not do that there",
    "InvalidAccessKeyId": "the store doesn't know the access key",
    "SignatureDoesNotMatch": "the secret key is wrong",
    "NoSuchBucket": "there is no such bucket",
    "RequestTimeTooSkewed": "this node's clock is wrong",
    "ExpiredToken": "the session token has expired",
    "PermanentRedirect": "the bucket is in another region",
    "AuthorizationHeaderMalformed": "the bucket is in another region",
    "QuotaExceeded": "the store's quota is used up",
    "InsufficientStorage": "the store is full",
}


#: A request's body is handed to the socket in pieces of this size.
_PIECE_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class Place:
    """How the bucket is reached."""

    endpoint: str = ""
    region: str = ""
    addressing: str = "auto"
    ca_bundle: str = ""
    connections: int = 8
    read_seconds: float = _READ_SECONDS


class PartBody(Body):
    """A part's bytes as a file, so that each piece, not the whole part, must beat the timeout.

    A read gives up to _PIECE_BYTES even when less is asked: urllib3 asks for 16 KiB at a time.
    """

    def __init__(self, data: bytes | bytearray, stop: threading.Event) -> None:
        super().__init__(len(data))
        self._view = memoryview(data)
        self._stop = stop

    def read(self, size: int | None = -1) -> bytes:
        if self._stop.is_set():
            raise StoppedError
        whole = size is None or size < 0
        count = self.size if whole else max(size or 0, _PIECE_BYTES)
        data = bytes(self._view[self.at : self.at + count])
        self.at += len(data)
        return data


class Client:
    """The operations of one store; each raises RemoteError, in words that hold no secret."""

    def __init__(self, where: str, access: Access, place: Place) -> None:
        self.where = where
        self._secrets = (access.secret, access.token)
        self._client = _make(access, place)

    def call(self, operation: str, what: str, **parameters: Any) -> Any:
        """Run an operation such as ``put_object``; ``what`` completes "couldn't"."""
        return self.guard(lambda: getattr(self._client, operation)(**parameters), what)

    def pages(self, operation: str, what: str, **parameters: Any) -> list[Any]:
        """All pages of a listing."""
        pager = self._client.get_paginator(operation)
        pages: list[Any] = self.guard(lambda: list(pager.paginate(**parameters)), what)
        return pages

    def guard(self, function: Callable[[], Any], what: str) -> Any:
        """Run something that uses the client's answers, with its errors as RemoteError."""
        from botocore.exceptions import BotoCoreError, ClientError
        from urllib3.exceptions import HTTPError

        try:
            return function()
        except ClientError as error:
            raise self._refused(error.response, what) from None
        except (BotoCoreError, HTTPError, OSError, ValueError) as error:
            # Not chained: a library's error may hold the request with its headers.
            reason = scrub(f"{type(error).__name__}: {error}", self._secrets)
            raise RemoteError(f"{self.where}: couldn't {what}: {reason}") from None

    def _refused(self, response: dict[str, Any], what: str) -> RemoteError:
        status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode") or 0)
        code = str(response.get("Error", {}).get("Code") or "")
        said = scrub(str(response.get("Error", {}).get("Message") or ""), self._secrets, 160)
        missing = code in ("NoSuchKey", "NoSuchUpload") or (status == 404 and code in ("404", ""))
        passing = status >= 500 or status in (408, 425, 429) or code in _PASSING
        reason = _HINTS.get(code) or said or "no reason given"
        return RemoteError(
            f"{self.where}: couldn't {what}: {reason} (HTTP {status} {scrub(code, (), 60)}).",
            lasting=not passing and not missing,
            missing=missing,
            code=code,
            status=status,
        )

    def close(self) -> None:
        self._client.close()


@functools.cache
def _session() -> Any:
    """A session that reads no file of anybody's; it keeps the library's data, once loaded."""
    import botocore.session
    from botocore.configprovider import ConstantProvider

    session = botocore.session.Session()
    for name in ("config_file", "credentials_file"):
        session.set_config_variable(name, os.devnull)
    session.get_component("config_store").set_config_provider("profile", ConstantProvider(None))
    return session


def preload() -> None:
    """Load the library and its data now; without the library nothing happens yet."""
    with contextlib.suppress(RemoteError):
        _make(Access("none", "none"), Place("http://127.0.0.1:1")).close()


def _make(access: Access, place: Place) -> Any:
    try:
        from botocore.config import Config
    except ImportError:
        raise RemoteError(
            "Checkpoints to s3:// need boto3 on the node: pip install 'crater-slurm[s3]'.",
            lasting=True,
        ) from None
    session = _session()
    endpoint = access.endpoint or place.endpoint or None
    tls = not (endpoint or "").startswith("http://")
    config = Config(
        signature_version="s3v4",
        connect_timeout=_CONNECT_SECONDS,
        read_timeout=place.read_seconds,
        max_pool_connections=place.connections,
        retries={"total_max_attempts": 1, "mode": "standard"},
        proxies={},
        ignore_configured_endpoint_urls=True,
        # Checksums are sent explicitly. A body over TLS needs no second one in its signature.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={"addressing_style": place.addressing, "payload_signing_enabled": not tls},
    )
    try:
        return session.create_client(
            "s3",
            region_name=access.region or place.region or "us-east-1",
            endpoint_url=endpoint,
            verify=place.ca_bundle or True,
            aws_access_key_id=access.key,
            aws_secret_access_key=access.secret,
            aws_session_token=access.token or None,
            config=config,
        )
    except Exception as error:  # a wrong endpoint or region raises errors of many kinds
        reason = scrub(str(error), (access.secret, access.token))
        raise RemoteError(f"The S3 store can't be used: {reason}", lasting=True) from None
