"""The lab itself: that it is a real cluster, that it leaves nothing, that it says what is wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from crater_slurm.cli.lab import lab as lab_command
from crater_slurm.errors import LabError
from crater_slurm.lab import Lab, cgroups, inventory
from crater_slurm.slurm import gres

PLACES = ("/crater-cache", "/etc/crater", "/run/crater", "/var/lib/crater", "/crater-lab")


@pytest.fixture(scope="module")
def hooked(lab_factory: Any) -> Lab:
    """The demo cluster with crater's filter and hooks, and none of its daemons to answer them."""
    return lab_factory(daemons=())


def traces(lab: Lab) -> dict[str, Any]:
    """What this lab could leave on the machine; other tests may run labs beside it."""
    name = lab.spec.name
    return {
        "mounts": [m for m in Path("/proc/self/mountinfo").read_text().splitlines() if name in m],
        "places": [place for place in PLACES if Path(place).exists()],
        "users": Path("/etc/passwd").read_bytes() + Path("/etc/group").read_bytes(),
        "cgroups": sorted(map(str, Path("/sys/fs/cgroup").glob(f"**/crater-lab-{name}"))),
        "memory": [str(p) for p in (Path("/dev/shm") / name, Path("/tmp") / name) if p.exists()],
        "folder": lab.folders.base.exists(),
    }


def living(pids: list[int]) -> list[int]:
    def lives(pid: int) -> bool:
        try:
            return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return False

    return [pid for pid in pids if lives(pid)]


@pytest.mark.parametrize("constrained", [False, True], ids=["plain", "cgroup"])
def test_a_lab_goes_without_a_trace(fresh_lab: Any, labs_folder: Path, constrained: bool) -> None:
    if constrained and (why := cgroups.refusal()):
        pytest.skip(why)
    lab = fresh_lab(start=False, inventory="a100-pcie", crater=False, cgroup=constrained)
    before = traces(lab)
    lab.up()
    if constrained:
        assert traces(lab)["cgroups"]
    name = lab.spec.name
    job = lab.sbatch("--exclusive", wrap=f"touch /dev/shm/{name} /tmp/{name}; sleep 100")
    lab.wait_job(job, ["RUNNING"])
    pids = list(lab.namespaces.processes().values())
    assert len(pids) > 6  # pid 1, munged, slurmctld, two slurmd, the job
    assert len(living(pids)) > 6
    lab.down()
    assert living(pids) == []
    assert traces(lab) == before


def test_a_lab_whose_starter_was_killed_can_be_replaced(fresh_lab: Any) -> None:
    lab = fresh_lab(inventory="cpu", crater=False)
    pids = list(lab.namespaces.processes().values())
    os.kill(lab.runtime.pid("unshare"), signal.SIGKILL)
    deadline = time.monotonic() + 5
    while living(pids) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert living(pids) == []
    assert not lab.is_up
    with pytest.raises(LabError, match=f"crater lab up {lab.spec.name}"):
        lab.run(["sinfo"])
    assert lab.up().node_states() == {"c1": "idle", "c2": "idle"}


def test_two_labs_do_not_meet(fresh_lab: Any) -> None:
    one = fresh_lab(inventory="a100-pcie", crater=False)
    two = fresh_lab(inventory="cpu", crater=False)
    assert one.node_states() == {"a1": "idle", "a2": "idle"}
    assert two.node_states() == {"c1": "idle", "c2": "idle"}
    first, second = (
        one.sbatch(wrap="hostname > /tmp/where"),
        two.sbatch(wrap="hostname > /tmp/where"),
    )
    assert (first, second) == (1, 1)
    one.wait_job(first, ["COMPLETED"])
    two.wait_job(second, ["COMPLETED"])
    assert one.run(["cat", "/tmp/where"]).stdout == "a1\n"
    assert two.run(["cat", "/tmp/where"]).stdout == "c1\n"
    one.down()
    assert two.node_states() == {"c1": "idle", "c2": "idle"}


def test_a_name_can_be_up_only_once(fresh_lab: Any) -> None:
    lab = fresh_lab(inventory="cpu", crater=False)
    with pytest.raises(LabError, match="is up already"):
        Lab(lab.spec).up()
    assert lab.is_up


@pytest.mark.parametrize("name", sorted(inventory.shipped()))
def test_nodes_register_as_their_profiles_say(fresh_lab: Any, name: str) -> None:
    lab = fresh_lab(inventory=name, crater=False)
    for entry in lab.nodes.entries:
        profile = entry.profile
        domains = len(profile.numa_nodes)
        for node in entry.names:
            record = lab.node(node)
            assert record["State"] == "IDLE"
            assert int(record["Sockets"]) == domains
            assert int(record["Sockets"]) * int(record["CoresPerSocket"]) == profile.cpu.cores
            assert int(record["ThreadsPerCore"]) == profile.cpu.threads_per_core
            assert int(record["RealMemory"]) == profile.memory_mib
            counts = gres.totals(record["Gres"])
            assert counts.get("gpu", 0) == len(profile.gpus)
            assert (
                counts["membw"]
                == sum(round(n.memory_bandwidth_gb_s * 10) for n in profile.numa_nodes) // 10
            )
            assert counts["nviops"] == sum(drive.random_read_iops for drive in profile.nvmes)
            assert counts["nvme"] == profile.cache_gb


def test_gpus_come_with_the_cores_beside_them(fresh_lab: Any) -> None:
    lab = fresh_lab(inventory="demo", crater=False)
    # Two jobs of four GPUs: whoever gets GPUs 0-3 gets cores of socket 0, 16 cores each.
    places = {}
    for _ in range(2):
        job = lab.sbatch(
            *("-w", "a1", "-n1", "-c8", "--gres=gpu:a100:4", "--gres-flags=enforce-binding"),
            wrap="echo $SLURM_JOB_GPUS; sleep 100",
        )
        record = lab.wait_job(job, ["RUNNING"])
        output = lab.home() / f"slurm-{job}.out"
        deadline = time.monotonic() + 10
        while not output.exists() or not output.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        places[output.read_text().strip()] = record["CPU_IDs"]
    assert places == {"0,1,2,3": "0-7", "4,5,6,7": "16-23"}
    # Cores of NUMA nodes 1, 3, 5 and 7 of the NPS4 node hold its GPUs.
    assert "(S:1,3,5,7)" in lab.node("e1")["Gres"]


def test_jobs_run_as_lab_users_on_their_node(hooked: Lab) -> None:
    script = "#!/bin/bash\nid -un\nhostname\necho $CUDA_VISIBLE_DEVICES\npwd\nsrun -n1 hostname\n"
    job = hooked.sbatch("-w", "h1", "-n1", "--gres=gpu:h100:1", script=script, user="bob")
    hooked.wait_job(job, ["COMPLETED"])
    text = (hooked.home("bob") / f"slurm-{job}.out").read_text()
    assert text == "bob\nh1\n0\n/crater-lab/home/bob\nh1\n"


def test_each_node_has_its_own_folders(hooked: Lab) -> None:
    for node in ("a1", "a2"):
        hooked.node_run(node, ["touch", "/crater-cache/x", f"/run/crater/{node}"], check=True)
        hooked.node_run(node, ["mountpoint", "-q", "/crater-cache"], check=True)
    assert "a1" in hooked.node_run("a1", ["ls", "/run/crater"]).stdout.split()
    assert "a1" not in hooked.node_run("a2", ["ls", "/run/crater"]).stdout.split()
    assert '"a2"' in hooked.node_run("a2", ["cat", "/var/lib/crater/profile.json"]).stdout
    assert hooked.run(["cat", "/etc/crater/plan.key"], user="alice").returncode != 0
    key = hooked.run(["cat", "/etc/crater/plan.key"], user="root").stdout.strip()
    assert len(bytes.fromhex(key)) == 32


def test_crater_runs_beside_slurm(lab: Lab) -> None:
    running = set(lab.supervisor.running())
    assert {"scheduler", *(f"node@{name}" for name in lab.nodes.names)} <= running
    job = lab.sbatch("-n1", script="#!/bin/sh\n#CRATER gpus=1\necho $CUDA_VISIBLE_DEVICES\n")
    lab.wait_job(job, ["COMPLETED"])
    assert (lab.home() / f"slurm-{job}.out").read_text() == "0\n"


def test_services_can_be_killed_and_started_again(fresh_lab: Any) -> None:
    lab = fresh_lab(inventory="cpu", crater=False)
    job = lab.sbatch(wrap="sleep 100")
    lab.wait_job(job, ["RUNNING"])
    lab.restart_slurmctld()  # which saves its state, as a crash would not
    lab.kill("slurmctld")
    assert "slurmctld" not in lab.supervisor.running()
    lab.start("slurmctld")
    assert lab.wait_job(job, ["RUNNING"])["NodeList"] == "c1"
    lab.stop(("slurmd", "c2"))
    assert sorted(lab.supervisor.running()) == ["munged", "slurmctld", "slurmd@c1"]
    lab.start("slurmd@c2")
    lab.signal(("slurmd", "c2"), signal.SIGSTOP)
    pid = lab.supervisor.pid("slurmd@c2")
    end = time.monotonic() + 10
    while ") T" not in Path(f"/proc/{pid}/stat").read_text():
        assert time.monotonic() < end, "a busy machine takes its time to stop a process"
        time.sleep(0.05)
    with pytest.raises(LabError, match=r"did you mean slurmd@c[12]"):
        lab.signal("slurmd@c3", signal.SIGHUP)


def test_a_command_ends_with_its_time(fresh_lab: Any) -> None:
    lab = fresh_lab(inventory="cpu", crater=False)
    with pytest.raises(LabError, match=r"sleep did not end within 0\.2 s"):
        lab.run(["sleep", "987"], timeout=0.2)
    time.sleep(0.2)
    assert "sleep\x00987" not in "".join(
        Path(f"/proc/{pid}/cmdline").read_text() for pid in lab.namespaces.processes().values()
    )


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ({"SelectType": "select/nonsense"}, "slurmctld ended at its start:.*select/nonsense"),
        ({"NoSuchOption": "1"}, "slurmctld ended at its start:.*NoSuchOption"),
    ],
)
def test_a_broken_slurm_conf_is_told(fresh_lab: Any, lines: dict[str, str], sentence: str) -> None:
    lab = fresh_lab(start=False, inventory="cpu", crater=False, slurm_conf=lines)
    with pytest.raises(LabError, match=f"(?s){sentence}"):
        lab.up()
    assert not lab.folders.base.exists()


@pytest.mark.parametrize(("nodes", "cloud"), [(10_000, False), (1_000, True)])
def test_many_nodes_without_slurmd(fresh_lab: Any, tmp_path: Path, nodes: int, cloud: bool) -> None:
    file = tmp_path / "many.yaml"
    file.write_text(f"nodes: [{{name: 'c[1-{nodes}]', profile: a100-pcie-40gb}}]\n")
    lab = fresh_lab(inventory=str(file), crater=False, controller_only=True, cloud=cloud)
    count = lab.run(["sinfo", "--noheader", "--format=%D"], check=True).stdout.split()
    assert sum(map(int, count)) == nodes
    job = lab.sbatch("--gres=gpu:2", "-n1", "-c4")
    if cloud:  # allocated to a node that never comes
        assert lab.wait_job(job, ["CONFIGURING"])["NodeList"].startswith("c")
    else:
        assert lab.wait_job(job, ["PENDING"])["NodeList"] in ("", "(null)")


def test_devices_are_denied_under_cgroup(fresh_lab: Any) -> None:
    if why := cgroups.refusal():
        pytest.skip(why)
    lab = fresh_lab(inventory="l4", crater=False, cgroup=True)
    # No driver answers: an allowed device says ENXIO, a denied one EPERM.
    script = "#!/bin/bash\nfor i in 0 1; do cat /crater-lab/dev/nvidia$i; done\n"
    job = lab.sbatch("-n1", "--gres=gpu:1", script=script)
    lab.wait_job(job)
    text = (lab.home() / f"slurm-{job}.out").read_text()
    assert "nvidia0: No such device" in text
    assert "nvidia1: Operation not permitted" in text


def test_without_root_it_says_so(labs_folder: Path) -> None:
    code = (
        "import os; os.setuid(65534)\n"
        "from crater_slurm.lab import Lab\n"
        "try: Lab(name='x').up()\n"
        "except Exception as e: print(type(e).__name__, e)\n"
    )
    # Imported as root, because a checkout may lie in a folder that only root can read.
    code = "import crater_slurm.lab.lab\n" + code
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("LabError a lab makes namespaces")


def test_the_command_line(
    fresh_lab: Any, labs_folder: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    lab = fresh_lab(start=False, crater=False)
    name = lab.spec.name
    runner = CliRunner()
    arguments = ["up", name, "--inventory", "cpu", "--no-crater"]
    if lab.spec.slurm:
        arguments += ["--slurm", lab.spec.slurm]
    done = runner.invoke(lab_command, arguments, catch_exceptions=False)
    assert f"lab {name}: Slurm" in done.output
    status = runner.invoke(lab_command, ["status"], catch_exceptions=False).output
    assert "nodes idle: c[1-2]" in status
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/sh\nhostname\n")
    monkeypatch.chdir(tmp_path)
    words = ["exec", name, "--user", "bob", "--", "sbatch", "--wait", "-o", "out", "job.sh"]
    assert runner.invoke(lab_command, words).exit_code == 0
    assert (lab.home("bob") / "out").read_text() == "c1\n"
    log = runner.invoke(lab_command, ["logs", name, "c1"], catch_exceptions=False).output
    assert "slurmd started" in log
    done = runner.invoke(lab_command, ["down", name], catch_exceptions=False)
    assert done.output == f"lab {name}: down\n"
    assert isinstance(runner.invoke(lab_command, ["down", name]).exception, LabError)
