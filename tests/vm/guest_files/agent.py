# SPDX-License-Identifier: Apache-2.0
"""Runs scripts in the guest for the test bed: one TCP connection, one script, one answer.

    request   {"script": TEXT, "user": NAME, "timeout": SECONDS, "stdin": BYTES}\\n, then stdin
    answer    {"rc": N, "timed_out": BOOL, "stdout": BYTES, "stderr": BYTES}\\n, then both

Output goes through files and not pipes: a script that leaves a daemon behind ends when the script
ends, whoever still holds its output open. What a script leaves running goes on, unless the script
ran out of time: then its whole process group is killed.
"""

import json
import os
import pwd
import signal
import socketserver
import subprocess
import sys
import tempfile

PORT = 2222


class Request(socketserver.StreamRequestHandler):
    """One script. An exception ends the connection; its text is on the guest's console."""

    def handle(self):
        request = json.loads(self.rfile.readline())
        stdin = self.rfile.read(request["stdin"])
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            rc, timed_out = run(request, stdin, out, err)
            sizes = {"stdout": out.seek(0, os.SEEK_END), "stderr": err.seek(0, os.SEEK_END)}
            answer = {"rc": rc, "timed_out": timed_out, **sizes}
            self.wfile.write(json.dumps(answer).encode() + b"\n")
            for stream, size in ((out, sizes["stdout"]), (err, sizes["stderr"])):
                stream.seek(0)
                self.wfile.write(stream.read(size))


class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True


def run(request, stdin, out, err):
    """Run the script as its user in its home; return its exit status and whether time ran out."""
    user = pwd.getpwnam(request["user"])
    environment = {
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        "LANG": "C.UTF-8",
        "HOME": user.pw_dir,
        "USER": user.pw_name,
        "LOGNAME": user.pw_name,
        "SHELL": user.pw_shell,
    }
    switch = {}
    if user.pw_uid != os.getuid():
        groups = os.getgrouplist(user.pw_name, user.pw_gid)
        switch = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": groups}
    process = subprocess.Popen(
        ["bash", "-c", request["script"]],
        stdin=subprocess.PIPE,
        stdout=out,
        stderr=err,
        cwd=user.pw_dir,
        env=environment,
        start_new_session=True,
        **switch,
    )
    try:
        process.communicate(stdin, timeout=request["timeout"])
        return process.returncode, False
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.wait(), True


if __name__ == "__main__":
    address = sys.argv[1] if len(sys.argv) > 1 else "10.0.2.15"
    port = int(sys.argv[2]) if len(sys.argv) > 2 else PORT
    with Server((address, port), Request) as server:
        print(f"agent: listening on {server.server_address[1]}", flush=True)
        server.serve_forever()
