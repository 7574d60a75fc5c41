"""What Slurm's commands print, as captured in the formats of 22.05 to 26.05, and their failures."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crater_slurm.errors import CraterError, SlurmError
from crater_slurm.model.cluster import SlurmNode
from crater_slurm.slurm.client import Client, parse_sinfo, parse_version
from crater_slurm.slurm.records import parse_record

SINFO = {
    # 22.05 prints sockets behind GPUs and (null) for nothing.
    "22.05": "\n".join(
        [
            "gpu|idle|a100,nvme|gpu:a100:4(S:0-1),membw:280|1|2:16:2|515000|a[1-2]|none",
            "gpu|drained|(null)|gpu:4(S:0)|1|2:16:2|515000|a3|GPU 3 | is odd",
            "cpu|mixed|(null)|(null)|7|1:64:1|257000|c[1-2]|none",
            "all|idle|a100,nvme|gpu:a100:4(S:0-1),membw:280|1|2:16:2|515000|a[1-2]|none",
        ]
    ),
    # 24.11 marks what a node is about to do behind its state.
    "24.11": "\n".join(
        [
            "gpu|idle~|a100,nvme|gpu:a100:4(S:0-1),membw:280|1|2:16:2|515000|a[1-2]|none",
            "gpu|draining|(null)|gpu:4(S:0)|1|2:16:2|515000|a3|GPU 3 | is odd",
            "cpu|mixed-|(null)|(null)|7|1:64:1|257000|c[1-2]|none",
            "all|idle~|a100,nvme|gpu:a100:4(S:0-1),membw:280|1|2:16:2|515000|a[1-2]|none",
        ]
    ),
    "26.05": "\n".join(
        [
            "gpu|idle|a100,nvme|gpu:a100:4(S:0-1),membw:no_consume:280|1|2:16:2|515000|a[1-2]|none",
            "gpu|down*|(null)|gpu:(null):4(S:0)|1|2:16:2|515000|a3|GPU 3 | is odd",
            "cpu|planned|(null)||7|1:64:1|257000|c[1-2]|none",
            "all|idle|a100,nvme|gpu:a100:4(S:0-1),membw:no_consume:280|1|2:16:2|515000|a[1-2]|none",
            "",
            "a line that is no node",
        ]
    ),
}


@pytest.mark.parametrize("version", SINFO)
def test_nodes_are_the_same_in_every_version_s_words(version: str) -> None:
    found = {n.name: n for n in parse_sinfo(SINFO[version]).nodes}
    assert list(found) == ["a1", "a2", "a3", "c1", "c2"]
    assert found["a1"].partitions == {"gpu", "all"}
    assert found["a1"].features == {"a100", "nvme"}
    assert found["a1"].gres == {"gpu": 4, "membw": 280}
    assert found["a1"].gpu_types == {"a100"}
    assert found["a3"].gpu_types == frozenset()
    assert found["a3"].gres == {"gpu": 4}
    assert found["a3"].features == frozenset()
    assert not found["a3"].usable
    assert found["c2"].gres == {}
    assert found["c2"].usable
    assert {n: found[n].weight for n in found} == {"a1": 1, "a2": 1, "a3": 1, "c1": 7, "c2": 7}
    assert parse_sinfo("gpu|idle|||1+|2:16:2|515000|n[1-2]|none").nodes[0].weight is None
    assert {n: found[n].reason for n in found if found[n].reason} == {"a3": "GPU 3 | is odd"}
    assert (found["a1"].cores, found["a1"].memory_mib) == (32, 515000)
    assert (found["c1"].cores, found["c1"].memory_mib) == (64, 257000)
    differing = parse_sinfo("gpu|idle||||1|2:8+:1|64000+|n[1-2]|none").nodes
    assert all((n.cores, n.memory_mib) == (None, None) for n in differing)


@pytest.mark.parametrize(
    ("state", "usable"),
    [
        ("idle", True),
        ("allocated", True),
        ("mixed", True),
        ("completing", True),
        ("planned", True),
        ("reserved", True),
        ("powered_down", True),  # woken for a job
        ("powering_down", True),
        ("powered_down+drain", False),
        ("idle~", True),
        ("down", False),
        ("down*", False),
        ("drained", False),
        ("draining", False),
        ("fail", False),
        ("failing", False),
        ("maint", False),
        ("future", False),
        ("unknown", False),
        ("inval", False),
        ("no_respond", False),
        ("DOWN+DRAIN", False),
    ],
)
def test_a_state_says_whether_jobs_may_start_there(state: str, usable: bool) -> None:
    assert SlurmNode(name="n", state=state).usable is usable


def test_an_empty_cluster_is_no_error() -> None:
    assert parse_sinfo("").nodes == ()


def test_a_gres_that_can_t_be_read_is_an_error_that_shows_it() -> None:
    with pytest.raises(SlurmError, match="gres that can't be read: 'a:b:c:d'"):
        parse_sinfo("gpu|idle|(null)|a:b:c:d|1|2:16:2|515000|n1|none")


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("slurm-wlm 22.05.8", (22, 5)),
        ("slurm 24.11.5", (24, 11)),
        ("slurm 26.05.0-0rc1", (26, 5)),
        ("", (0, 0)),
        ("slurm next", (0, 0)),
    ],
)
def test_versions_are_year_and_month(text: str, version: tuple[int, int]) -> None:
    assert parse_version(text) == version


JOB = {
    "22.05": "JobId=7 JobName=train me UserId=ada(1000) JobState=PENDING Reason=Resources "
    "Comment=crater-plan:1.abc.def Command=/home/ada/my job.sh TresPerNode=gres:gpu:2",
    "24.11": "JobId=7 JobName=train me UserId=ada(1000) JobState=PENDING Reason=Resources "
    "ReqTRES=cpu=8,mem=1G,node=1,billing=8,gres/gpu=2 AllocTRES=(null) "
    "Comment=crater-plan:1.abc.def Command=/home/ada/my job.sh TresPerNode=gres/gpu:2",
}


@pytest.mark.parametrize("version", JOB)
def test_a_job_s_fields_are_read_whole(version: str) -> None:
    record = parse_record(JOB[version])
    assert record["JobId"] == "7"
    assert record["JobName"] == "train me"
    assert record["Reason"] == "Resources"
    assert record["Comment"] == "crater-plan:1.abc.def"
    assert record["Command"] == "/home/ada/my job.sh"
    assert record["TresPerNode"].startswith("gres")


def test_a_user_s_text_never_replaces_a_field_of_slurm_s() -> None:
    record = parse_record("JobId=7 JobState=RUNNING Comment=x JobId=8 JobState=FAILED Mine=1")
    assert (record["JobId"], record["JobState"]) == ("7", "RUNNING")


@settings(max_examples=100)
@given(st.text(max_size=200))
def test_any_output_is_a_cluster_a_record_or_a_crater_error(text: str) -> None:
    parse_record(text)
    parse_version(text)
    for output in (text, f"gpu|idle|{text}|{text}|{text}", f"gpu|idle|(null)|gpu:1|n[{text}]"):
        with contextlib.suppress(CraterError):
            assert all(n.name for n in parse_sinfo(output).nodes)


def script(folder: Path, name: str, body: str) -> None:
    file = folder / name
    file.write_text(f"#!/bin/sh\n{body}\n")
    file.chmod(0o755)


@pytest.fixture
def slurm(tmp_path: Path) -> Client:
    script(
        tmp_path,
        "scontrol",
        "cat <<'END'\nConfiguration data as of now\nClusterName             = hpc\n"
        "GresTypes               = gpu,membw\nSLURM_VERSION           = 24.11.5\n"
        "SelectTypeParameters    = CR_Core_Memory,MULTIPLE_SHARING_GRES_PJ\n"
        "SlurmctldParameters     = (null)\n\nSlurmctld(primary) at ctl is UP\nEND",
    )
    script(
        tmp_path,
        "sinfo",
        'case "$*" in *%P*) printf "cpu\\ngpu*\\n";; *) echo "gpu|idle|(null)|gpu:4|1|2:16:2|515000|n1|none";; esac',
    )
    return Client(bin_dir=tmp_path, timeout_seconds=5)


def test_the_cluster_is_read_with_its_name_version_and_default(slurm: Client) -> None:
    found = slurm.cluster()
    assert (found.name, found.version, found.default_partition) == ("hpc", (24, 11), "gpu")
    assert found.gres_types == {"gpu", "membw"}
    assert found.select_parameters == {"CR_CORE_MEMORY", "MULTIPLE_SHARING_GRES_PJ"}
    assert [n.name for n in found.nodes] == ["n1"]
    assert found.time > 0


def test_limits_and_reservations_are_read_with_the_nodes(slurm: Client, tmp_path: Path) -> None:
    script(
        tmp_path,
        "scontrol",
        'case "$*" in\n'
        '*"show partition") echo "PartitionName=gpu MaxNodes=2 State=UP";;\n'
        '*"show reservation") echo "ReservationName=m StartTime=2026-01-01T00:00:00 '
        'EndTime=2026-01-02T00:00:00 Nodes=n1 Flags=MAINT";;\n'
        '*) printf "EnforcePartLimits = any\\nClusterName = hpc\\n";;\nesac',
    )
    found = slurm.cluster()
    assert [(p.name, p.max_nodes) for p in found.partitions] == [("gpu", 2)]
    assert [(r.name, r.nodes) for r in found.reservations] == [("m", {"n1"})]
    assert found.enforce_limits == "ANY"


def test_mig_types_are_kept_apart(slurm: Client) -> None:
    (found,) = parse_sinfo(
        "gpu|idle|(null)|gpu:a100:1(S:0),gpu:a100_1g.5gb:7(S:0)|1|2:16:2|515000|m1|none"
    ).nodes
    assert found.gres == {"gpu": 8}
    assert found.gpu_types == {"a100", "a100_1g.5gb"}


@pytest.mark.parametrize(
    ("state", "maintenance"),
    [("maint", True), ("maint*", True), ("maint-", True), ("down", False), ("idle", False)],
)
def test_a_node_in_maintenance_is_nothing_else(state: str, maintenance: bool) -> None:
    assert SlurmNode(name="n", state=state).in_maintenance is maintenance


def test_null_settings_are_empty(slurm: Client) -> None:
    assert slurm.config()["SlurmctldParameters"] == ""


def test_a_missing_command_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(SlurmError, match=r"sinfo' is not there; install Slurm's client commands"):
        Client(bin_dir=tmp_path).version()


def test_a_failing_command_s_last_words_are_the_message(tmp_path: Path) -> None:
    script(
        tmp_path, "sinfo", "echo noise >&2; echo 'Unable to contact slurm controller' >&2; exit 1"
    )
    with pytest.raises(SlurmError, match="^sinfo failed: Unable to contact slurm controller$"):
        Client(bin_dir=tmp_path).version()


def test_a_failing_command_without_words_gives_its_code(tmp_path: Path) -> None:
    script(tmp_path, "sinfo", "exit 3")
    with pytest.raises(SlurmError, match="^sinfo failed: 3$"):
        Client(bin_dir=tmp_path).version()


def test_a_hanging_command_is_given_up(tmp_path: Path) -> None:
    script(tmp_path, "sinfo", "exec sleep 60")
    with pytest.raises(SlurmError, match="did not answer within 0.2 s"):
        Client(bin_dir=tmp_path, timeout_seconds=0.2).version()


def test_output_that_is_no_utf8_is_read_all_the_same(tmp_path: Path) -> None:
    script(tmp_path, "sinfo", "printf 'slurm 24.11\\377'")
    assert Client(bin_dir=tmp_path).version() == (24, 11)


def test_variables_of_a_job_around_us_do_not_change_what_commands_print(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(tmp_path, "sinfo", 'env > "$(dirname "$0")/env"')
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SINFO_FORMAT", "%n")
    monkeypatch.setenv("SLURM_CONF", "/elsewhere/slurm.conf")
    Client(bin_dir=tmp_path, environment={"MUNGE_X": "y"}).version()
    seen = dict(line.split("=", 1) for line in (tmp_path / "env").read_text().splitlines())
    assert "SLURM_JOB_ID" not in seen
    assert "SINFO_FORMAT" not in seen
    assert seen["SLURM_CONF"] == "/elsewhere/slurm.conf"
    assert seen["SLURM_TIME_FORMAT"] == "standard"
    assert seen["MUNGE_X"] == "y"
    assert seen["PATH"] == os.environ["PATH"]
    Client(bin_dir=tmp_path, conf=Path("/here/slurm.conf")).version()
    assert "SLURM_CONF=/here/slurm.conf" in (tmp_path / "env").read_text().splitlines()


@pytest.mark.parametrize("job_id", ["", "7; rm -rf /", "--all", "7_", "7_a", "a", "7\n8"])
def test_what_is_no_job_id_is_never_given_to_slurm(slurm: Client, job_id: str) -> None:
    with pytest.raises(SlurmError, match="is no job id"):
        slurm.job(job_id)


@pytest.mark.parametrize("job_id", ["7", "7_4", "7+1"])
def test_a_job_is_asked_for_by_its_id(tmp_path: Path, job_id: str) -> None:
    script(tmp_path, "scontrol", 'echo "JobId=7 Args=$*"')
    record = Client(bin_dir=tmp_path).job(job_id)
    assert record == {"JobId": "7", "Args": f"--oneliner --details show job {job_id}"}
