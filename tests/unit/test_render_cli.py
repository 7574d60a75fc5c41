"""``crater render`` as an admin sees it: text, files, checks, exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result
from render_samples import gpu, numa, profile

from crater_slurm.cli.main import crater
from crater_slurm.errors import CraterError, SlurmError, UsageError
from crater_slurm.model.profile import Cpu, NodeProfile
from crater_slurm.store.codec import profile_to_dict
from crater_slurm.store.repository import Store

Run = Callable[..., Result]


def nps2(name: str) -> NodeProfile:
    nodes = [numa(i, f"{4 * i}-{4 * i + 3}", i // 2) for i in range(4)]
    gpus = (gpu(0, 1, memory_mib=40960, model="a100"), gpu(1, 3, memory_mib=40960, model="a100"))
    cpu = Cpu(sockets=2, cores_per_socket=8)
    return replace(profile(*nodes, cpu=cpu, gpus=gpus, memory_mib=64000), name=name)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs ``crater`` with a store of g1 and g2 and Slurm commands in ``bin``."""
    store = f"sqlite:///{tmp_path}/crater.db"
    settings = {"store": {"url": store}, "slurm": {"bin_dir": str(tmp_path / "bin")}}
    (tmp_path / "crater.yaml").write_text(yaml.safe_dump(settings))
    (tmp_path / "bin").mkdir()
    Store.open(store, create=True).save_profiles([nps2("g1"), nps2("g2")])
    monkeypatch.delenv("SLURM_CONF", raising=False)

    def invoke(*words: object) -> Result:
        command = ["--config", str(tmp_path / "crater.yaml"), "render", *map(str, words)]
        return CliRunner().invoke(crater, command)

    return invoke


def program(folder: Path, name: str, script: str) -> None:
    file = folder / "bin" / name
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)


def fails(done: Result, kind: type[CraterError], sentence: str) -> None:
    assert done.exit_code == kind.exit_code, done.output
    assert done.stderr.startswith("crater: ERROR: ")
    assert sentence in done.stderr
    assert done.stdout == ""


LINE = "NodeName=g[1-2] Sockets=4 CoresPerSocket=4 ThreadsPerCore=1 RealMemory=63488 "


def test_node_lines_alone(run: Run) -> None:
    done = run("node-line", "--slurm", "24.11")
    assert done.stdout == LINE + "Gres=gpu:a100:2 Feature=gpu_a100 Weight=3\n"
    assert done.stderr.startswith("note: g[1-2]: SlurmdParameters=numa_node_as_socket")


def test_only_some_nodes_and_neither_features_nor_weights(run: Run) -> None:
    bare = ("--no-features", "--no-weights")
    done = run("node-line", "--slurm", "24.11", "--node", "g[2]", *bare)
    assert done.stdout == LINE.replace("g[1-2]", "g2") + "Gres=gpu:a100:2\n"


def test_shards_only_when_asked(run: Run) -> None:
    assert "shard" not in run("gres.conf", "--slurm", "24.11").stdout
    text = run("gres.conf", "--slurm", "24.11", "--shards", "--shard-reserve", "2").stdout
    assert "NodeName=g[1-2] Name=shard Count=30 File=/dev/nvidia1" in text.splitlines()


@pytest.mark.parametrize("what", ["slurm.conf", "gres.conf", "node-line"])
def test_what_a_card_loses_is_told_beside_the_text(run: Run, what: str) -> None:
    told = run(what, "--slurm", "24.11", "--shards").stderr.splitlines()
    assert told[-1] == (
        "note: Shards of a100: 40960 MiB = 32 slices of 1280 MiB, 1 kept back (1280 MiB, 3.1 %), "
        "31 usable; 0 MiB, 0.0 % lost to rounding"
    )
    assert "Shards" not in run(what, "--slurm", "24.11").stderr


def test_shards_are_cut_as_the_settings_say(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CRATER_SHARING__RESERVE", "4")
    text = run("gres.conf", "--slurm", "24.11", "--shards").stdout
    assert "NodeName=g[1-2] Name=shard Count=28 File=/dev/nvidia1" in text.splitlines()
    text = run("gres.conf", "--slurm", "24.11", "--shards", "--shard-reserve", "0").stdout
    assert "NodeName=g[1-2] Name=shard Count=32 File=/dev/nvidia1" in text.splitlines()


def test_the_release_is_asked_of_slurm(run: Run, tmp_path: Path) -> None:
    program(tmp_path, "sinfo", "echo slurm-wlm 26.05.5")
    assert run("slurm.conf").stdout.startswith("# crater-slurm: what Slurm 26.05 needs")
    program(tmp_path, "sinfo", "echo no configuration >&2; exit 1")
    fails(run("slurm.conf"), SlurmError, "--slurm names the release without asking")
    for wrong in ("21.08", "new"):
        fails(run("slurm.conf", "--slurm", wrong), UsageError, "22.05 and later")


def test_a_file_is_written_whole_and_never_over_another(run: Run, tmp_path: Path) -> None:
    target = tmp_path / "cgroup.conf"
    words = ("cgroup.conf", "--slurm", "24.11", "-o", target)
    assert run(*words).stdout == ""
    text = target.read_text()
    assert "ConstrainDevices=yes" in text
    assert target.stat().st_mode & 0o777 == 0o644
    target.write_text("mine\n")
    fails(run(*words), UsageError, "is there already; --force replaces it")
    assert target.read_text() == "mine\n"
    assert run(*words, "--force").exit_code == 0
    assert target.read_text() == text
    missing = tmp_path / "missing" / "cgroup.conf"
    fails(run(*words[:4], missing), CraterError, "No such file or directory")
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith("tmp")] == []


def test_profiles_may_come_from_a_file(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "profiles.yaml"
    file.write_text(yaml.safe_dump({"nodes": [profile_to_dict(nps2("x7"))]}))
    done = run("node-line", "--file", file, "--slurm", "24.11")
    assert done.stdout.startswith("NodeName=x7 Sockets=4")
    nameless = profile_to_dict(nps2("x7"))
    del nameless["name"]
    file.write_text(yaml.safe_dump(nameless))
    done = run("node-line", "--file", file, "--slurm", "24.11", "--node", "x[8-9]")
    assert done.stdout.startswith("NodeName=x[8-9] Sockets=4")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((), "say what to render: slurm.conf, gres.conf, cgroup.conf, node-line"),
        (("gres.conf", "--node", "g3"), "no profile of node g3; there are g[1-2]"),
        (("gres.conf", "--json"), "--json belongs to --check"),
        (("gres.conf", "--slurmd"), "--slurmd belongs to --check"),
        (("gres.conf", "--conf", "x"), "--conf belongs to --check"),
        (("--check", "-o", "x"), "--check compares and writes nothing"),
    ],
)
def test_what_makes_no_sense_is_refused(run: Run, words: tuple[str, ...], sentence: str) -> None:
    fails(run(*words, "--slurm", "24.11"), UsageError, sentence)


def test_a_node_with_mig_is_refused_and_left_out_of_a_check(run: Run, tmp_path: Path) -> None:
    made = nps2("m1")
    mig = replace(made, gpus=(replace(made.gpus[0], mig_instances=("1g.5gb",)), made.gpus[1]))
    Store.open(f"sqlite:///{tmp_path}/crater.db").save_profile(mig)
    fails(run("gres.conf", "--slurm", "24.11"), UsageError, "m1: GPU 0 is cut into MIG instances")
    assert run("gres.conf", "--slurm", "24.11", "--node", "g1").exit_code == 0
    conf = written(run, tmp_path, "--node", "g[1-2]")
    done = run("--check", "--slurm", "24.11", "--conf", conf)
    assert done.exit_code == 0
    assert "note: not compared: m1: GPU 0 is cut into MIG" in done.stdout


# --- --check


def written(run: Run, folder: Path, *options: str) -> Path:
    """The rendered files, as if they were live."""
    for name in ("slurm.conf", "gres.conf", "cgroup.conf"):
        assert run(name, "--slurm", "24.11", "-o", folder / name, *options).exit_code == 0
    return folder / "slurm.conf"


def test_a_check_is_quiet_when_all_is_as_rendered(run: Run, tmp_path: Path) -> None:
    conf = written(run, tmp_path)
    done = run("--check", "--slurm", "24.11", "--conf", conf)
    assert (done.exit_code, done.stdout) == (
        0,
        f"2 nodes compared with {conf}: no difference\n",
    )


def test_a_difference_is_a_line_and_exit_status_1(run: Run, tmp_path: Path) -> None:
    conf = written(run, tmp_path)
    conf.write_text(conf.read_text().replace("gpu:a100:2", "gpu:a100:1") + "NodeName=z[1-2]\n")
    (tmp_path / "cgroup.conf").unlink()
    done = run("--check", "--slurm", "24.11", "--conf", conf)
    assert done.exit_code == 1
    assert done.stdout.splitlines() == [
        "g[1-2]: slurm.conf: Gres gpu is gpu:a100:1, by the profile gpu:a100:2: 1 of 2 are no job's",
        *(
            f"all nodes: cgroup.conf: {key} is no, by the profile yes: {meaning}"
            for key, meaning in (
                ("ConstrainCores", "jobs can run on cores that are not theirs"),
                ("ConstrainDevices", "jobs can open GPUs that are not theirs"),
                ("ConstrainRAMSpace", "jobs can use more memory than they asked for"),
            )
        ),
        "note: without a profile, so not compared: z[1-2]",
        f"note: there is no {tmp_path}/cgroup.conf",
        f"2 nodes compared with {conf}: 4 differences",
    ]
    assert run("--check", "gres.conf", "--slurm", "24.11", "--conf", conf).exit_code == 0
    assert run("--check", "node-line", "--slurm", "24.11", "--conf", conf).exit_code == 1


def test_a_check_for_programs(run: Run, tmp_path: Path) -> None:
    conf = written(run, tmp_path)
    conf.write_text(conf.read_text().replace("GresTypes=gpu", "GresTypes=none"))
    done = run("--check", "slurm.conf", "--slurm", "24.11", "--conf", conf, "--json")
    assert done.exit_code == 1
    assert json.loads(done.stdout) == {
        "conf": str(conf),
        "nodes": 2,
        "differences": [
            {
                "nodes": "",
                "file": "slurm.conf",
                "key": "GresTypes",
                "live": "none",
                "profile": "gpu",
                "meaning": "slurmctld refuses gpu on every node",
            }
        ],
        "notes": [],
    }


def test_the_live_file_is_the_one_that_slurm_names(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conf = written(run, tmp_path)
    program(tmp_path, "sinfo", "echo slurm 24.11.5")
    program(tmp_path, "scontrol", f"echo 'SLURM_CONF               = {conf}'")
    assert run("--check").stdout == f"2 nodes compared with {conf}: no difference\n"
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "other.conf"))
    fails(run("--check"), SlurmError, "other.conf: No such file")
    monkeypatch.delenv("SLURM_CONF")
    program(tmp_path, "scontrol", "echo nothing")
    fails(run("--check"), SlurmError, "names no SLURM_CONF")


@pytest.mark.parametrize(
    ("release", "sockets"), [("24.11", "SocketsPerBoard=2 CoresPerSocket=8"), ("26.05", None)]
)
def test_what_slurmd_finds_on_this_node(
    run: Run, tmp_path: Path, release: str, sockets: str | None
) -> None:
    """Before 25.11 slurmd -C counts packages, whatever slurm.conf says."""
    conf = written(run, tmp_path)
    # Stands in for a slurmd that knows --parameters.
    script = 'case "$1" in --parameters=numa_node_as_socket) s="4 4";; *) s="2 8";; esac; set -- $s'
    line = "NodeName=g1 CPUs=16 Boards=1 SocketsPerBoard=$1 CoresPerSocket=$2 ThreadsPerCore=1"
    program(tmp_path, "slurmd", f'{script}\necho "{line} RealMemory=64000"\necho UpTime=1')
    words = ("--check", "--slurm", release, "--conf", conf, "--slurmd")
    assert run(*words).exit_code == 0
    program(tmp_path, "slurmd", f'{script}\necho "{line} RealMemory=60000"')
    done = run(*words)
    assert done.exit_code == 1
    assert done.stdout.startswith("g1: slurmd -C: RealMemory is 60000, by the profile 63488")
    program(tmp_path, "slurmd", "echo NodeName=other CPUs=1")
    fails(run(*words), UsageError, "slurmd calls this node other, which has no profile")
    program(tmp_path, "slurmd", "echo nothing")
    fails(run(*words), SlurmError, "prints no NodeName line")
    (tmp_path / "bin" / "slurmd").unlink()
    fails(run(*words), SlurmError, "there is no slurmd here")


def test_without_any_profile_it_says_so(run: Run, tmp_path: Path) -> None:
    store = Store.open(f"sqlite:///{tmp_path}/crater.db")
    for name in ("g1", "g2"):
        store.delete_profile(name)
    fails(run("gres.conf", "--slurm", "24.11"), UsageError, "no node has a profile yet")
