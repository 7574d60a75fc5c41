"""Sends tasks at a fixed rate, whatever becomes of those before: to the API, or by plain sbatch.

Runs inside a lab with the machine's own Python: standard library only. ``python submissions_load.py
api|sbatch SPEC`` reads {"items", "rate", "at_once", "port", "token"} from SPEC and prints JSON. A
latency counts from when an item was due, so that one that had to wait its turn is not made to look
faster than it was.
"""

import asyncio
import json
import sys
import time
from pathlib import Path

CLOSED = ("IncompleteReadError", "ConnectionResetError", "BrokenPipeError")


class Api:
    """HTTP/1.1 over connections that are kept."""

    def __init__(self, spec):
        self.port, self.token, self.free = spec["port"], spec["token"], []

    async def send(self, item):
        while self.free:
            # One that the server has closed meanwhile; the same task again is the same task.
            if (said := await self.over(self.free.pop(), item)) not in CLOSED:
                return said
        return await self.over(None, item)

    async def over(self, connection, item):
        try:
            reader, writer = connection or await asyncio.open_connection("127.0.0.1", self.port)
            body = item.encode()
            writer.write(
                b"POST /api/v1/schedule HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                b"Authorization: Bearer %s\r\nContent-Length: %d\r\n\r\n%s"
                % (self.token.encode(), len(body), body)
            )
            head = await reader.readuntil(b"\r\n\r\n")
            lines = head.decode().lower().split("\r\n")
            size = next(int(x[15:]) for x in lines if x.startswith("content-length:"))
            answer = json.loads(await reader.readexactly(size))
        except (OSError, asyncio.IncompleteReadError) as error:
            return type(error).__name__
        self.free.append((reader, writer))
        status = lines[0].split()[1]
        if status != "202":
            return status
        return "202" if answer["job_id"] else "202 without a job"


class Sbatch:
    """A process each, at most ``at_once``."""

    def __init__(self, spec):
        self.slots = asyncio.Semaphore(spec["at_once"])

    async def send(self, item):
        async with self.slots:
            process = await asyncio.create_subprocess_exec(
                *("sbatch", "--parsable", f"--comment={item['comment']}"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
            )
            await process.communicate(item["script"].encode())
        return str(process.returncode)


async def main():
    spec = json.loads(Path(sys.argv[2]).read_text())
    way = {"api": Api, "sbatch": Sbatch}[sys.argv[1]](spec)
    items, rate = spec["items"], spec["rate"]
    results, begin = [], time.monotonic() + 0.5

    async def one(item, due):
        said = await way.send(item)
        results.append((due - begin, time.monotonic() - due, said))

    tasks = []
    for number, item in enumerate(items):
        due = begin + number / rate
        if (wait := due - time.monotonic()) > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.create_task(one(item, due)))
    sent = time.monotonic() - begin
    await asyncio.gather(*tasks)
    print(json.dumps({"sent": sent, "done": time.monotonic() - begin, "results": results}))


asyncio.run(main())
