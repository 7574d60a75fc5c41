"""Submitting a task at most once: command lines, markers, sbatch's moods, memory, waiting."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crater_slurm.alldata import marker, options
from crater_slurm.alldata.journal import BusyError, Entry, Journal, journal_of
from crater_slurm.alldata.marker import Marker
from crater_slurm.alldata.queue import FoundJob, Queue
from crater_slurm.alldata.sbatch import Attempt, Outcome, attempt
from crater_slurm.alldata.sending import (
    ConflictError,
    RefusedError,
    Sender,
    Submitted,
    UnknownOutcomeError,
)
from crater_slurm.alldata.waiting import End, Waiter
from crater_slurm.cli.submit import task_place
from crater_slurm.config.submit import Submit
from crater_slurm.errors import CraterError, SlurmError, UsageError
from crater_slurm.slurm.client import Client
from crater_slurm.slurm.environment import clean_environment

MARK = Marker("task-1", "0123456789ab")
OTHER = Marker("task-1", "ba9876543210")


# Words of a command line.


@pytest.mark.parametrize(
    ("line", "script"),
    [
        ("job.sh", "job.sh"),
        ("-p gpu job.sh --wait", "job.sh"),
        ("-pgpu job.sh", "job.sh"),
        ("--partition gpu job.sh", "job.sh"),
        ("--partition=gpu job.sh", "job.sh"),
        ("--wait --requeue job.sh", "job.sh"),
        ("-W -v job.sh", "job.sh"),
        ("-vp gpu job.sh", "job.sh"),
        ("--exclusive job.sh", "job.sh"),
        ("--exclude n1 job.sh", "job.sh"),
        ("--wait-all-nodes 1 job.sh", "job.sh"),
        ("--comment task.json job.sh", "job.sh"),
        ("-- job.sh", "job.sh"),
        ("-p gpu -", "-"),
        ("--wrap hostname", None),
        ("-p gpu", None),
        ("", None),
    ],
)
def test_the_script_is_the_first_word_that_is_no_option(line: str, script: str | None) -> None:
    words = line.split()
    place = options.first_word(words)
    assert (None if place is None else words[place]) == script


def test_a_task_is_told_from_a_batch_script(tmp_path: Path) -> None:
    task = tmp_path / "task"
    task.write_text('\n {"task_id": "a"}')
    batch = tmp_path / "job.sh"
    batch.write_text("#!/bin/sh\n{ true; }\n")
    assert task_place(["-p", "gpu", str(task)]) == 2
    assert task_place(["--json", "task.json"]) == 1
    assert task_place(["--template", "x.json", "-"]) == 2
    assert task_place([str(batch), "task.json"]) is None
    assert task_place(["--wrap", "cat task.json"]) is None
    assert task_place([str(tmp_path / "gone")]) is None


def test_an_option_is_taken_out_with_its_value() -> None:
    words = ["-p", "gpu", "--comment", "a b", "--time=5", "--comment=c"]
    assert options.take(words, "--comment") == ("c", ["-p", "gpu", "--time=5"])
    # The value of another option is none of ours.
    assert options.take(["-J", "--comment"], "--comment") == (None, ["-J", "--comment"])
    with pytest.raises(UsageError, match="--comment needs a value"):
        options.take(["--comment"], "--comment")


def test_options_are_known_by_both_names() -> None:
    assert options.said(["-c8", "-p", "-G", "--gres=gpu:1", "--wait"]) == {
        *("-c", "--cpus-per-task", "-p", "--gres", "--wait"),
    }


def test_what_an_enclosing_job_left_is_removed_and_slurm_is_still_found() -> None:
    kept = {"SLURM_CONF": "/c", "SLURM_JWT": "t", "PATH": "/bin", "CUDA_HOME": "/cuda"}
    left = dict.fromkeys(
        (
            *("SLURM_CPU_BIND", "SLURM_JOB_ID", "SBATCH_ACCOUNT", "SRUN_DEBUG", "PMI_RANK"),
            *("PMI2_X", "PMIX_NAMESPACE", "SLURMD_NODENAME", "SLURM_TRES_PER_TASK"),
            *("SUDO_USER", "SUDO_COMMAND"),
        ),
        "x",
    )
    assert clean_environment(kept | left) == kept


# The marker in the comment.


def test_the_marker_is_found_among_other_words() -> None:
    text = f"{MARK} crater: gpus=2 crater-plan:1.abc.def"
    assert marker.find(text, "task-1") == MARK
    # As the accounting keeps a command line.
    assert marker.find(f"sbatch '--comment={MARK} x' --parsable", "task-1") == MARK
    assert marker.find(f"sbatch --comment={MARK} -p gpu", "task-1") == MARK
    assert marker.find(text, "task") is None
    assert marker.find(f"x{MARK}", "task-1") is None
    assert marker.find(f"{MARK}0", "task-1") is None


def test_a_user_s_comment_stays_behind_the_marker() -> None:
    assert marker.comment(MARK, None) == str(MARK)
    assert marker.comment(MARK, "crater: cpus=2") == f"{MARK} crater: cpus=2"


@pytest.mark.parametrize(
    "own", ["x" * 513, "a\nb", "crater-plan:1.x.y", "a crater-task:other/0123456789ab"]
)
def test_a_comment_that_would_disturb_is_refused(own: str) -> None:
    with pytest.raises(UsageError, match="--comment"):
        marker.comment(MARK, own)


# sbatch, as it may behave.


@pytest.fixture
def sbatch(tmp_path: Path) -> Callable[[str], list[str]]:
    def make(text: str) -> list[str]:
        file = tmp_path / "sbatch"
        file.write_text(f"#!/bin/bash\n{text}\n")
        file.chmod(0o755)
        return [str(file), "--parsable"]

    return make


def one(argv: list[str], timeout: float = 20) -> Attempt:
    return attempt(argv, "#!/bin/sh\n", {"PATH": os.environ["PATH"]}, timeout)


@pytest.mark.parametrize(
    ("text", "outcome", "job"),
    [
        ("cat >/dev/null; echo 17", Outcome.TAKEN, 17),
        ("echo 'a banner of the site'; echo '17;east'", Outcome.TAKEN, 17),
        ("echo 'sbatch: error: invalid partition' >&2; exit 1", Outcome.REFUSED, None),
        (
            "echo 'sbatch: error: Batch job submission failed: Unable to contact slurm controller "
            "(connect failure)' >&2; exit 1",
            Outcome.NOT_SENT,
            None,
        ),
        (
            "echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv "
            "operation' >&2; exit 1",
            Outcome.UNKNOWN,
            None,
        ),
        ("echo 'Zero Bytes were transmitted or received' >&2; exit 1", Outcome.UNKNOWN, None),
        ("exit 0", Outcome.UNKNOWN, None),
        ("kill -KILL $$", Outcome.UNKNOWN, None),
    ],
)
def test_what_is_known_after_an_attempt(
    sbatch: Callable[[str], list[str]], text: str, outcome: Outcome, job: int | None
) -> None:
    done = one(sbatch(text))
    assert (done.outcome, done.job_id) == (outcome, job)


def test_an_sbatch_that_hangs_is_ended_with_all_it_started(
    sbatch: Callable[[str], list[str]], tmp_path: Path
) -> None:
    done = one(sbatch(f"sleep 600 & echo $! > {tmp_path}/pid; wait"), timeout=0.5)
    assert (done.outcome, done.why) == (Outcome.UNKNOWN, "sbatch did not end within 0.5 s")
    status = Path("/proc") / (tmp_path / "pid").read_text().strip() / "status"
    # Whoever adopts it may not have buried it yet.
    assert not status.exists() or "State:\tZ" in status.read_text()


def test_an_sbatch_that_tells_the_job_and_hangs_has_submitted(
    sbatch: Callable[[str], list[str]],
) -> None:
    done = one(sbatch("echo 18; exec sleep 600"), timeout=0.5)
    assert (done.outcome, done.job_id) == (Outcome.TAKEN, 18)


def test_ctrl_c_does_not_reach_sbatch(sbatch: Callable[[str], list[str]]) -> None:
    """It has a session of its own, so a terminal's signal is not for it."""
    done = one(sbatch("ps -o sid= -p $$ | tr -d ' '"))
    assert done.job_id not in (None, os.getsid(0))


def test_no_sbatch_is_said_so() -> None:
    with pytest.raises(SlurmError, match="can't run '/nonexistent/sbatch'"):
        one(["/nonexistent/sbatch"])


# Looking for jobs.


@pytest.fixture
def slurm(tmp_path: Path) -> Callable[..., Queue]:
    """A Queue whose commands print what they are told, and note their words."""

    def make(**commands: str) -> Queue:
        for name, text in commands.items():
            file = tmp_path / name
            file.write_text(f'#!/bin/bash\necho "$0 $*" >> {tmp_path}/calls\n{text}\n')
            file.chmod(0o755)
        return Queue(Client(bin_dir=tmp_path), uid=lambda: 1234)

    return make


def test_only_the_own_user_s_jobs_are_asked_for(
    slurm: Callable[..., Queue], tmp_path: Path
) -> None:
    queue = slurm(
        squeue=f"""cat <<'END'
12|RUNNING|{MARK} crater-plan:1.a.b
13|PENDING|{OTHER} a|b
11|COMPLETED|x {MARK}
14|RUNNING|crater-task:task-2/0123456789ab
no job
15|RUNNING|
END"""
    )
    assert queue.jobs("task-1") == [
        FoundJob(11, "COMPLETED", MARK),
        FoundJob(12, "RUNNING", MARK),
        FoundJob(13, "PENDING", OTHER),
    ]
    (call,) = (tmp_path / "calls").read_text().splitlines()
    assert "--user=1234" in call
    assert "--states=all" in call


def test_the_accounting_is_asked_where_there_is_one(slurm: Callable[..., Queue]) -> None:
    queue = slurm(sacct=f"echo '20|CANCELLED by 5||sbatch --parsable --comment={MARK} -p x'")
    assert queue.accounted("task-1", 0.0) == [FoundJob(20, "CANCELLED", MARK)]
    queue = slurm(sacct=f"echo '20|CANCELLED by 5|{MARK}|sbatch'")
    assert queue.accounted("task-1", 0.0) == [FoundJob(20, "CANCELLED", MARK)]
    queue = slurm(sacct="echo 'Slurm accounting storage is disabled' >&2; exit 1")
    assert queue.accounted("task-1", 0.0) is None
    queue = slurm(sacct="echo 'some other trouble' >&2; exit 1")
    with pytest.raises(SlurmError, match="some other trouble"):
        queue.accounted("task-1", 0.0)


# Sending.


@dataclass
class World:
    """Slurm and time, as a test wants them. ``moods`` are what sbatch does, one after the other."""

    jobs: list[FoundJob] = field(default_factory=list)
    accounted_jobs: list[FoundJob] | None = None
    moods: list[Callable[[], Attempt]] = field(default_factory=list)
    sent: int = 0
    now: float = 1000.0
    down: bool = False
    after: dict[float, Callable[[], None]] = field(default_factory=dict)

    def queue(self) -> Queue:
        world = self

        class Fake(Queue):
            def jobs(self, task_id: str) -> list[FoundJob]:
                if world.down:
                    raise SlurmError("squeue did not answer within 15 s")
                return [job for job in world.jobs if job.marker.task_id == task_id]

            def accounted(self, task_id: str, since: float) -> list[FoundJob] | None:
                return world.accounted_jobs

        return Fake(Client())

    def attempt(self) -> Attempt:
        self.sent += 1
        return self.moods.pop(0)()

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for when in [when for when in self.after if when <= self.now]:
            self.after.pop(when)()

    def sender(self, journal: Journal, **changes: float) -> Sender:
        return Sender(
            queue=self.queue(),
            journal=journal,
            settings=Submit().model_copy(update=changes),
            attempt=self.attempt,
            clock=lambda: self.now,
            sleep=self.sleep,
        )

    def takes(self, number: int, mark: Marker = MARK) -> Attempt:
        self.jobs.append(FoundJob(number, "PENDING", mark))
        return Attempt(Outcome.TAKEN, number, said="sbatch: crater: planned\n")

    def hangs(self) -> Attempt:
        return Attempt(Outcome.UNKNOWN, why="sbatch did not end within 60 s")


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "task.json")


def test_a_task_is_submitted_once(world: World, journal: Journal) -> None:
    world.moods = [lambda: world.takes(5)]
    first = world.sender(journal).send(MARK)
    assert first == Submitted(5, said="sbatch: crater: planned\n")
    assert (first.sentence, first.parsable) == ("Submitted batch job 5", "5")
    assert world.sender(journal).send(MARK) == Submitted(5, fresh=False)
    assert world.sent == 1


def test_it_is_still_that_job_when_slurm_has_forgotten_it(world: World, journal: Journal) -> None:
    world.moods = [lambda: world.takes(5)]
    world.sender(journal).send(MARK)
    world.jobs.clear()
    assert world.sender(journal).send(MARK) == Submitted(5, fresh=False)
    assert world.sent == 1


def test_it_is_found_in_slurm_when_nothing_is_remembered(world: World, tmp_path: Path) -> None:
    world.jobs = [FoundJob(7, "RUNNING", MARK)]
    for memory in (Journal(tmp_path / "new.json"), Journal(None)):
        assert world.sender(memory).send(MARK) == Submitted(7, fresh=False)
    assert world.sent == 0


@pytest.mark.parametrize("remembered", [True, False])
def test_another_content_is_a_conflict(world: World, journal: Journal, remembered: bool) -> None:
    world.moods = [lambda: world.takes(5)]
    world.sender(journal).send(MARK)
    if remembered:
        world.jobs.clear()
    with pytest.raises(ConflictError, match="with another content, as job 5"):
        world.sender(journal if remembered else Journal(None)).send(OTHER)
    assert world.sent == 1


def test_a_refusal_is_told_in_slurm_s_words_and_may_be_tried_again(
    world: World, journal: Journal
) -> None:
    said = "sbatch: error: crater: no node has 16 GPUs\n"
    world.moods = [lambda: Attempt(Outcome.REFUSED, said=said), lambda: world.takes(6)]
    with pytest.raises(RefusedError, match="no node has 16 GPUs"):
        world.sender(journal).send(MARK)
    assert world.sender(journal).send(MARK).job_id == 6


def test_an_sbatch_that_submitted_and_did_not_tell_is_found_out(
    world: World, journal: Journal
) -> None:
    def lost() -> Attempt:
        world.takes(8)
        return world.hangs()

    world.moods = [lost]
    assert world.sender(journal).send(MARK).job_id == 8
    assert world.sent == 1


def test_a_job_that_shows_late_is_found_too(world: World, journal: Journal) -> None:
    world.moods = [world.hangs]
    world.after = {1010.0: lambda: world.jobs.append(FoundJob(9, "PENDING", MARK))}
    assert world.sender(journal).send(MARK).job_id == 9


def test_a_slurmctld_that_is_away_is_asked_again(world: World, journal: Journal) -> None:
    def lost() -> Attempt:
        world.takes(8)
        world.down = True
        return world.hangs()

    world.moods = [lost]
    world.after = {1005.0: lambda: setattr(world, "down", False)}
    assert world.sender(journal).send(MARK).job_id == 8


def doubtful(world: World, journal: Journal) -> None:
    world.moods = [world.hangs, lambda: world.takes(10)]
    with pytest.raises(UnknownOutcomeError, match="it is not sent twice"):
        world.sender(journal).send(MARK)


def test_a_doubt_is_kept_until_it_is_sure(world: World, journal: Journal) -> None:
    doubtful(world, journal)
    world.now = 1100.0
    with pytest.raises(UnknownOutcomeError, match=r"an attempt 100 s ago .* try again in 20 s"):
        world.sender(journal).send(MARK)
    assert world.sent == 1
    world.now = 1121.0
    assert world.sender(journal).send(MARK).job_id == 10
    assert world.sent == 2


def test_a_doubt_that_turns_out_to_be_a_job_is_that_job(world: World, journal: Journal) -> None:
    doubtful(world, journal)
    world.jobs = [FoundJob(9, "RUNNING", MARK)]
    assert world.sender(journal).send(MARK) == Submitted(9, fresh=False)
    assert world.sent == 1


def test_a_job_that_ended_meanwhile_is_in_the_accounting(world: World, journal: Journal) -> None:
    doubtful(world, journal)
    world.now, world.accounted_jobs = 9999.0, [FoundJob(9, "COMPLETED", MARK)]
    assert world.sender(journal).send(MARK) == Submitted(9, fresh=False)
    assert world.sent == 1


def test_without_accounting_an_old_doubt_stays_one(world: World, journal: Journal) -> None:
    doubtful(world, journal)
    world.now = 2000.0
    with pytest.raises(UnknownOutcomeError, match="say --again for a new job"):
        world.sender(journal).send(MARK)
    assert world.sender(journal).send(MARK, again=True).job_id == 10


def test_with_accounting_an_old_doubt_is_cleared(world: World, journal: Journal) -> None:
    doubtful(world, journal)
    world.now, world.accounted_jobs = 2000.0, []
    assert world.sender(journal).send(MARK).job_id == 10


def test_a_slurmctld_that_is_down_leaves_no_doubt(world: World, journal: Journal) -> None:
    world.down = True
    with pytest.raises(SlurmError, match="nothing was submitted: squeue did not answer"):
        world.sender(journal).send(MARK)
    world.down = False
    world.moods = [
        lambda: Attempt(Outcome.NOT_SENT, why="(connect failure)"),
        lambda: world.takes(11),
    ]
    with pytest.raises(SlurmError, match="nothing was submitted"):
        world.sender(journal).send(MARK)
    assert world.sender(journal).send(MARK).job_id == 11


def test_again_is_for_tasks_that_have_ended(world: World, journal: Journal) -> None:
    world.jobs = [FoundJob(5, "RUNNING", MARK)]
    with pytest.raises(ConflictError, match="job 5 of the task task-1 is RUNNING"):
        world.sender(journal).send(MARK, again=True)
    world.jobs = [FoundJob(5, "FAILED", MARK)]
    world.moods = [world.hangs]
    # The job of before is no answer to what has become of the new one.
    with pytest.raises(UnknownOutcomeError):
        world.sender(journal).send(MARK, again=True)


MOODS = ("taken", "lost", "early", "refused", "down", "dead")


@settings(max_examples=200)
@given(st.lists(st.sampled_from(MOODS), max_size=12))
def test_whatever_happens_a_task_never_has_two_jobs(
    tmp_path_factory: pytest.TempPathFactory, story: list[str]
) -> None:
    """``dead`` kills the submission behind sbatch, before anything can be written down."""
    journal = Journal(tmp_path_factory.mktemp("j") / "task.json")
    world = World(accounted_jobs=[])
    number = iter(range(1, 100))

    def dead() -> Attempt:
        world.takes(next(number))
        raise KeyboardInterrupt

    def lost() -> Attempt:
        world.takes(next(number))
        return world.hangs()

    moods: dict[str, Callable[[], Attempt]] = {
        "taken": lambda: world.takes(next(number)),
        "lost": lost,
        "early": world.hangs,
        "refused": lambda: Attempt(Outcome.REFUSED, said="no"),
        "down": lambda: Attempt(Outcome.NOT_SENT, why="no"),
        "dead": dead,
    }
    for mood in story:
        world.moods = [moods[mood]]
        with suppress(CraterError, KeyboardInterrupt):
            world.sender(journal).send(MARK)
        world.now += 50
        assert len(world.jobs) <= 1


# Memory.


def test_the_file_is_private_and_apart_by_cluster(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path)}
    first, second = (journal_of("t", cluster, home) for cluster in ("", "/other/slurm.conf"))
    first.begin(Entry("t", "f", 1.0))
    assert second.read() is None
    assert first.read() == Entry("t", "f", 1.0)
    assert first.file is not None
    assert first.file.stat().st_mode & 0o777 == 0o600
    assert str(first.file).startswith(f"{tmp_path}/.local/state/crater/tasks/")
    state = journal_of("t", "", {"XDG_STATE_HOME": str(tmp_path / "s"), "HOME": "/nonexistent"})
    assert str(state.file).startswith(f"{tmp_path}/s/crater/")


def test_without_a_home_nothing_is_remembered(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for environment in ({}, {"HOME": str(tmp_path / "file")}, {"HOME": "relative"}):
        memory = journal_of("t", "", environment)
        assert memory.file is None
        memory.begin(Entry("t", "f", 1.0))
        assert memory.read() is None
        with memory.turn(0):
            pass


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"task_id": 1}', '{"task_id":"t","fingerprint":1,"begun":"x"}']
)
def test_a_damaged_file_is_as_none(journal: Journal, text: str) -> None:
    assert journal.file is not None
    journal.file.write_text(text)
    assert journal.read() is None


def test_nothing_is_sent_that_can_t_be_written_down(world: World, tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    journal = Journal(folder / "task.json")
    with journal.turn(1):
        pass
    (folder / "task.lock").unlink()
    folder.rmdir()
    with pytest.raises(CraterError, match="nothing was submitted"):
        journal.begin(Entry("t", "f", 1.0))
    journal.end(Entry("t", "f", 1.0, 5))


def test_two_submissions_take_turns(journal: Journal) -> None:
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with journal.turn(5):
            entered.set()
            leave.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    entered.wait(30)
    times = iter([0.0, 1.0, 99.0])
    late = Journal(journal.file, sleep=lambda _: None, clock=lambda: next(times))
    with pytest.raises(BusyError, match="another submission of this task"), late.turn(5):
        pass
    waiting = Journal(journal.file, sleep=lambda _: leave.set() or thread.join(30))  # type: ignore[func-returns-value]
    with waiting.turn(600):
        assert not thread.is_alive()


# Waiting.


def follow(*looks: dict[str, str] | str | tuple[str, str]) -> tuple[End, list[str], list[float]]:
    """Wait over these looks at a job: a record, an error, or what the accounting has."""
    said: list[str] = []
    slept: list[float] = []
    left: Iterator[dict[str, str] | str | tuple[str, str]] = iter(looks)

    class Fake(Queue):
        def job(self, job_id: int) -> dict[str, str]:
            look = next(left)
            if isinstance(look, dict):
                return look
            raise SlurmError(look if isinstance(look, str) else "Invalid job id specified")

        def end_of(self, job_id: int) -> tuple[str, str] | None:
            last = looks[-1]
            return last if isinstance(last, tuple) and last[0] else None

    waiter = Waiter(queue=Fake(Client()), say=said.append, steady_seconds=15, sleep=slept.append)
    return waiter.wait(5), said, slept


def pending(reason: str = "Resources") -> dict[str, str]:
    return {"JobState": "PENDING", "Reason": reason}


def test_each_change_is_said_once_and_slurm_is_asked_ever_more_seldom() -> None:
    end, said, slept = follow(
        *[pending()] * 6,
        {"JobState": "RUNNING", "NodeList": "a[1-2]"},
        {"JobState": "COMPLETED", "ExitCode": "0:0"},
    )
    assert (end.state, end.status) == ("COMPLETED", 0)
    assert said == ["PENDING (Resources)", "RUNNING on a[1-2]", "COMPLETED, exit code 0"]
    assert slept == [1, 2, 4, 8, 15, 15, 1]


@pytest.mark.parametrize(
    ("state", "code", "status"),
    [
        ("FAILED", "3:0", 3),
        ("FAILED", "0:9", 137),
        ("FAILED", "0:0", 125),
        ("FAILED", "255:0", 199),
        ("TIMEOUT", "0:15", 124),
        ("DEADLINE", "0:0", 124),
        ("CANCELLED", "0:15", 130),
        ("OUT_OF_MEMORY", "0:125", 137),
        ("COMPLETED", "0:0", 0),
    ],
)
def test_every_end_has_its_exit_status(state: str, code: str, status: int) -> None:
    end, _, _ = follow({"JobState": state, "ExitCode": code})
    assert end.status == status


def test_a_preempted_job_that_is_requeued_has_not_ended() -> None:
    gone = {"JobState": "PREEMPTED", "ExitCode": "0:0"}
    end, said, _ = follow(gone, pending("BeginTime"), {"JobState": "COMPLETED", "ExitCode": "0:0"})
    assert end.state == "COMPLETED"
    assert said[1] == "PENDING (BeginTime)"
    end, _, _ = follow(gone, gone)
    assert (end.state, end.status) == ("PREEMPTED", 125)


def test_a_slurmctld_that_is_away_is_waited_for() -> None:
    end, said, _ = follow("scontrol did not answer", pending(), {"JobState": "COMPLETED"})
    assert end.status == 0
    assert said[0] == "Slurm does not answer: scontrol did not answer"


def test_a_job_that_slurmctld_forgot_is_in_the_accounting_or_nowhere() -> None:
    assert follow(("FAILED", "2:0"))[0] == End("FAILED", 2, 0)
    end, said, _ = follow(("", ""))
    assert (end.status, said) == (
        125,
        ["ended, and neither slurmctld nor the accounting can tell how"],
    )


def test_signals_wait_while_a_task_is_sent() -> None:
    from crater_slurm.cli.signals import Signals, Stopped

    with Signals() as signals:
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Stopped) as stopped:
            signals.listen()
        assert stopped.value.number == signal.SIGTERM
        with pytest.raises(Stopped):
            signal.raise_signal(signal.SIGINT)
        signals.hold()
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
