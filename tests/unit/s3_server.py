"""SeaweedFS as the S3 server of the tests, and a proxy before it that fails on purpose."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import json
import random
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

KEY = "crater-test"
SECRET = "sk/Geheim+0123456789abcdef/WORT"
CREDENTIALS = {"access_key_id": KEY, "secret_access_key": SECRET}


def find() -> str | None:
    """The server's program, beside this Python or on the path."""
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed")


#: Not the one that other tests seed: several servers start side by side.
_RANDOM = random.SystemRandom()


def free_port() -> int:
    """A port that is free, and the one 10,000 above it, where SeaweedFS speaks gRPC."""
    while True:
        port = _RANDOM.randrange(11000, 22000)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for number in (port, port + 10000):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", number))
            return port


class Server:
    def __init__(self, weed: str, folder: Path) -> None:
        key = {"accessKey": KEY, "secretKey": SECRET}
        rights = ["Admin", "Read", "Write", "List", "Tagging"]
        identity = {"name": "t", "credentials": [key], "actions": rights}
        (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
        (folder / "data").mkdir()
        ports = [free_port() for _ in range(4)]
        self.port = ports[3]
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self._log = (folder / "log").open("w")
        self._process = subprocess.Popen(
            [
                *(weed, "server", f"-dir={folder / 'data'}", "-ip=127.0.0.1"),
                *("-ip.bind=127.0.0.1", f"-master.port={ports[0]}", f"-volume.port={ports[1]}"),
                *(
                    "-filer",
                    f"-filer.port={ports[2]}",
                    "-s3",
                    "-s3.autoCreateBucket=false",
                    f"-s3.port={self.port}",
                ),
                *(f"-s3.config={folder / 's3.json'}", "-volume.max=3000"),
                *(
                    "-master.volumeSizeLimitMB=64",
                    "-s3.port.iceberg=0",
                    "-s3.port.lance=0",
                    "-master.telemetry=false",
                ),
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        self._serial = 0
        self.client = client(self.endpoint)
        self._await()

    def _await(self) -> None:
        deadline = time.monotonic() + 180
        while True:
            try:
                self.client.create_bucket(Bucket="ready")
                self.client.put_object(Bucket="ready", Key="x", Body=b"x")
            except Exception:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    self.stop()
                    raise RuntimeError(Path(self._log.name).read_text()[-2000:]) from None
                time.sleep(0.2)
            else:
                return

    def bucket(self) -> str:
        """A new bucket."""
        self._serial += 1
        name = f"bucket-{self._serial}"
        self.client.create_bucket(Bucket=name)
        return name

    def keys(self, bucket: str) -> dict[str, int]:
        """All objects of a bucket with their sizes."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=bucket)
        return {o["Key"]: o["Size"] for page in pages for o in page.get("Contents", ())}

    def body(self, bucket: str, key: str) -> bytes:
        return self.client.get_object(Bucket=bucket, Key=key)["Body"].read()

    def stop(self) -> None:
        self._process.kill()  # its data goes anyway
        self._process.wait()
        self._log.close()


def client(endpoint: str) -> Any:
    import boto3
    from botocore.config import Config

    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id=KEY,
        aws_secret_access_key=SECRET,
        config=Config(retries={"total_max_attempts": 1}, proxies={}),
    )


@dataclass
class Request:
    """What the proxy saw. ``part`` is the number of a part, 0 for all else."""

    method: str
    path: str
    query: dict[str, list[str]]
    size: int

    @property
    def part(self) -> int:
        return int(self.query.get("partNumber", ["0"])[0])


#: What a fault does: status, cut (body to the server after n bytes), corrupt (a byte on the way
#: there), corrupt_answer, lose_answer, answer_cut (after n bytes), pause (seconds before).
Fault = tuple[str, int]


@dataclass
class Proxy:
    """Stands before the server. ``fault`` says for each request what goes wrong, or None."""

    upstream: int
    fault: Callable[[Request], Fault | None] = lambda request: None
    seen: list[Request] = field(default_factory=list)
    arrived: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        proxy = self

        class Handler(_Handler):
            owner = proxy

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self.endpoint = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._server.serve_forever, daemon=True, args=(0.05,)).start()

    def sent_parts(self) -> list[int]:
        """Numbers of the parts that the server got, in order, each as often as it was sent."""
        return [r.part for r in self.arrived if r.method == "PUT" and r.part]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner: Proxy

    def log_message(self, *args: object) -> None:
        pass

    def _serve(self) -> None:
        parsed = urlsplit(self.path)
        query = parse_qs(parsed.query, keep_blank_values=True)
        size = int(self.headers.get("Content-Length") or 0)
        request = Request(self.command, parsed.path, query, size)
        self.owner.seen.append(request)
        kind, value = self.owner.fault(request) or ("", 0)
        if kind == "pause":
            time.sleep(value)
        if kind == "cut":
            self.rfile.read(min(value, size))
            return self._hang_up()
        body = bytearray(self.rfile.read(size))
        if kind == "status":
            return self._refuse(value)
        if kind == "corrupt" and body:
            body[value % len(body)] ^= 1
        self.owner.arrived.append(request)
        answer, data = self._ask(bytes(body))
        if kind == "lose_answer":
            return self._hang_up()
        return self._answer(answer, data, kind, value)

    def _ask(self, body: bytes) -> tuple[http.client.HTTPResponse, bytearray]:
        upstream = http.client.HTTPConnection("127.0.0.1", self.owner.upstream, timeout=60)
        upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() not in ("expect", "connection"):
                upstream.putheader(name, value)
        upstream.endheaders(body or None)
        answer = upstream.getresponse()
        data = bytearray(answer.read())
        upstream.close()
        return answer, data

    def _answer(
        self, answer: http.client.HTTPResponse, data: bytearray, kind: str, value: int
    ) -> None:
        if kind == "corrupt_answer" and data:
            data[value % len(data)] ^= 1
        if kind == "no_checksum":
            data = bytearray(re.sub(rb"<Checksum(CRC32|Type)>.*?</Checksum\1>", b"", bytes(data)))
        self.send_response(answer.status)
        for name, text in answer.headers.items():
            hidden = kind == "no_checksum" and name.lower().startswith("x-amz-checksum")
            if (
                name.lower()
                not in ("transfer-encoding", "content-length", "connection", "date", "server")
                and not hidden
            ):
                self.send_header(name, text)
        head = self.command == "HEAD" and answer.headers.get("Content-Length")
        self.send_header("Content-Length", head or str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            if kind == "answer_cut":
                self.wfile.write(data[:value])
                return self._hang_up()
            self.wfile.write(data)
        return None

    def _refuse(self, status: int) -> None:
        text = b"<Error><Code>SlowDown</Code><Message>on purpose</Message></Error>"
        if status == 500:
            text = text.replace(b"SlowDown", b"InternalError")
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)

    def _hang_up(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _serve  # noqa: N815


@contextlib.contextmanager
def proxied(
    server: Server, fault: Callable[[Request], Fault | None] = lambda request: None
) -> Iterator[Proxy]:
    proxy = Proxy(server.port, fault)
    try:
        yield proxy
    finally:
        proxy.close()


def once_each(faults: list[Fault], wanted: Callable[[Request], bool]) -> Callable[[Request], Any]:
    """Faults for the first requests that are wanted, one each; then all goes well."""
    left = list(faults)
    lock = threading.Lock()

    def fault(request: Request) -> Fault | None:
        with lock:
            return left.pop(0) if left and wanted(request) else None

    return fault
