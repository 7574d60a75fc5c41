"""What every database must do for the store: the same tests run on SQLite, PostgreSQL, MariaDB.

A subclass named ``Test...`` gives the fixture ``url`` of an empty database and ``locked``, which
holds the write lock of a store for a while.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
from alembic import command
from sqlalchemy import text
from store_samples import plain_profile, rich_decision, rich_profile

from crater_slurm.errors import StoreError, UsageError
from crater_slurm.model.observation import FIGURES, Observation
from crater_slurm.model.profile import Cpu, Method, NodeProfile, NumaNode, Nvme, Provenance
from crater_slurm.store import engine as engines
from crater_slurm.store import maintenance, migrations
from crater_slurm.store.records import Event, Grant, JobAction, Pruned
from crater_slurm.store.repository import Store

Locked = Callable[[str], AbstractContextManager[None]]
_spawn = multiprocessing.get_context("spawn")
_DAY = 86_400.0


def execute(url: str, *statements: str) -> None:
    """Statements past the store, as an administrator or an accident would run them."""
    engine = engines.connect(engines.parse_url(url))
    with engine.begin() as connection:
        for statement in statements:
            connection.execute(text(statement))
    engine.dispose()


def count(url: str, table: str) -> int:
    engine = engines.connect(engines.parse_url(url))
    with engine.connect() as connection:
        found = connection.execute(text(f"SELECT count(*) FROM {table}")).scalar_one()
    engine.dispose()
    return int(found)


def job_action(**fields: Any) -> JobAction:
    given = {
        "job": "7",
        "plan_id": "d1",
        "user_id": 1000,
        "time": 1.0,
        "kind": "sla",
        "action": "priority",
        "outcome": "begun",
        "value": "nice -1000",
        "message": "waited 8 s of 10 s",
    }
    return JobAction(**given | fields)


def write_nodes(url: str, prefix: str, nodes: int, results: Any) -> None:
    """Stores nodes one by one; what another process does beside a first."""
    try:
        with Store.open(url, lock_timeout_seconds=120) as store:
            for i in range(nodes):
                store.save_profile(rich_profile(f"{prefix}{i:02d}"))
                store.save_decision(rich_decision(f"{prefix}{i:02d}"))
        results.put((prefix, "ok"))
    except Exception as error:
        results.put((prefix, repr(error)))


def seen(**fields: Any) -> Observation:
    """An observation with what each must have, changed by ``fields``."""
    base: dict[str, Any] = {
        "job_id": 7,
        "plan_id": "p1",
        "node": "gn01",
        "time": 5.0,
        "seconds": 3.5,
        "samples": 2,
        "key": "m|lora|torch",
        "workload": {"model": "m"},
    }
    return Observation(**base | fields)


def upgrade_store(url: str, results: Any) -> None:
    try:
        maintenance.upgrade(url)
        results.put("ok")
    except Exception as error:
        results.put(repr(error))


def write_for_ever(url: str) -> None:
    with Store.open(url, lock_timeout_seconds=120) as store:
        for i in range(1_000_000):
            store.save_profiles(
                dataclasses.replace(rich_profile(f"k{n}"), cache_gb=i) for n in range(20)
            )


def _pruned(each: int) -> Pruned:
    """As many rows of every kind."""
    return Pruned(**{field.name: each for field in dataclasses.fields(Pruned)})


class StoreContract:
    @pytest.fixture
    def store(self, url: str) -> Any:
        with Store.open(url, create=True, lock_timeout_seconds=1) as store:
            yield store

    # Profiles

    def test_a_profile_comes_back_as_it_was(self, store: Store) -> None:
        assert store.save_profile(rich_profile()) is True
        assert store.profile("gn01") == rich_profile()
        assert store.profile("gn02") is None

    def test_profiles_come_by_name(self, store: Store) -> None:
        assert store.profiles() == []
        saved = [plain_profile("b"), rich_profile("c"), plain_profile("a")]
        assert store.save_profiles(saved) == ["b", "c", "a"]
        assert [profile.name for profile in store.profiles()] == ["a", "b", "c"]
        assert store.profiles(["c", "nobody", "a"]) == [plain_profile("a"), rich_profile("c")]
        assert store.names() == ["a", "b", "c"]

    def test_names_that_differ_in_case_are_two_nodes(self, store: Store) -> None:
        store.save_profiles([plain_profile("gn01"), rich_profile("GN01")])
        assert store.profile("gn01") == plain_profile("gn01")
        assert store.profile("GN01") == rich_profile("GN01")

    def test_the_version_counts_changes_only(self, store: Store) -> None:
        assert store.version() == 0
        store.save_profiles([rich_profile(), plain_profile()])
        assert store.version() == 1
        assert store.save_profile(rich_profile()) is False
        assert store.save_profiles([]) == []
        assert store.delete_profile("nobody") is False
        assert store.version() == 1
        changed = dataclasses.replace(rich_profile(), cache_gb=1)
        assert store.save_profiles([changed, plain_profile()]) == ["gn01"]
        assert store.version() == 2
        assert store.delete_profile("gn01") is True
        assert store.version() == 3

    def test_a_reader_gets_what_changed_since_it_looked(self, store: Store) -> None:
        store.save_profiles([plain_profile("a"), plain_profile("b"), plain_profile("c")])
        seen = store.snapshot()
        assert (seen.version, seen.names, len(seen.profiles)) == (1, ("a", "b", "c"), 3)
        store.save_profile(rich_profile("b"))
        store.delete_profile("c")
        news = store.snapshot(since=seen.version)
        assert (news.version, news.names) == (3, ("a", "b"))
        lean = dataclasses.replace(rich_profile("b"), pci_devices=(), dimms=())
        assert news.profiles == (lean,), "what no decision looks at stays in the store"
        assert store.snapshot(since=3).profiles == ()

    def test_a_smaller_profile_leaves_nothing_of_the_larger(self, store: Store, url: str) -> None:
        store.save_profile(rich_profile("gn01"))
        store.save_profile(plain_profile("gn01"))
        assert store.profile("gn01") == plain_profile("gn01")
        for table in ("gpu", "nvlink", "nvme", "provenance"):
            assert count(url, table) == 0, table
        store.delete_profile("gn01")
        assert count(url, "numa_node") == 0

    def test_profiles_are_stored_all_or_none(self, store: Store) -> None:
        bad = dataclasses.replace(plain_profile("b"), memory_mib=-1)
        with pytest.raises(UsageError, match="b: memory_mib: -1 is not a whole number"):
            store.save_profiles([plain_profile("a"), bad])
        assert store.names() == []
        assert store.version() == 0

    def test_large_numbers_fit(self, store: Store) -> None:
        large = dataclasses.replace(plain_profile(), memory_mib=2**31, cache_gb=10**7)
        store.save_profile(large)
        assert store.profile("cn01") == large

    def test_many_profiles_come_in_a_handful_of_queries(self, store: Store) -> None:
        from sqlalchemy import event

        store.save_profiles(rich_profile(f"n{i:03d}") for i in range(1200))
        queries = []
        event.listen(store._engine, "before_cursor_execute", lambda *args: queries.append(args[2]))
        assert len(store.snapshot().profiles) == 1200
        assert len([query for query in queries if query.startswith("SELECT")]) <= 10

    # Decisions, grants, events

    def test_a_decision_comes_back_as_it_was(self, store: Store) -> None:
        store.save_decision(rich_decision())
        assert store.decision("d1") == rich_decision()
        assert store.decision("d2") is None

    def test_decisions_are_found_by_user_and_job_newest_first(self, store: Store) -> None:
        store.save_decisions(
            [
                rich_decision("d1", user_id=1, time=100),
                rich_decision("d2", user_id=2, time=200),
                rich_decision("d3", user_id=1, time=300),
            ]
        )
        assert [found.id for found in store.decisions()] == ["d3", "d2", "d1"]
        assert [found.id for found in store.decisions(limit=1)] == ["d3"]
        assert [found.id for found in store.decisions(user_id=1)] == ["d3", "d1"]
        assert store.link_job("d1", 4242) is True
        assert store.link_job("nothing", 4242) is False
        assert [found.id for found in store.decisions(job_id=4242)] == ["d1"]
        assert store.decisions(user_id=2, job_id=4242) == []
        assert store.job_of("d1") == 4242
        assert store.job_of("d2") is None

    def test_a_decision_saved_again_keeps_its_job(self, store: Store) -> None:
        store.save_decision(rich_decision("d1"))
        store.link_job("d1", 7)
        store.save_decision(rich_decision("d1", user_id=9))
        assert store.job_of("d1") == 7
        assert [found.user_id for found in store.decisions(job_id=7)] == [9]

    def test_a_decision_on_a_large_cluster_fits(self, store: Store) -> None:
        names = ",".join(f"node{i:06d}" for i in range(20_000))  # 220 kB
        decision = dataclasses.replace(
            rich_decision(), excluded=((names, 20_000, "läuft nicht 🚫"),)
        )
        store.save_decision(decision)
        assert store.decision("d1") == decision

    def test_grants_are_found_by_job_and_plan(self, store: Store) -> None:
        grant = Grant(job_id=5, plan_id="p1", node="gn01", time=100.5, got={"cpus": "0-3"})
        store.save_grant(grant)
        store.save_grant(dataclasses.replace(grant, node="gn02"))
        store.save_grant(dataclasses.replace(grant, job_id=6, plan_id="p2"))
        store.save_grant(dataclasses.replace(grant, time=101.0, got={"cpus": "0-7"}))
        assert store.grants(job_id=5) == [
            Grant(job_id=5, plan_id="p1", node="gn01", time=101.0, got={"cpus": "0-7"}),
            dataclasses.replace(grant, node="gn02"),
        ]
        assert [found.job_id for found in store.grants(plan_id="p2")] == [6]
        assert len(store.grants()) == 3

    def test_events_come_newest_first(self, store: Store) -> None:
        store.add_events([Event(node="gn01", time=1.0, kind="report", message="first")])
        store.add_events([Event(node="gn02", time=3.0, kind="report", message="other")])
        store.add_events(
            [
                Event(
                    node="gn01",
                    time=2.0,
                    kind="gpu_lost",
                    message="GPU 3 is gone",
                    path="gpus[3]",
                    old="a100",
                )
            ]
        )
        assert [found.message for found in store.events()] == ["other", "GPU 3 is gone", "first"]
        assert [found.message for found in store.events("gn01", limit=1)] == ["GPU 3 is gone"]

    def test_an_observation_comes_back_as_it_was(self, store: Store) -> None:
        whole = seen(
            ended=True,
            succeeded=False,
            oom_kills=2,
            gpus=8,
            workload={"model": "Llama \u00fc", "micro_batch": 4, "activation_checkpointing": True},
            **dict.fromkeys(FIGURES, 17.0),
        )
        bare = seen(job_id=8, key=None, workload={})
        store.add_observations([whole, bare])
        assert store.observations() == [whole, bare]
        assert store.observations("m|lora|torch") == [whole]
        assert store.observations("M|lora|torch") == []
        assert store.observations(plan_id="p2") == []
        assert store.observations(with_key=True) == [whole]

    def test_the_newest_observation_of_a_job_and_node_stays(self, store: Store) -> None:
        store.add_observation(seen(time=20.0, ended=True, cpu_cores_mean=2.5))
        store.add_observation(seen(time=10.0))
        assert [found.cpu_cores_mean for found in store.observations()] == [2.5]
        store.add_observations([seen(time=40.0, samples=9), seen(time=30.0), seen(node="gn02")])
        found = store.observations(limit=1)
        assert [(one.time, one.samples) for one in found] == [(40.0, 9)]
        assert [one.node for one in store.observations("m|lora|torch")] == ["gn01", "gn02"]
        store.add_observations([])
        assert len(store.observations()) == 2

    def test_pruning_takes_what_is_older_than_the_days(self, store: Store) -> None:
        now = 1000 * _DAY
        for age in (9.9, 10.0, 10.1):
            key = f"age{age}"
            then = now - age * _DAY
            store.save_decision(rich_decision(key, time=then))
            store.save_grant(Grant(job_id=1, plan_id=key, node="gn01", time=then))
            store.add_events([Event(node="gn01", time=then, kind="report", message=key)])
            store.add_observation(seen(plan_id=key, time=then))
            store.add_action(job_action(plan_id=key, time=then))
        assert store.prune(10, now) == _pruned(1)
        assert [found.id for found in store.decisions()] == ["age9.9", "age10.0"]
        assert [found.plan_id for found in store.observations()] == ["age9.9", "age10.0"]
        assert store.prune(10, now) == _pruned(0)

    # What was done to jobs

    def test_an_act_is_noted_first_and_finished_later(self, store: Store) -> None:
        begun = store.add_action(job_action(time=1.5))
        store.add_action(job_action(job="7_[1-3]", kind="reconcile", value="x" * 70_000))
        store.finish_action(begun, "failed", "Job is no longer pending execution")
        first, second = store.actions(["d1", "nobody"])["d1"]
        assert first == job_action(
            time=1.5, outcome="failed", message="Job is no longer pending execution"
        )
        assert (second.job, len(second.value)) == ("7_[1-3]", 70_000)
        assert store.actions([]) == {}

    def test_decisions_by_their_ids(self, store: Store, url: str) -> None:
        store.save_decisions([rich_decision("d1"), rich_decision("d2"), rich_decision("d3")])
        execute(url, "UPDATE decision SET document = '{\"id\"\\:\"d3\"}' WHERE id = 'd3'")
        found = store.decisions_of(["d2", "d3", "d4"])
        assert found == {"d2": rich_decision("d2")}, "one that can't be read holds up no other"

    # Several at once

    def test_two_processes_write_and_nothing_is_lost(self, store: Store, url: str) -> None:
        results = _spawn.Queue()
        workers = [
            _spawn.Process(target=write_nodes, args=(url, prefix, 20, results))
            for prefix in ("a", "b")
        ]
        for worker in workers:
            worker.start()
        seen = [0]
        while any(worker.is_alive() for worker in workers):
            snapshot = store.snapshot()
            assert snapshot.version == len(snapshot.names) == len(snapshot.profiles)
            assert snapshot.version >= seen[-1]
            seen.append(snapshot.version)
        for worker in workers:
            worker.join(300)
        assert sorted(results.get(timeout=30) for _ in workers) == [("a", "ok"), ("b", "ok")]
        assert store.version() == 40
        expected = [rich_profile(f"{prefix}{i:02d}") for prefix in "ab" for i in range(20)]
        assert store.profiles() == expected
        assert len(store.decisions()) == 40

    def test_two_processes_may_upgrade_at_once(self, url: str) -> None:
        results = _spawn.Queue()
        workers = [_spawn.Process(target=upgrade_store, args=(url, results)) for _ in range(2)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(300)
        assert [results.get(timeout=30) for _ in workers] == ["ok", "ok"]
        assert count(url, "meta") == 1

    def test_a_writer_that_is_killed_leaves_whole_profiles(self, store: Store, url: str) -> None:
        worker = _spawn.Process(target=write_for_ever, args=(url,))
        worker.start()
        deadline = time.monotonic() + 300
        while store.version() < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(worker.pid or 0, signal.SIGKILL)
        worker.join(60)
        snapshot = store.snapshot()
        assert len(snapshot.profiles) == 20
        assert len({profile.cache_gb for profile in snapshot.profiles}) == 1
        assert maintenance.check(url).problems == ()
        store.save_profile(plain_profile())

    def test_a_locked_store_is_told_and_stores_nothing(
        self, store: Store, url: str, locked: Locked
    ) -> None:
        store.save_profile(plain_profile())
        with locked(url):
            with pytest.raises(StoreError, match="is locked by another writer; nothing was stored"):
                store.save_profiles([rich_profile(), rich_profile("gn02")])
            assert store.names() == ["cn01"]  # reading goes on
        assert store.version() == 1
        assert store.save_profile(rich_profile()) is True

    # Schema

    def test_the_migrations_make_the_tables_of_the_code(self, store: Store, url: str) -> None:
        report = maintenance.check(url)
        assert report.problems == ()
        assert report.revision == migrations.HEAD
        assert report.rows == dict.fromkeys(report.rows, 0) | {"meta": 1}
        assert set(report.rows) == {
            *("decision", "event", "gpu", "job_grant", "meta", "node", "numa_node", "nvlink"),
            *("nvme", "provenance", "pci_device", "dimm", "observation", "job_action"),
            *("task", "callback", "api_token"),
        }

    def test_drift_is_found(self, store: Store, url: str) -> None:
        execute(url, "DROP INDEX ix_node_version" + (" ON node" if "mysql" in url else ""))
        execute(url, "ALTER TABLE nvme ADD COLUMN colour INTEGER")
        problems = " ".join(maintenance.check(url).problems)
        assert "ix_node_version" in problems
        assert "colour" in problems

    def test_tables_of_others_are_none_of_our_business(self, store: Store, url: str) -> None:
        execute(url, "CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL)")
        assert maintenance.check(url).problems == ()

    def test_upgrading_twice_changes_nothing(self, store: Store, url: str) -> None:
        store.save_profile(rich_profile())
        done = maintenance.upgrade(url)
        assert (done.current, done.newest) == (migrations.HEAD, migrations.HEAD)
        assert store.profile("gn01") == rich_profile()

    def test_a_store_without_tables_asks_for_the_upgrade(self, url: str) -> None:
        if url.startswith("sqlite"):
            engines.make_sqlite_file(engines.parse_url(url))
        with pytest.raises(StoreError, match="has no tables yet; run 'crater db upgrade'"):
            Store.open(url)
        assert maintenance.revisions(url).current is None

    def test_an_older_store_asks_for_the_upgrade(
        self, store: Store, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        head = migrations.HEAD
        monkeypatch.setattr(migrations, "REVISIONS", (head, "9998"))
        monkeypatch.setattr(migrations, "HEAD", "9998")
        with pytest.raises(StoreError, match=f"is at revision {head}, not 9998; run 'crater db up"):
            Store.open(url)

    def test_the_first_revision_is_upgraded_with_what_it_holds(self, url: str) -> None:
        if url.startswith("sqlite"):
            engines.make_sqlite_file(engines.parse_url(url))
        engine = engines.connect(engines.parse_url(url))
        with engines.writing(engine) as connection:
            command.upgrade(migrations.config(connection), "0001")
        engine.dispose()
        execute(
            url,
            "INSERT INTO node (name, version, digest, source_method, cpu_sockets, "
            "cpu_cores_per_socket, cpu_threads_per_core) VALUES ('n1', 1, 'x', 'measured', 1, 2, 1)",
            "INSERT INTO numa_node (node, position, id, cpus, distances) "
            "VALUES ('n1', 0, 0, '0-1', '10')",
            "INSERT INTO nvme (node, position, name) VALUES ('n1', 0, 'nvme0n1')",
            "INSERT INTO event (node, time_us, kind, message) VALUES ('n1', 5, 'seen', 'It came.')",
        )
        with pytest.raises(StoreError, match=f"0001, not {migrations.HEAD}; run 'crater db up"):
            Store.open(url)
        with Store.open(url, create=True) as store:
            assert store.profile("n1") == NodeProfile(
                name="n1",
                cpu=Cpu(sockets=1, cores_per_socket=2),
                numa_nodes=(NumaNode(id=0, cpus=(0, 1), distances=(10,)),),
                nvmes=(Nvme(name="nvme0n1"),),
                source=Provenance(Method.MEASURED),
            )
            assert store.events() == [Event(node="n1", time=5e-6, kind="seen", message="It came.")]
            assert store.save_profile(rich_profile())
        assert maintenance.check(url).problems == ()

    @pytest.mark.parametrize("create", [False, True])
    def test_a_newer_store_is_left_alone(self, store: Store, url: str, create: bool) -> None:
        execute(url, "UPDATE crater_schema SET version_num = '9999'")
        with pytest.raises(StoreError, match=r"revision 9999, which is newer .* upgrade crater-sl"):
            Store.open(url, create=create)

    def test_a_lost_table_is_told(self, store: Store, url: str) -> None:
        execute(url, "DROP TABLE provenance")
        with pytest.raises(StoreError, match="lacks tables or doesn't exist; run 'crater db up"):
            store.profiles()

    def test_what_a_person_reads_in_the_tables(self, store: Store, url: str) -> None:
        """Columns carry their units, lists are readable: reports in SQL need no decoding."""
        store.save_profile(rich_profile())
        engine = engines.connect(engines.parse_url(url))
        with engine.connect() as connection:
            query = text("SELECT cpus, distances FROM numa_node WHERE node = 'gn01' AND id = 0")
            assert tuple(connection.execute(query).one()) == ("0-3,8-11", "10,32,80")
            query = text("SELECT precisions, memory_mib FROM gpu WHERE gpu_index = 1")
            assert tuple(connection.execute(query).one()) == ("bf16,fp16", 40960)
            query = text("SELECT peers FROM nvlink WHERE gpu = 0 ORDER BY position")
            assert connection.execute(query).scalars().all() == ["0,3", "2"]
            query = text("SELECT paths FROM provenance WHERE method = 'catalogue'")
            assert connection.execute(query).scalars().all() == ["gpus[0].sm_count"]
            query = text("SELECT source_time_us FROM node")
            assert connection.execute(query).scalar_one() == 1_772_366_400_123_456
        engine.dispose()

    def test_a_document_is_json(self, store: Store, url: str) -> None:
        store.save_decision(rich_decision())
        engine = engines.connect(engines.parse_url(url))
        with engine.connect() as connection:
            query = text("SELECT document FROM decision")
            assert json.loads(connection.execute(query).scalar_one())["plan"]["gpus"] == 2
        engine.dispose()


__all__ = ["Locked", "NodeProfile", "StoreContract", "count", "execute"]
