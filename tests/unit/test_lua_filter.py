"""The submit filter, on every Lua that is installed, against a real socket and a fake Slurm.

``lua/fake_slurm.lua`` plays slurmctld: a job_desc that raises where Slurm's raises and drops what
Slurm's drops. Real slurmctlds are asked in tests/slurm/test_filter_faults.py.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from crater_slurm.hooks import frame
from crater_slurm.model import token

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CRATER = ROOT / "job_submit" / "crater.lua"
FAKE = HERE / "lua" / "fake_slurm.lua"

LUAS = [lua for lua in ("lua5.1", "lua5.2", "lua5.3", "lua5.4") if shutil.which(lua)]
WITHOUT = {
    "lua-posix": 'package.preload["socket"] = function() error("not installed") end\n',
    "lua-socket": 'package.preload["posix.sys.socket"] = function() error("not installed") end\n',
}
MODULES = {"lua-posix": "posix.sys.socket", "lua-socket": "socket.unix"}


def loads(lua: str, module: str) -> bool:
    """Is this module there for this interpreter?"""
    done = subprocess.run([lua, "-e", f'require "{module}"'], capture_output=True, check=False)
    return done.returncode == 0


DRIVERS = [(lua, lib) for lua in LUAS for lib, module in MODULES.items() if loads(lua, module)]

each_lua = pytest.mark.parametrize("lua", LUAS)
each_driver = pytest.mark.parametrize(
    ("lua", "library"), DRIVERS, ids=[f"{lua}-{lib}" for lua, lib in DRIVERS]
)


def literal(value: str | bytes) -> str:
    """Lua source of a string, whatever its bytes are."""
    data = value.encode() if isinstance(value, str) else value
    return '"' + "".join(f"\\{byte:03d}" for byte in data) + '"'


class Result:
    """What a scenario emitted and what the filter logged."""

    def __init__(self, pairs: list[tuple[str, str]]) -> None:
        self.pairs = pairs

    def all(self, key: str) -> list[str]:
        return [value for name, value in self.pairs if name == key]

    def __getitem__(self, key: str) -> str:
        values = self.all(key)
        assert len(values) == 1, f"{key}: {values} in {self.pairs}"
        return values[0]


class Daemon:
    """A crater-scheduler that answers by a function of the connection."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.requests: list[list[tuple[str, str]]] = []
        self.connections = 0
        self.behaviour: Callable[[socket.socket], None] = self.accept
        self._held: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(8)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            with contextlib.suppress(OSError, frame.FrameError):
                self.behaviour(connection)
            if connection not in self._held:
                connection.close()

    def accept(self, connection: socket.socket) -> None:
        self.answer(("verdict", "accept"))(connection)

    def answer(self, *pairs: tuple[str, str | bytes]) -> Callable[[socket.socket], None]:
        return self.raw(frame.encode(pairs))

    def raw(self, data: bytes) -> Callable[[socket.socket], None]:
        def behave(connection: socket.socket) -> None:
            self.requests.append(frame.receive(connection))
            connection.sendall(data)

        return behave

    def hang(self, connection: socket.socket) -> None:
        self._held.append(connection)

    def close_at_once(self, connection: socket.socket) -> None:
        connection.close()

    def trickle(self, connection: socket.socket) -> None:
        """One byte each 20 ms: every read succeeds, the whole takes seconds."""
        frame.receive(connection)
        for byte in frame.encode([("verdict", "accept"), ("message", "x" * 200)]):
            connection.sendall(bytes([byte]))
            time.sleep(0.02)

    def request(self) -> dict[str, str]:
        assert len(self.requests) == 1, self.requests
        return dict(self.requests[0])

    def close(self) -> None:
        for connection in [*self._held, self._listener]:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()


class Filter:
    """Runs scenarios against crater.lua with settings of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.socket = folder / "s"
        self.off = folder / "off"
        self.conf = folder / "filter.lua"
        self.settings()

    def settings(self, **more: str | int) -> None:
        values: dict[str, str | int] = {
            "socket": str(self.socket),
            "off_switch": str(self.off),
            "deadline_ms": 2000,  # generous, so that a busy machine fails no test of content
        }
        values |= more
        lines = [
            f"  {key} = {value if isinstance(value, int) else literal(value)},"
            for key, value in values.items()
        ]
        self.conf.write_text("return {\n" + "\n".join(lines) + "\n}\n")

    def run(self, lua: str, scenario: str, prelude: str = "", crater: Path = CRATER) -> Result:
        script = self.folder / "scenario.lua"
        script.write_text(scenario)
        done = subprocess.run(
            [lua, str(FAKE), str(crater), str(script)],
            capture_output=True,
            timeout=60,
            check=False,
            env={
                "PATH": "/usr/bin:/bin",
                "CRATER_FILTER_CONF": str(self.conf),
                "CRATER_TEST_PRELUDE": prelude,
            },
            # slurmctld survives SIGPIPE; Python ignores it and the child inherits that.
            restore_signals=False,
        )
        assert done.returncode == 0, done.stderr.decode()
        return Result(frame.decode_body(done.stdout))


@pytest.fixture
def lua_filter(tmp_path: Path) -> Filter:
    return Filter(tmp_path)


@pytest.fixture
def daemon(lua_filter: Filter) -> Iterator[Daemon]:
    daemon = Daemon(lua_filter.socket)
    yield daemon
    daemon.close()


SUBMIT = """
local j = job({script = "#!/bin/sh\\n#CRATER gpus=2\\nsleep 1\\n", comment = "mine",
               tres_per_node = "gres/gpu:1", num_tasks = 4, bitflags = 503316480})
emit("rc", crater.submit(j, {}, 1000))
emit("features", j.features)
emit("comment", j.comment)
emit("gres", j.gres)
emit("cpus_per_task", j.cpus_per_task)
emit("bitflags", j.bitflags)
emit("env", j.environment.SLURM_MEM_BIND)
"""
UNCHANGED = {
    "rc": "0",
    "features": "nil",
    "comment": "mine",
    "gres": "gres/gpu:1",
    "cpus_per_task": "65534",
    "bitflags": "503316480",
    "env": "nil",
}


def assert_unchanged(result: Result) -> None:
    assert {key: result[key] for key in UNCHANGED} == UNCHANGED


def test_at_least_one_lua_is_tested() -> None:
    assert LUAS, "no Lua interpreter is installed, so the filter is not tested at all"


# The whole way, on every library -----------------------------------------------------------


@each_driver
def test_an_answer_is_applied(lua: str, library: str, lua_filter: Filter, daemon: Daemon) -> None:
    daemon.behaviour = daemon.answer(
        ("verdict", "accept"),
        ("set.features", "avx512"),
        ("set.gres", "gpu:a100:2"),
        ("set.cpus_per_task", "8"),
        ("set.comment", "mine crater-plan:1.p.s"),
        ("flag", "GRES_ENFORCE_BIND"),
        ("env.SLURM_MEM_BIND", "local"),
        ("message", "crater: 2 GPUs"),
        ("message", "100% %s done"),
        ("log", "job enriched %d"),
    )
    result = lua_filter.run(lua, SUBMIT, WITHOUT[library])
    assert result["rc"] == "0"
    assert result["features"] == "avx512"
    assert result["gres"] == "gres/gpu:a100:2"
    assert result["cpus_per_task"] == "8"
    assert result["comment"] == "mine crater-plan:1.p.s"
    assert result["bitflags"] == str(503316480 + 16)
    assert result["env"] == "local"
    assert result.all("log_user") == ["crater: 2 GPUs", "100% %s done"]
    assert result.all("log_info") == ["crater: job enriched %d"]
    assert not result.all("log_error")


@each_driver
def test_the_request_is_what_the_protocol_says(
    lua: str, library: str, lua_filter: Filter, daemon: Daemon
) -> None:
    scenario = """
    local script = "#!/bin/bash\\n#SBATCH -n4\\n\\n#CRATER gpus=2\\nsrun x\\n#CRATER a=b\\n"
    local j = job({script = script, comment = "c", user_name = "ada",
      tres_per_job = "gres/gpu:2", num_tasks = 4, min_mem_per_node = 65534, shared = 0,
      cpus_per_task = 65534, time_limit = 4294967294,
      array_inx = "1-3", het_job_offset = 4294967294, bitflags = 503316480},
      {environment = {CRATER_CHECK = "nonce"}})
    emit("rc", crater.submit(j, {}, 1000))
    """
    assert lua_filter.run(lua, scenario, WITHOUT[library])["rc"] == "0"
    assert daemon.requests == [
        [
            ("op", "submit"),
            ("gres_style", "/"),
            ("uid", "1000"),
            ("user", "ada"),
            ("kind", "batch"),
            ("script", "#!/bin/bash\n#SBATCH -n4\n\n#CRATER gpus=2"),
            ("late_directive", "6"),
            ("check", "nonce"),
            ("field.comment", "c"),
            ("field.tres_per_job", "gres/gpu:2"),
            ("field.num_tasks", "4"),
            ("field.min_mem_per_node", "65534"),
            ("field.bitflags", "503316480"),
            ("field.shared", "0"),
            ("field.array_inx", "1-3"),
        ]
    ]


@each_driver
def test_a_refusal_changes_nothing_and_says_why(
    lua: str, library: str, lua_filter: Filter, daemon: Daemon
) -> None:
    daemon.behaviour = daemon.answer(
        ("verdict", "reject"), ("set.features", "x"), ("message", "no node\nhas 9 GPUs")
    )
    result = lua_filter.run(lua, SUBMIT, WITHOUT[library])
    assert result["rc"] == "-1"
    assert result["features"] == "nil"
    assert result.all("log_user") == ["no node", "has 9 GPUs"]


@each_driver
def test_no_daemon_costs_nothing(lua: str, library: str, lua_filter: Filter) -> None:
    result = lua_filter.run(lua, SUBMIT, WITHOUT[library])
    assert_unchanged(result)
    assert "No such file or directory" in result["log_error"]
    assert not result.all("log_user")


ACCEPT = frame.encode([("verdict", "accept")])
FAULTS: dict[str, bytes | str] = {
    "garbage": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "binary": bytes(range(256)),
    "half a header": b"CRATER1",
    "no length": b"CRATER1 \n20:verdict,",
    "endless length": b"CRATER1 " + b"9" * 400,
    "negative length": b"CRATER1 -5\nabcdefgh",
    "half a body": ACCEPT[:-5],
    "huge announcement": b"CRATER1 99999999999\n",
    "more than a MiB": frame.encode([("verdict", "accept"), ("message", "x" * 2**20)]),
    "no comma": b"CRATER1 20\n" + b"7:verdict;6:accept,x",
    "length beyond the body": b"CRATER1 20\n" + b"7:verdict,999:accept,",
    "key without value": b"CRATER1 10\n" + b"7:verdict,",
    "a hundred thousand pairs": b"CRATER1 600000\n" + b"0:,0:," * 100000,
    "nothing": b"",
    "close_at_once": "close_at_once",
}


@each_driver
@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_answer_leaves_the_job_alone(
    lua: str, library: str, fault: str, lua_filter: Filter, daemon: Daemon
) -> None:
    answer = FAULTS[fault]
    daemon.behaviour = daemon.raw(answer) if isinstance(answer, bytes) else daemon.close_at_once
    result = lua_filter.run(lua, SUBMIT, WITHOUT[library])
    assert_unchanged(result)
    assert result["log_error"].startswith("crater: crater-scheduler fails: ")


@each_driver
@pytest.mark.parametrize("fault", ["hang", "trickle"])
def test_a_slow_daemon_costs_one_deadline_then_the_breaker_opens(
    lua: str, library: str, fault: str, lua_filter: Filter, daemon: Daemon
) -> None:
    lua_filter.settings(deadline_ms=300)
    daemon.behaviour = getattr(daemon, fault)
    scenario = (
        SUBMIT
        + """
    local function timed(name)
      local before = clock()
      crater.submit(job({script = "#CRATER gpus=1"}), {}, 1000)
      emit(name, clock() - before)
    end
    CRATER_FILTER.breaker = {}
    timed("first")
    for _ = 1, 50 do timed("later") end
    """
    )
    result = lua_filter.run(lua, scenario, WITHOUT[library])
    assert_unchanged(result)
    assert 0.25 < float(result["first"]) < 1.3
    assert sum(map(float, result.all("later"))) < 0.3, "the breaker did not spare us the daemon"
    assert daemon.connections == 2
    assert "within 300 ms" in result.all("log_error")[0]


@each_driver
def test_a_full_queue_of_connections_is_bounded_too(
    lua: str, library: str, lua_filter: Filter
) -> None:
    """connect() on a Unix socket answers EAGAIN while the backlog is full."""
    lua_filter.settings(deadline_ms=300)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(lua_filter.socket))
    listener.listen(0)
    waiting = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(3)]
    for connection in waiting:
        connection.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            connection.connect(str(lua_filter.socket))
    result = lua_filter.run(
        lua, "local t = clock()\n" + SUBMIT + "emit('took', clock() - t)", WITHOUT[library]
    )
    for connection in [*waiting, listener]:
        connection.close()
    assert_unchanged(result)
    assert float(result["took"]) < 1.3
    assert "did not accept a connection within 300 ms" in result["log_error"]


@each_driver
def test_the_breaker_closes_when_the_daemon_is_back(
    lua: str, library: str, lua_filter: Filter, daemon: Daemon
) -> None:
    lua_filter.settings(breaker_seconds=1)
    good = daemon.answer(("verdict", "accept"), ("set.features", "f"))

    def first_bad(connection: socket.socket) -> None:
        (daemon.close_at_once if daemon.connections <= 2 else good)(connection)

    daemon.behaviour = first_bad
    scenario = """
    local function go()
      local j = job({script = "#CRATER gpus=1", tres_per_node = "gres/gpu:1"})
      crater.submit(j, {}, 1000)
      emit("features", j.features)
    end
    local function wait() local stop = clock() + 1.1; while clock() < stop do end end
    go() go() wait() go() go() wait() go() go()
    """
    result = lua_filter.run(lua, scenario, WITHOUT[library])
    assert result.all("features") == ["nil"] * 4 + ["f"] * 2
    assert daemon.connections == 4
    assert len(result.all("log_error")) == 1, "one line when it opens"
    assert result.all("log_info") == ["crater: crater-scheduler answers again"]


@each_lua
def test_new_settings_get_a_new_try(lua: str, lua_filter: Filter) -> None:
    scenario = f"""
    local now = 1000000
    os.time = function() return now end
    local function go() crater.submit(job({{comment = "crater"}}), {{}}, 1) end
    go() go()
    local file = io.open({literal(str(lua_filter.conf))}, "w")
    file:write("return {{deadline_ms = 50}}") file:close()
    now = now + 10
    go() go()
    emit("asked", #CRATER_FILTER.driver.sent)
    """
    assert lua_filter.run(lua, scenario, with_answer(times=0))["asked"] == "2"


@each_driver
def test_sockets_do_not_leak(lua: str, library: str, lua_filter: Filter, daemon: Daemon) -> None:
    daemon.behaviour = daemon.close_at_once
    scenario = """
    local stat = io.open("/proc/self/stat")
    local pid = stat:read("*n")
    local function count()
      local listing = io.popen("ls /proc/" .. pid .. "/fd | wc -l")
      local value = listing:read("*n")
      listing:close()
      return value
    end
    crater.submit(job({script = "#CRATER gpus=1"}), {}, 1000)
    collectgarbage() collectgarbage("stop")
    local before = count()
    for _ = 1, 20 do
      CRATER_FILTER.breaker = {}
      crater.submit(job({script = "#CRATER gpus=1"}), {}, 1000)
    end
    emit("more", count() - before)
    """
    # The pipe to ls itself may be counted once or twice.
    assert int(lua_filter.run(lua, scenario, WITHOUT[library])["more"]) <= 1
    assert daemon.connections == 21


@each_driver
def test_hostile_strings_travel_unharmed(
    lua: str, library: str, lua_filter: Filter, daemon: Daemon
) -> None:
    hostile = b"crater \n\r\t'\"`$(id) %s %n %d \\ \xff\xfe 5:hello, \x01\x7f"
    scenario = f"""
    local j = job({{comment = {literal(hostile)}, features = "a%n%s"}})
    emit("rc", crater.submit(j, {{}}, 1000))
    emit("comment", j.comment)
    """
    daemon.behaviour = daemon.answer(("verdict", "accept"), ("message", hostile), ("log", hostile))
    result = lua_filter.run(lua, scenario, WITHOUT[library])
    assert result["rc"] == "0"
    text = hostile.decode("utf-8", "surrogateescape")
    assert daemon.request()["field.comment"] == text
    assert daemon.request()["field.features"] == "a%n%s"
    assert result["comment"] == text
    for line in result.all("log_user") + result.all("log_info"):
        assert not re.search(r"[\x00-\x1f\x7f]", line)


@each_driver
def test_a_script_of_four_mebibytes_sends_its_header_only(
    lua: str, library: str, lua_filter: Filter, daemon: Daemon
) -> None:
    scenario = """
    local script = "#!/bin/sh\\n#CRATER gpus=2\\necho\\n" .. string.rep("x\\n", 2 * 1024 * 1024)
    local before = clock()
    emit("rc", crater.submit(job({script = script}), {}, 1000))
    emit("took", clock() - before)
    """
    result = lua_filter.run(lua, scenario, WITHOUT[library])
    assert result["rc"] == "0"
    assert daemon.request()["script"] == "#!/bin/sh\n#CRATER gpus=2"
    assert float(result["took"]) < 1


@each_driver
def test_a_request_that_is_too_long_harms_only_its_own_job(
    lua: str, library: str, lua_filter: Filter, daemon: Daemon
) -> None:
    scenario = """
    emit("rc", crater.submit(job({comment = "crater " .. string.rep("x", 2^20)}), {}, 1000))
    emit("rc", crater.submit(job({comment = "crater"}), {}, 1000))
    """
    result = lua_filter.run(lua, scenario, WITHOUT[library])
    assert result.all("rc") == ["0", "0"]
    assert len(daemon.requests) == 1, "the breaker must not open by what one user sends"


@each_lua
def test_without_any_socket_library_jobs_pass(lua: str, lua_filter: Filter) -> None:
    again = "crater.submit(job({script = '#CRATER gpus=1'}), {}, 1)"
    result = lua_filter.run(lua, SUBMIT + again, "".join(WITHOUT.values()))
    assert_unchanged(result)
    assert "neither lua-posix nor lua-socket loads" in result["log_error"]


@pytest.mark.skipif(not DRIVERS, reason="no Lua socket library is installed")
def test_lua_posix_is_preferred(lua_filter: Filter) -> None:
    for lua in {lua for lua, library in DRIVERS if library == "lua-posix"}:
        result = lua_filter.run(lua, SUBMIT + "emit('name', CRATER_FILTER.driver.name)")
        assert result["name"] == "lua-posix"


# Answers that can't be used ----------------------------------------------------------------


def with_answer(*pairs: tuple[str, str | bytes], times: int = 1) -> str:
    """Prelude that puts a prepared answer in the place of the socket."""
    data = literal(frame.encode(pairs))
    answers = ", ".join([data] * times)
    return (
        "CRATER_FILTER = {config = {}, breaker = {}, said = {}, "
        f"driver = fake_driver({{{answers}}})}}\n"
    )


ACCEPTED = ("verdict", "accept")
UNUSABLE: dict[str, tuple[tuple[str, str | bytes], ...]] = {
    "no verdict": (("set.features", "x"),),
    "strange verdict": (("verdict", "maybe"), ("set.features", "x")),
    "two verdicts": (ACCEPTED, ("verdict", "reject")),
    "unknown key": (ACCEPTED, ("set.features", "x"), ("colour", "red")),
    "unknown field": (ACCEPTED, ("set.features", "x"), ("set.warp", "9")),
    "a field that is not ours": (ACCEPTED, ("set.features", "x"), ("set.account", "root")),
    "the script": (ACCEPTED, ("set.script", "#!/bin/sh\nrm -rf /\n")),
    "field twice": (ACCEPTED, ("set.features", "x"), ("set.features", "y")),
    "text for a number": (ACCEPTED, ("set.features", "x"), ("set.cpus_per_task", "many")),
    "fraction": (ACCEPTED, ("set.features", "x"), ("set.cpus_per_task", "1.5")),
    "negative": (ACCEPTED, ("set.cpus_per_task", "-1")),
    "exponent": (ACCEPTED, ("set.cpus_per_task", "1e3")),
    "hexadecimal": (ACCEPTED, ("set.cpus_per_task", "0x10")),
    "empty number": (ACCEPTED, ("set.cpus_per_task", "")),
    "unset value of its width": (ACCEPTED, ("set.cpus_per_task", "65534")),
    "beyond its width": (ACCEPTED, ("set.num_tasks", "4294967296")),
    "beyond a double": (ACCEPTED, ("set.min_mem_per_node", "18446744073709551614")),
    "NUL": (ACCEPTED, ("set.features", b"a\0b")),
    "a comment that Slurm refuses": (ACCEPTED, ("set.features", "x"), ("set.comment", "c" * 1025)),
    "unknown flag": (ACCEPTED, ("set.features", "x"), ("flag", "SUCCESS")),
    "loader variable": (ACCEPTED, ("set.features", "x"), ("env.LD_PRELOAD", "/tmp/x.so")),
    "shell variable": (ACCEPTED, ("env.PATH", "/tmp")),
    "variable with =": (ACCEPTED, ("env.CRATER_A=B", "x")),
    "NUL in variable": (ACCEPTED, ("env.CRATER_A", b"a\0b")),
}


@each_lua
@pytest.mark.parametrize("case", UNUSABLE)
def test_an_answer_with_one_wrong_thing_is_not_applied_at_all(
    lua: str, case: str, lua_filter: Filter
) -> None:
    result = lua_filter.run(lua, SUBMIT, with_answer(*UNUSABLE[case]))
    assert_unchanged(result)
    assert "the scheduler's answer is not applied" in result["log_error"]


@each_lua
def test_an_unusable_answer_leaves_the_breaker_closed(lua: str, lua_filter: Filter) -> None:
    """The daemon answered in time, and other jobs may fare better."""
    scenario = """
    crater.submit(job({comment = "crater"}), {}, 1)
    crater.submit(job({comment = "crater"}), {}, 1)
    emit("asked", #CRATER_FILTER.driver.sent)
    """
    result = lua_filter.run(lua, scenario, with_answer(ACCEPTED, ("set.x", "y"), times=2))
    assert result["asked"] == "2"


@each_lua
def test_when_slurm_refuses_a_field_the_others_are_put_back(lua: str, lua_filter: Filter) -> None:
    scenario = SUBMIT.replace(
        "bitflags = 503316480})", 'bitflags = 503316480}, {refuse = "shared"})'
    )
    answer = with_answer(
        ACCEPTED,
        ("set.features", "x"),
        ("set.comment", "theirs"),
        ("set.gres", "gpu:4"),
        ("set.cpus_per_task", "8"),
        ("flag", "GRES_ENFORCE_BIND"),
        ("set.shared", "1"),
    )
    result = lua_filter.run(lua, scenario, answer)
    assert_unchanged(result)
    assert "refused" in result["log_error"]


@each_lua
def test_flags_are_or_ed(lua: str, lua_filter: Filter) -> None:
    answer = with_answer(
        ACCEPTED,
        ("flag", "GRES_ENFORCE_BIND"),
        ("flag", "GRES_ENFORCE_BIND"),
        ("flag", "USE_MIN_NODES"),
        ("flag", "GRES_ONE_TASK_PER_SHARING"),
    )
    result = lua_filter.run(lua, SUBMIT, answer)
    assert result["bitflags"] == str(503316480 | 16 | 8)
    assert "GRES_ONE_TASK_PER_SHARING is not known to this Slurm" in result["log_error"]


@each_lua
def test_interactive_jobs_get_no_environment(lua: str, lua_filter: Filter) -> None:
    scenario = """
    local j = job({comment = "crater: gpus=1"})
    emit("rc", crater.submit(j, {}, 1000))
    emit("features", j.features)
    """
    answer = with_answer(ACCEPTED, ("set.features", "x"), ("env.SLURM_HINT", "nomultithread"))
    result = lua_filter.run(lua, scenario, answer)
    assert (result["rc"], result["features"]) == ("0", "x")
    assert not result.all("slurm_info")


# What is asked, and when ---------------------------------------------------------------------


def asked(result: Result) -> list[dict[str, str]]:
    """Requests that a scenario emitted under "sent"."""
    requests = []
    for text in result.all("sent"):
        data = text.encode("utf-8", "surrogateescape")
        requests.append(dict(frame.decode_body(data.split(b"\n", 1)[1])))
    return requests


EMIT_SENT = '\nfor _, data in ipairs(CRATER_FILTER.driver.sent) do emit("sent", data) end\n'


@each_lua
@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("#!/bin/sh\n#CRATER gpus=2\nsleep 1", "#!/bin/sh\n#CRATER gpus=2"),
        ("#!/bin/sh\n \t\n   # crater\n\nsleep 1", "#!/bin/sh\n \t\n   # crater\n"),
        ("#!/bin/sh\n#Crater x\n", "#!/bin/sh\n#Crater x\n"),
        ("#CRATER gpus=1", "#CRATER gpus=1"),
        ("\n\n#CRATER gpus=1\n\nx", "\n\n#CRATER gpus=1\n"),
        ("echo\n# crater is only mentioned\n", None),
        ("#!/bin/sh\nsleep crater\n", None),
        ("", None),
    ],
)
def test_the_header_ends_where_sbatch_stops(
    lua: str, script: str, expected: str | None, lua_filter: Filter
) -> None:
    scenario = f"crater.submit(job({{script = {literal(script)}}}), {{}}, 1)" + EMIT_SENT
    requests = asked(lua_filter.run(lua, scenario, with_answer(ACCEPTED)))
    assert [request["script"] for request in requests] == ([] if expected is None else [expected])


@each_lua
def test_a_header_beyond_the_limit_is_cut_between_two_lines(lua: str, lua_filter: Filter) -> None:
    scenario = """
    local line = "#CRATER gpus=22\\n"
    crater.submit(job({script = "# crater\\n" .. string.rep(line, 20000) .. "echo\\n"}), {}, 1)
    """
    request = asked(lua_filter.run(lua, scenario + EMIT_SENT, with_answer(ACCEPTED)))[0]
    lines = request["script"].split("\n")
    assert 256 * 1024 - 20 < len(request["script"]) <= 256 * 1024
    assert set(lines[1:]) == {"#CRATER gpus=22"}
    assert request["late_directive"] == str(len(lines) + 1)


@each_lua
def test_a_directive_after_the_first_command_is_reported(lua: str, lua_filter: Filter) -> None:
    """Its author believes that it counts; only the scheduler can say that it doesn't."""
    scenario = 'crater.submit(job({script = "#!/bin/sh\\necho\\n\\n#CRATER gpus=2\\n"}), {}, 1)'
    request = asked(lua_filter.run(lua, scenario + EMIT_SENT, with_answer(ACCEPTED)))[0]
    assert request["late_directive"] == "4"
    assert request["script"] == "#!/bin/sh"


@each_lua
def test_jobs_without_crater_are_not_sent_unless_the_site_says_always(
    lua: str, lua_filter: Filter
) -> None:
    scenario = 'crater.submit(job({script = "#!/bin/sh\\nx", comment = "y"}), {}, 1)' + EMIT_SENT
    assert asked(lua_filter.run(lua, scenario, with_answer(ACCEPTED))) == []
    lua_filter.settings(ask="always")
    assert len(asked(lua_filter.run(lua, scenario, with_answer(ACCEPTED)))) == 1


@each_lua
@pytest.mark.parametrize(
    ("field", "value", "sent"),
    [
        ("tres_per_node", "gres:shard:3", True),
        ("tres_per_node", "gres/gpu:1,gres/shard:3", True),
        ("tres_per_task", "gres/shard:3", True),
        ("tres_per_node", "gres/gpu:1", False),
        ("features", "shard", False),
    ],
)
def test_a_job_with_shards_is_sent_though_it_says_nothing_of_crater(
    lua: str, field: str, value: str, sent: bool, lua_filter: Filter
) -> None:
    scenario = f"crater.submit(job({{{field} = {literal(value)}}}), {{}}, 1)" + EMIT_SENT
    requests = asked(lua_filter.run(lua, scenario, with_answer(ACCEPTED)))
    assert [request[f"field.{field}"] for request in requests] == [value] * sent


@each_lua
def test_kinds_and_components(lua: str, lua_filter: Filter) -> None:
    scenario = """
    crater.submit(job({comment = "crater"}), {}, 1)
    crater.submit(job({script = "#CRATER gpus=1"}), {}, 1)
    crater.submit(job({script = "#CRATER gpus=1"}, {cron = true}), {}, 1)
    crater.submit(job({comment = "crater", het_job_offset = 1}), {}, 1)
    """
    requests = asked(lua_filter.run(lua, scenario + EMIT_SENT, with_answer(ACCEPTED, times=4)))
    assert [r["kind"] for r in requests] == ["interactive", "batch", "cron", "interactive"]
    assert [r.get("het") for r in requests] == [None, None, None, "1"]


@each_lua
def test_root_submitting_for_a_user_asks_in_the_users_name(lua: str, lua_filter: Filter) -> None:
    scenario = 'crater.submit(job({comment = "crater", user_id = 1234}), {}, 0)' + EMIT_SENT
    assert asked(lua_filter.run(lua, scenario, with_answer(ACCEPTED)))[0]["uid"] == "1234"


@each_lua
def test_unset_values_are_absent_and_numbers_plain(lua: str, lua_filter: Filter) -> None:
    scenario = """
    crater.submit(job({comment = "crater", cpus_per_task = 65534, ntasks_per_node = 65535,
      num_tasks = 4294967294, max_nodes = 4294967295, time_limit = 4294967295,
      min_mem_per_cpu = 2^64, min_mem_per_node = 1099511627776, min_cpus = 65534,
      bitflags = 0}), {}, 1)
    """
    request = asked(lua_filter.run(lua, scenario + EMIT_SENT, with_answer(ACCEPTED)))[0]
    sent = {key: value for key, value in request.items() if key.startswith("field.")}
    assert sent == {
        "field.comment": "crater",
        "field.min_cpus": "65534",
        "field.min_mem_per_node": "1099511627776",
    }


@each_lua
def test_a_field_that_can_not_be_read_is_left_out(lua: str, lua_filter: Filter) -> None:
    scenario = """
    crater.submit(job({comment = "crater", features = "f", qos = "q"}, {unreadable = "features"}),
      {}, 1)
    """
    request = asked(lua_filter.run(lua, scenario + EMIT_SENT, with_answer(ACCEPTED)))[0]
    assert "field.features" not in request
    assert request["field.qos"] == "q"


@each_lua
def test_how_long_and_where_a_job_may_run_is_sent(lua: str, lua_filter: Filter) -> None:
    scenario = """
    crater.submit(job({comment = "crater", time_limit = 90, reservation = "course",
      immediate = 1}), {}, 1)
    """
    request = asked(lua_filter.run(lua, scenario + EMIT_SENT, with_answer(ACCEPTED)))[0]
    assert (request["field.time_limit"], request["field.reservation"]) == ("90", "course")
    assert request["field.immediate"] == "1"
    scenario = 'crater.submit(job({comment = "crater"}), {}, 1)'
    request = asked(lua_filter.run(lua, scenario + EMIT_SENT, with_answer(ACCEPTED)))[0]
    assert "field.immediate" not in request, "unset is 0 there, which would make a change of it"


@each_lua
@pytest.mark.parametrize("style", [":", "/"])
def test_the_gres_style_is_learnt_once(lua: str, style: str, lua_filter: Filter) -> None:
    scenario = f"""
    local writes = {{}}
    local options = {{prefix = "gres{style}", writes = writes}}
    local other = "{"/" if style == ":" else ":"}"
    -- A user's own string counts for that user's job alone.
    crater.submit(job({{comment = "crater", tres_per_job = "gres" .. other .. "gpu:1"}}), {{}}, 1)
    for _ = 1, 2 do
      local j = job({{comment = "crater"}}, options)
      crater.submit(j, {{}}, 1)
      emit("gres", j.gres)
    end
    emit("writes", writes.gres)
    """
    result = lua_filter.run(lua, scenario + EMIT_SENT, with_answer(ACCEPTED, times=3))
    styles = [request["gres_style"] for request in asked(result)]
    assert styles == ["/" if style == ":" else ":", style, style]
    assert result.all("gres") == ["nil", "nil"]
    assert result["writes"] == "2", "one probe: set, and cleared"


@each_lua
def test_a_job_with_gres_is_never_probed(lua: str, lua_filter: Filter) -> None:
    scenario = """
    local writes = {}
    local j = job({comment = "crater", tres_per_node = "gpu=1"}, {writes = writes})
    crater.submit(j, {}, 1)
    emit("gres", j.gres)
    emit("writes", writes.gres)
    """
    result = lua_filter.run(lua, scenario + EMIT_SENT, with_answer(ACCEPTED))
    assert (result["gres"], result["writes"]) == ("gpu=1", "nil")
    assert "gres_style" not in asked(result)[0]


# Policy ---------------------------------------------------------------------------------------


@each_lua
def test_a_site_may_refuse_crater_jobs_when_nobody_answers(lua: str, lua_filter: Filter) -> None:
    lua_filter.settings(unavailable="reject", ask="always")
    scenario = """
    emit("rc", crater.submit(job({script = "#!/bin/sh\\n#CRATER gpus=1\\n"}), {}, 1))
    emit("rc", crater.submit(job({comment = "crater: gpus=1"}), {}, 1))
    emit("rc", crater.submit(job({comment = "craters of the moon"}), {}, 1))
    emit("rc", crater.submit(job({script = "#!/bin/sh\\n"}), {}, 1))
    emit("rc", crater.modify(job({features = "x"}), record({comment = "crater-plan:1.a.b"}), {}, 1))
    """
    result = lua_filter.run(lua, scenario, with_answer(ACCEPTED, times=0))
    assert result.all("rc") == ["-1", "-1", "0", "0", "0"]
    assert "can't be asked" in result.all("log_user")[0]
    assert "take the crater directives out" in result.all("log_user")[1]


@each_lua
def test_the_off_switch_stops_everything(lua: str, lua_filter: Filter) -> None:
    lua_filter.off.touch()
    scenario = (
        """
    local j = job({comment = "crater-plan:1.a.b"})
    emit("rc", crater.submit(j, {}, 1))
    emit("comment", j.comment)
    local m = job({comment = ""})
    emit("rc", crater.modify(m, record({comment = "crater-plan:1.a.b"}), {}, 1))
    emit("comment", m.comment)
    """
        + EMIT_SENT
    )
    result = lua_filter.run(lua, scenario, with_answer(ACCEPTED))
    assert result.all("rc") == ["0", "0"]
    assert result.all("comment") == ["crater-plan:1.a.b", ""]
    assert not result.all("sent")
    assert "switched off by" in result["log_error"]


# Plan tokens ----------------------------------------------------------------------------------

COMMENTS = [
    "plain",
    "",
    "  blanks are kept  ",
    "crater-plan:1.forged.token",
    "my job crater-plan:1.a.b",
    "my job \t crater-plan:1.a.b and more",
    "crater-plan:1.a.b crater-plan:1.c.d",
    "gluedcrater-plan:1.a.b",
    "crater-plan:",
    "crater-plan: crater-plan:x",
    "crater-plcrater-plan:1.x.y an:1.f.g",
    "a\ncrater-plan:1.a.b\nb",
    "crater-plan:crater-plan:1.a.b",
]


@each_lua
@pytest.mark.parametrize("comment", COMMENTS)
def test_a_token_that_a_user_brings_is_taken_out(
    lua: str, comment: str, lua_filter: Filter
) -> None:
    scenario = f"""
    for _, daemon in ipairs({{"dead", "absent"}}) do
      local j = job({{comment = {literal(comment)}, extra = {literal(comment)}}})
      emit("rc", crater.submit(j, {{}}, 1))
      emit("comment", j.comment or "")
      emit("comment", j.extra or "")
    end
    """
    result = lua_filter.run(lua, scenario, with_answer(ACCEPTED, times=0))
    assert result.all("rc") == ["0", "0"]
    expected = token.strip(comment) if "crater-plan:" in comment else comment
    assert result.all("comment") == [expected] * 4
    assert token.PREFIX not in expected


@each_lua
@pytest.mark.parametrize(
    ("given", "own", "expected"),
    [
        ("new words", "old crater-plan:1.a.b", "new words crater-plan:1.a.b"),
        ("", "old crater-plan:1.a.b", "crater-plan:1.a.b"),
        ("x crater-plan:1.forged.f", "old crater-plan:1.a.b", "x crater-plan:1.a.b"),
        ("crater-plan:1.a.b", "crater-plan:1.a.b", "crater-plan:1.a.b"),
        ("x crater-plan:1.forged.f", "no plan", "x"),
        ("crater-plan:1.forged.f", None, "nil"),
        ("words", None, "words"),
        ("words", "no plan", "words"),
    ],
)
@pytest.mark.parametrize("uid", [0, 1000])
def test_a_modification_neither_drops_nor_forges_a_plan(
    lua: str, uid: int, given: str, own: str | None, expected: str, lua_filter: Filter
) -> None:
    scenario = (
        f"""
    local j = job({{comment = {literal(given)}}})
    local r = record({{comment = {"nil" if own is None else literal(own)}, user_id = 1000}})
    emit("rc", crater.modify(j, r, {{}}, {uid}))
    emit("comment", j.comment)
    """
        + EMIT_SENT
    )
    result = lua_filter.run(lua, scenario, with_answer(ACCEPTED, times=0))
    assert (result["rc"], result["comment"]) == ("0", expected)
    assert not result.all("sent"), "a comment alone is no question for the scheduler"


@each_lua
def test_a_comment_that_leaves_no_room_for_the_plan_is_refused_in_words(
    lua: str, lua_filter: Filter
) -> None:
    scenario = """
    local r = record({comment = "crater-plan:1.payl.sig"})
    for _, length in ipairs({1001, 1002}) do
      local j = job({comment = string.rep("c", length)})
      emit("rc", crater.modify(j, r, {}, 1000))
      emit("length", #j.comment)
    end
    """
    result = lua_filter.run(lua, scenario)
    assert result.all("rc") == ["0", "-1"]
    assert result.all("length") == ["1024", "1002"]
    assert "room for 1001 characters; yours has 1002" in result["log_user"]


@each_lua
def test_a_modification_of_a_planned_job_is_asked_about(lua: str, lua_filter: Filter) -> None:
    scenario = """
    local r = record({comment = "w crater-plan:1.a.b", user_id = 1000.0, job_id = 7, job_state = 0})
    local j = job({features = "x", comment = "new"})
    emit("rc", crater.modify(j, r, {}, 1000))
    emit("features", j.features)
    -- no plan, or nothing that a plan is about: nobody is asked
    emit("rc", crater.modify(job({features = "x"}), record({comment = "words"}), {}, 1000))
    emit("rc", crater.modify(job({}), r, {}, 1000))
    emit("rc", crater.modify(job({features = "x"}), record({}), {}, 1000))
    """
    answer = with_answer(("verdict", "reject"), ("message", "the plan needs its node"))
    result = lua_filter.run(lua, scenario + EMIT_SENT, answer)
    assert result.all("rc") == ["-1", "0", "0", "0"]
    assert result["log_user"] == "the plan needs its node"
    assert asked(result) == [
        {
            "op": "modify",
            "uid": "1000",
            "field.comment": "new",
            "field.features": "x",
            "record.comment": "w crater-plan:1.a.b",
            "record.user_id": "1000",
            "record.job_id": "7",
            "record.job_state": "0",
        }
    ]


#: Of what backtracks a mebibyte takes hours, of what does not some tenths of a second; whatever
#: machine this is, and whatever else it does, lies between.
_HOURS_S = 60


@each_lua
@pytest.mark.parametrize("comment", [" ", "crater-plan:", " \t", "crater-plan: "])
def test_no_comment_takes_long_to_read(lua: str, comment: str, lua_filter: Filter) -> None:
    """slurmctld holds its locks meanwhile, so a pattern that backtracks would be an attack."""
    scenario = f"""
    local before = clock()
    local c = string.rep({literal(comment)}, {2**20 // len(comment)})
    crater.submit(job({{comment = c .. "x crater-plan:y" .. c}}), {{}}, 1)
    emit("took", clock() - before)
    """
    assert float(lua_filter.run(lua, scenario, with_answer())["took"]) < _HOURS_S


@each_lua
@pytest.mark.parametrize("line", ["\n", "#\n", " ", "#", "   #\n", "\n#CRATER", "x\n"])
def test_no_script_takes_long_to_read(lua: str, line: str, lua_filter: Filter) -> None:
    scenario = f"""
    local before = clock()
    local s = string.rep({literal(line)}, {2**22 // len(line)}) .. "\\n#CRATER gpus=1"
    crater.submit(job({{script = s}}), {{}}, 1)
    emit("took", clock() - before)
    """
    assert float(lua_filter.run(lua, scenario, with_answer())["took"]) < _HOURS_S


# Settings -------------------------------------------------------------------------------------


@each_lua
@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("return {", "defaults are used"),
        ("this is no Lua", "defaults are used"),
        ("", "it returns no table"),
        ("return 5", "it returns no table"),
        ("nothing.at.all()", "defaults are used: "),
        ("while true do end", "it runs too long"),
        ("os.exit(3)", "defaults are used"),
        ("\x1bLua", "compiled Lua is not accepted"),
        ("-- " + "x" * 70000, "longer than 65536 bytes"),
        ("return {deadline = 5}", "unknown setting deadline; valid are ask, breaker_seconds"),
        ("return {deadline_ms = 'soon'}", "deadline_ms must be a number from 1 to 2000"),
        ("return {deadline_ms = 60000}", "deadline_ms must be a number from 1 to 2000"),
        ("return {deadline_ms = 0/0}", "deadline_ms must be a number"),
        ("return {socket = 'relative'}", "socket must be an absolute path"),
        ("return {unavailable = 'maybe'}", 'unavailable must be "accept" or "reject"'),
    ],
)
def test_a_wrong_settings_file_costs_a_line_and_no_job(
    lua: str, source: str, problem: str, lua_filter: Filter
) -> None:
    lua_filter.conf.write_text(source)
    scenario = 'emit("rc", crater.submit(job({script = "x", comment = "y"}), {}, 1))'
    result = lua_filter.run(lua, scenario)
    assert result["rc"] == "0"
    assert problem in result["log_error"]


@each_lua
def test_a_good_setting_beside_a_wrong_one_counts(lua: str, lua_filter: Filter) -> None:
    lua_filter.conf.write_text("return {ask = 'always', deadline_ms = 'x'}")
    scenario = 'crater.submit(job({script = "x"}), {}, 1)' + EMIT_SENT
    assert len(asked(lua_filter.run(lua, scenario, with_answer(ACCEPTED)))) == 1


@each_lua
def test_a_missing_settings_file_means_the_defaults(lua: str, lua_filter: Filter) -> None:
    lua_filter.conf.unlink()
    scenario = """
    crater.submit(job({script = "x"}), {}, 1)
    for key, value in pairs(CRATER_FILTER.config.settings) do emit(key, value) end
    """
    result = lua_filter.run(lua, scenario)
    assert dict(result.pairs) == {
        "socket": "/run/crater/filter.sock",
        "deadline_ms": "100",
        "breaker_seconds": "30",
        "unavailable": "accept",
        "off_switch": "/etc/crater/off",
        "ask": "directives",
    }


@each_lua
def test_settings_are_read_again_when_they_change(lua: str, lua_filter: Filter) -> None:
    scenario = f"""
    local now = 1000000
    os.time = function() return now end
    local function go() crater.submit(job({{script = "x"}}), {{}}, 1) end
    local function ask(whom)
      local file = io.open({literal(str(lua_filter.conf))}, "w")
      file:write("return {{ask = '" .. whom .. "', off_switch = '{lua_filter.off}'}}")
      file:close()
    end
    go()
    ask("always")
    go() -- not looked at yet
    now = now + 10
    go()
    ask("directives")
    now = now - 100000 -- the wall clock is set back
    go()
    """
    result = lua_filter.run(lua, scenario + EMIT_SENT, with_answer(ACCEPTED, times=4))
    assert len(asked(result)) == 1


def test_the_sample_settings_are_the_defaults(lua_filter: Filter) -> None:
    sample = (ROOT / "etc" / "filter.lua").read_text()
    lua_filter.conf.write_text(re.sub(r"^  -- (\w+ = .*,)$", r"\1", sample, flags=re.MULTILINE))
    scenario = """
    local config = dofile(parts .. "config.lua")
    local file = io.open(os.getenv("CRATER_FILTER_CONF"))
    local settings, problems = config.parse(file:read("*a"), "sample")
    emit("problems", #problems)
    for key in pairs(config.DEFAULTS) do emit("same", settings[key] == config.DEFAULTS[key]) end
    """
    result = lua_filter.run(LUAS[0], scenario)
    assert result["problems"] == "0"
    assert result.all("same") == ["true"] * 6
    active = re.findall(r"^(\w+) = ", lua_filter.conf.read_text(), flags=re.MULTILINE)
    assert len(active) == 6


# Loading --------------------------------------------------------------------------------------


@each_lua
def test_an_error_of_our_own_accepts_the_job(lua: str, lua_filter: Filter) -> None:
    scenario = """
    emit("rc", crater.submit(nil, nil, nil))
    emit("rc", crater.modify(nil, nil, nil, nil))
    emit("rc", crater.submit(job({comment = "x crater-plan:y"}, {refuse = "comment"}), {}, 1))
    """
    result = lua_filter.run(lua, scenario)
    assert result.all("rc") == ["0", "0", "0"]
    assert all("the job goes on unchanged" in line for line in result.all("log_error"))


@each_lua
def test_only_one_global_appears(lua: str, lua_filter: Filter) -> None:
    scenario = (
        SUBMIT
        + """
    for name in pairs(_G) do if not BEFORE[name] then emit("global", name) end end
    """
    )
    prelude = "BEFORE = {BEFORE = true} for name in pairs(_G) do BEFORE[name] = true end\n"
    prelude += "BEFORE.crater = true BEFORE.prelude = true\n" + "".join(WITHOUT.values())
    assert lua_filter.run(lua, scenario, prelude).all("global") == ["CRATER_FILTER"]


@each_lua
def test_the_breaker_outlives_a_second_dofile(lua: str, lua_filter: Filter) -> None:
    scenario = f"""
    crater.submit(job({{comment = "crater"}}), {{}}, 1)
    dofile({literal(str(CRATER))}).submit(job({{comment = "crater"}}), {{}}, 1)
    emit("asked", #CRATER_FILTER.driver.sent)
    """
    assert lua_filter.run(lua, scenario, with_answer(times=0))["asked"] == "1"


STANDALONE = ROOT / "job_submit" / "job_submit.lua"


@each_lua
@pytest.mark.parametrize(
    "crater",
    ["missing", "return {", "error('x')", "return nil", "return 7", "return {submit = 1}"],
)
def test_a_missing_or_broken_filter_never_stops_slurmctld(
    lua: str, crater: str, lua_filter: Filter, tmp_path: Path
) -> None:
    """Loading must succeed (or slurmctld won't start) and both hooks must accept."""
    path = tmp_path / "crater.lua"
    if crater != "missing":
        path.write_text(crater)
    scenario = f"""
    os.getenv = function(name) return name == "CRATER_LUA" and {literal(str(path))} or nil end
    emit("load", dofile({literal(str(STANDALONE))}))
    local j = job({{script = "#CRATER gpus=1"}})
    emit("rc", slurm_job_submit(j, {{}}, 1))
    emit("rc", slurm_job_modify(j, record({{}}), {{}}, 1))
    """
    result = lua_filter.run(lua, scenario)
    assert result["load"] == "0"
    assert result.all("rc") == ["0", "0"]
    assert "jobs pass without it" in result["log_error"]


@each_lua
def test_the_standalone_script_finds_the_filter_beside_it(lua: str, lua_filter: Filter) -> None:
    if Path("/usr/lib/crater/job_submit/crater.lua").exists():
        pytest.skip("an installed filter comes first")
    scenario = (
        f"""
    emit("load", dofile({literal(str(STANDALONE))}))
    emit("rc", slurm_job_submit(job({{comment = "crater"}}), {{}}, 1))
    """
        + EMIT_SENT
    )
    result = lua_filter.run(lua, scenario, with_answer(ACCEPTED))
    assert (result["load"], result["rc"]) == ("0", "0")
    assert len(asked(result)) == 1


@each_lua
def test_a_repaired_filter_is_picked_up(lua: str, lua_filter: Filter, tmp_path: Path) -> None:
    path = tmp_path / "crater.lua"
    scenario = f"""
    local now, getenv = 1000000, os.getenv
    os.time = function() return now end
    os.getenv = function(n) return n == "CRATER_LUA" and {literal(str(path))} or getenv(n) end
    dofile({literal(str(STANDALONE))})
    local file = io.open({literal(str(path))}, "w")
    file:write("return {{submit = function() return -1 end, modify = function() return -1 end}}")
    file:close()
    emit("rc", slurm_job_submit(job({{}}), {{}}, 1))
    now = now + 31
    emit("rc", slurm_job_submit(job({{}}), {{}}, 1))
    """
    assert lua_filter.run(lua, scenario).all("rc") == ["0", "-1"]


def documented_scripts() -> list[str]:
    """The Lua examples of docs/filter.md that define the two hooks."""
    text = (ROOT / "docs" / "filter.md").read_text()
    blocks = re.findall(r"```lua\n(.*?)```", text, flags=re.DOTALL)
    return [block for block in blocks if "slurm_job_submit" in block]


@each_lua
@pytest.mark.parametrize("number", range(2))
@pytest.mark.parametrize("installed", [True, False])
def test_the_documented_ways_to_chain_work(
    lua: str, number: int, installed: bool, lua_filter: Filter, tmp_path: Path
) -> None:
    script = documented_scripts()[number]
    crater = CRATER if installed else tmp_path / "absent.lua"
    site = tmp_path / "site.lua"
    site.write_text(
        "function slurm_job_submit(j) if j.qos == 'no' then return slurm.ERROR end "
        "return slurm.SUCCESS end\n"
        "function slurm_job_modify() return slurm.SUCCESS end\n"
    )
    script = script.replace("/usr/lib/crater/job_submit/crater.lua", str(crater))
    script = script.replace("/etc/slurm/site_job_submit.lua", str(site))
    path = tmp_path / "job_submit.lua"
    path.write_text(script)
    scenario = (
        f"""
    emit("load", dofile({literal(str(path))}))
    emit("rc", slurm_job_submit(job({{comment = "crater"}}), {{}}, 1))
    emit("rc", slurm_job_modify(job({{}}), record({{}}), {{}}, 1))
    emit("site", slurm_job_submit(job({{comment = "crater", qos = "no"}}), {{}}, 1))
    """
        + EMIT_SENT
    )
    result = lua_filter.run(lua, scenario, with_answer(("verdict", "reject")))
    assert result["load"] == "0"
    assert result.all("rc") == (["-1", "0"] if installed else ["0", "0"])
    assert result["site"] == "-1", "the site's own rule still counts"
    assert len(asked(result)) == (1 if installed else 0)


def listed(lua_filter: Filter, expression: str) -> list[str]:
    """Names in a table of fields.lua or config.lua."""
    scenario = f"""
    local config, fields = dofile(parts .. "config.lua"), dofile(parts .. "fields.lua")
    for key, value in pairs({expression}) do
      emit("name", type(key) == "number" and value or key)
    end
    """
    return lua_filter.run(LUAS[0], scenario).all("name")


def test_the_documentation_names_everything(lua_filter: Filter) -> None:
    text = (ROOT / "docs" / "filter.md").read_text()
    names = {
        expression: listed(lua_filter, expression)
        for expression in (
            "config.DEFAULTS",
            "fields.SETTABLE",
            "fields.FLAGS",
            "fields.ENVIRONMENT",
        )
    }
    assert all(names.values())
    assert [n for group in names.values() for n in group if f"`{n}`" not in text] == []


def test_the_protocol_and_the_filter_send_the_same_fields(lua_filter: Filter) -> None:
    text = (ROOT / "docs" / "protocols.md").read_text()
    sentence = re.search(r"job_desc field NAME as text: ([\w, ]+) \|", text)
    record = re.search(r"the job's present value \(([\w, ]+)\)", text)
    assert sentence and record
    assert listed(lua_filter, "fields.SENT") == sentence.group(1).split(", ")
    assert listed(lua_filter, "fields.RECORD") == record.group(1).split(", ")


def test_the_filter_takes_all_that_the_scheduler_sets(lua_filter: Filter) -> None:
    """One unknown name would make the filter drop the whole answer."""
    sources = [
        file.read_text()
        for folder in ("scheduler", "slurm")
        for file in (ROOT / "crater_slurm" / folder).glob("*.py")
    ]
    used = {name for text in sources for name in re.findall(r'fields\["(\w+)"\] =', text)}
    flags = {name for text in sources for name in re.findall(r'flags\.append\("(\w+)"\)', text)}
    assert used and flags
    assert used <= set(listed(lua_filter, "fields.SETTABLE"))
    assert flags <= set(listed(lua_filter, "fields.FLAGS"))


@each_lua
def test_every_file_compiles(lua: str) -> None:
    compiler = lua.replace("lua", "luac")
    if not shutil.which(compiler):
        pytest.skip(f"no {compiler}")
    files = [*sorted((ROOT / "job_submit").rglob("*.lua")), ROOT / "etc" / "filter.lua"]
    assert len(files) == 9
    for file in files:
        subprocess.run([compiler, "-p", str(file)], check=True)


def test_luacheck_finds_nothing() -> None:
    if not shutil.which("luacheck"):
        pytest.skip("no luacheck")
    done = subprocess.run(
        ["luacheck", "--no-color", "-q", "job_submit", "etc/filter.lua"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
