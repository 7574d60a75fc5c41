"""crater-probe serve beside a real scheduler and munged: reports arrive, are merged, are proven.

The probe reads the machine that the lab is on, so the node's made-up hardware "changes" at its
first report: what a real node's changes do in the store can be seen by that.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import time
from collections.abc import Callable

import pytest
from conftest import LabFactory
from helpers import PATIENCE, python, ready

from crater_slurm.lab import Lab
from crater_slurm.model.profile import NodeProfile
from crater_slurm.store.repository import Store

PROBE = "probe@a1"
NODE = "a1"
URL = "http://127.0.0.1:9192"
CONF = {"probe": {"sample_seconds": 1, "publish_seconds": 1, "scan_seconds": 600}}


class Site:
    """A lab of one node, and its store."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.folder = lab.folders.node(NODE) / "lib"
        self._url = f"sqlite:///{lab.folders.controller / 'lib' / 'crater.db'}"

    def store(self) -> Store:
        return Store.open(self._url)

    def profile(self) -> NodeProfile:
        with self.store() as store:
            found = store.profile(NODE)
        assert found is not None
        return found

    def until(self, found: Callable[[], object]) -> None:
        end = time.monotonic() + PATIENCE
        while not found():
            assert time.monotonic() < end, self.lab.log(PROBE) + self.lab.log("scheduler")
            time.sleep(0.2)

    def python(self, code: str, user: str = "root") -> str:
        """What a program on the node prints; it has crater's package."""
        done = python(self.lab, "-c", code, user=user, node=NODE)
        return done.stdout.strip() or done.stderr

    def waiting(self) -> int:
        return len(list((self.folder / "probe" / "spool").glob("*.json")))


@pytest.fixture(scope="module")
def site(lab_factory: LabFactory) -> Site:
    lab = lab_factory(inventory="a100-pcie", daemons=("scheduler",), crater_conf=CONF)
    return Site(ready(lab))


def test_a_report_takes_the_place_of_what_was_declared(site: Site) -> None:
    with site.store() as store:
        store.save_profile(dataclasses.replace(site.profile(), cache_gb=4242))
    assert len(site.profile().gpus) == 8
    (site.folder / "profile.json").unlink()  # a lab's nodes have one from the start
    site.lab.start(PROBE)
    site.until(lambda: site.profile().software.kernel == os.uname().release)
    found = site.profile()
    online = os.sysconf("SC_NPROCESSORS_ONLN")
    assert sum(len(node.cpus) for node in found.numa_nodes) == online
    assert found.cache_gb == 4242, "what no scan can tell stays"
    with site.store() as store:
        kinds = [event.kind for event in store.events(NODE)]
    assert kinds.count("gpu_lost") == 8 - len(found.gpus)
    assert "numa_changed" in kinds


def test_health_arrives(site: Site) -> None:
    code = (
        "import json; from crater_slurm.scheduler import client; "
        f"print(json.dumps(client.node_health({URL!r}, {NODE!r})))"
    )
    site.until(lambda: site.python(code).startswith("{"))
    health = json.loads(site.python(code))
    assert health["node"] == NODE
    assert health["age_seconds"] < 60
    assert health["load"] >= 0


def test_metrics_are_shown_on_the_node(site: Site) -> None:
    code = (
        "import urllib.request as r; "
        "print(r.urlopen('http://127.0.0.1:9193/metrics').read().decode())"
    )
    site.until(lambda: f'crater_node_load{{node="{NODE}"}}' in site.python(code))
    # A rate needs two samples.
    site.until(lambda: "crater_cpu_utilization_percent" in site.python(code))


def test_a_changed_profile_waits_for_the_scheduler(site: Site) -> None:
    site.lab.stop("scheduler")
    (site.folder / "probe" / "sent").unlink()
    site.lab.signal(PROBE, signal.SIGHUP)
    site.until(site.waiting)
    with site.store() as store:
        store.delete_profile(NODE)
    site.lab.start("scheduler")
    site.until(lambda: not site.waiting())
    assert site.profile().software.kernel == os.uname().release


_BODY = json.dumps({"node": NODE, "health": {"time": 1}})
POST = (
    "import hashlib; from crater_slurm.slurm import munge, spool; "
    f"body = {_BODY!r}.encode(); "
    f"print(spool.post('{URL}/node/v1/reports', body, "
    "munge.encode(hashlib.sha256(body).hexdigest())))"
)


@pytest.mark.parametrize(("user", "status"), [("alice", "403"), ("root", "204")])
def test_only_an_admins_process_is_heard(site: Site, user: str, status: str) -> None:
    assert site.python(POST, user) == status


def test_a_node_that_slurm_knows_elsewhere_is_not_heard_from_here(site: Site) -> None:
    for change in ("NodeAddr=192.0.2.77", "NodeHostname=elsewhere"):
        site.lab.run(["scontrol", "update", f"NodeName={NODE}", change], user="root", check=True)
    assert site.python(POST) == "403"


def test_the_probe_ends_cleanly(site: Site) -> None:
    site.lab.stop(PROBE)
    assert site.lab.supervisor.pid(PROBE) is None
    assert "Traceback" not in site.lab.log(PROBE)
    assert "Traceback" not in site.lab.log("scheduler")
