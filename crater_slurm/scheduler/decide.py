"""One submission: the filter's message in, the answer and the record out.

Nothing here waits for anything: no store, no Slurm, no network. Whatever goes wrong lets the job
through unchanged; only a request that can never run, or that can't be read, is refused.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from crater_slurm.errors import UsageError
from crater_slurm.model import token
from crater_slurm.model.directives import DirectiveError, Directives, parse_job
from crater_slurm.model.job import Job, JobKind
from crater_slurm.model.plan import Decision, Mode, Plan, Verdict
from crater_slurm.model.request import Request
from crater_slurm.placement.outcome import Outcome, Scope
from crater_slurm.scheduler import predicting, steering
from crater_slurm.scheduler.answers import PREFIX, Answer, accepted, hands_off, refusal, summary_of
from crater_slurm.scheduler.health import Board
from crater_slurm.scheduler.predicting import NOTHING
from crater_slurm.scheduler.records import kept, record
from crater_slurm.scheduler.state import View
from crater_slurm.slurm import features, hostlist, levers
from crater_slurm.slurm.fields import job_from_fields

#: slurmctld refuses longer comments (MAX_STR_LEN), at submit and at every later update.
COMMENT_LIMIT = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Decider:
    """Decides submissions under a site's mode. ``key`` gives the signing key or None."""

    mode: Mode
    key: Callable[[], bytes | None]
    consume: frozenset[str] = frozenset({"membw", "nviops", "nvme"})
    prefer: bool = True
    predict: Callable[[Request, Job], predicting.Prognosis] = lambda request, job: NOTHING
    preferring: Callable[[Outcome, View], Outcome] = lambda outcome, view: outcome
    board: Callable[[], Board | None] = lambda: None
    clock: Callable[[], float] = time.time
    new_id: Callable[[], str] = lambda: secrets.token_hex(6)

    def decide(self, message: Mapping[str, str], view: View | None) -> Answer:
        """Answer to one filter message. Raises nothing that a message can cause."""
        begin = time.perf_counter()
        if message.get("op") != "submit":
            return Answer(log=[f"job {message.get('record.job_id', '?')} is modified"])
        decision_id = self.new_id()
        comment = token.strip(message.get("field.comment", ""))
        try:
            directives = parse_job(message.get("script"), comment)
        except DirectiveError as error:
            return self._unreadable(decision_id, message, error)
        late = message.get("late_directive")
        notes = list(directives.notes)
        if late and not any(n.startswith(f"line {late}:") for n in notes):
            notes.append(
                f"line {late} of the script is not read: it stands after the first command, "
                "where sbatch too stops reading directives"
            )
        mode = self._mode_of(directives.request)
        if (
            view is not None
            and self.mode is Mode.ENFORCE
            and not (directives and mode is self.mode)
        ):
            refused = self._impossible_shards(decision_id, message, view)
            if refused:
                return refused
        if not directives or mode is Mode.OFF:
            shown = notes if mode.rank >= Mode.ADVISE.rank else []
            return Answer(messages=[PREFIX + n for n in shown])
        answer = self._planned(decision_id, message, directives, notes, mode, view)
        if answer.decision:
            took = (time.perf_counter() - begin) * 1e6
            answer.decision = dataclasses.replace(answer.decision, duration_us=round(took, 1))
        return answer

    def _mode_of(self, request: Request) -> Mode:
        """The site's mode, which a job may only lower."""
        asked = Mode(request.mode) if request.mode else self.mode
        return min(self.mode, asked, key=lambda m: m.rank)

    def _unreadable(
        self, decision_id: str, message: Mapping[str, str], error: DirectiveError
    ) -> Answer:
        """A directive that can't be read: refused when enforcing, so that nobody is surprised."""
        reject = self.mode is Mode.ENFORCE
        words = [f"crater: {problem}" for problem in error.problems]
        if reject:
            words.append("crater: the job is refused; 'crater directives' lists what is valid")
        decision = Decision(
            id=decision_id,
            verdict=Verdict.REFUSED if reject else Verdict.UNTOUCHED,
            mode=self.mode,
            time=self.clock(),
            user_id=_number(message.get("uid")),
            user_name=kept(message.get("user", "")),
            messages=tuple(error.problems),
        )
        shown = words if self.mode.rank >= Mode.ADVISE.rank else []
        return Answer(reject=reject, messages=shown, log=list(error.problems), decision=decision)

    def _impossible_shards(
        self, decision_id: str, message: Mapping[str, str], view: View
    ) -> Answer | None:
        """Refusal of a job that would wait for ever for its --gres=shard, whoever wrote it.

        Slurm lets it pend, and holds back every job behind it. Only what all its nodes are known
        to lack is refused; everything else about such a job is none of ours.
        """
        if view.planner.sharing_policy is None:
            return None
        try:
            job = job_from_fields(message)
            scope = scope_of(job, self.clock())
        except (ValueError, UsageError):
            return None
        shards = tuple(option for option in job.gpus if option.shards)
        if not shards:
            return None
        bare = Job(user_id=job.user_id, user_name=job.user_name, gpus=shards)
        outcome = view.planner.plan(decision_id, Request(), bare, scope)
        if not outcome.known or outcome.passed or outcome.unknown:
            return None
        now = self.clock()
        made = record(decision_id, self.mode, now, Request(), job, outcome, view, message)
        return refusal(made, outcome, view, [], self.mode)

    def _planned(
        self,
        decision_id: str,
        message: Mapping[str, str],
        directives: Directives,
        notes: list[str],
        mode: Mode,
        view: View | None,
    ) -> Answer:
        if view is None:
            return hands_off(notes, "crater-scheduler has not read the cluster yet", mode)
        try:
            job = job_from_fields(message)
            scope = scope_of(job, self.clock())
        except (ValueError, UsageError) as error:
            # Not ours to judge: slurmctld says in its own words what is wrong with the option.
            return hands_off(notes, f"its Slurm options can't be read ({error})", mode)
        prognosis = self.predict(directives.request, job)
        notes += prognosis.notes
        outcome = view.planner.plan(decision_id, directives.request, job, scope, prognosis.expected)
        outcome = self.preferring(outcome, view)
        if not outcome.known:
            unknown = [p for p in job.partitions if p not in view.planner.inventory.partitions]
            why = "no node that its options allow has a profile (crater nodes import)"
            return hands_off(
                notes, f"crater knows no partition {unknown[0][:80]!r}" if unknown else why, mode
            )
        notes += outcome.notes
        own = message.get("field.prefer", "")
        steered = steering.steer(self.board(), view, outcome, scope, own)
        made = record(
            decision_id,
            mode,
            self.clock(),
            directives.request,
            job,
            outcome,
            view,
            message,
            health=steered.record,
            prediction=prognosis.record,
        )
        if not outcome.feasible:
            return refusal(made, outcome, view, notes, mode)
        notes += steered.notes
        prefer = ""
        if self.prefer:
            prefer = steering.preference(view, outcome, job, scope, steered.left_out)
        if own and not steering.lasts(view, own, outcome, scope, steered.left_out, unread=True):
            notes.append("Slurm refuses a job whose --prefer names too few nodes that can run it")
        left_out = outcome.failed | steered.left_out
        return self._carried_out(made, outcome, job, message, view, left_out, prefer, notes)

    def _carried_out(
        self,
        made: Decision,
        outcome: Outcome,
        job: Job,
        message: Mapping[str, str],
        view: View,
        left_out: int,
        prefer: str,
        notes: list[str],
    ) -> Answer:
        """The plan as Slurm is asked for it, signed for the nodes, in words for its user."""
        if job.het_component:
            notes.append("each component of a heterogeneous job is planned on its own")
        placement = outcome.placement
        assert placement is not None
        changes = levers.changes(
            placement,
            job,
            message,
            exclude=view.hostlist(left_out) if left_out else "",
            prefer=prefer,
            gres_names=view.cluster.gres_types & self.consume,
            gres_style=message.get("gres_style", "/"),
        )
        notes += changes.notes
        environment = _environment(changes, job)
        self._sign(outcome.plan, job, message, view, changes, notes)
        # Components of a heterogeneous batch job come without a script too.
        alone = job.kind is JobKind.INTERACTIVE and not job.het_component
        if alone and "cpus_per_task" in changes.fields:
            notes.append(
                f"srun makes its step from its own options: give it "
                f"-c{changes.fields['cpus_per_task']} to use all cores"
            )
        # Nothing to keep together is as good as kept.
        summary = summary_of(outcome, changes.together or not placement.domains)
        return accepted(made, summary, changes, environment, notes, made.mode)

    def _sign(
        self,
        plan: Plan | None,
        job: Job,
        message: Mapping[str, str],
        view: View,
        changes: levers.Changes,
        notes: list[str],
    ) -> None:
        """Put the signed plan behind the user's own comment, where it fits."""
        key = self.key()
        if key is None or plan is None:
            notes.append("no plan key: the node prepares nothing for this job")
            return
        text = token.sign(
            token.SignedPlan(
                plan=plan,
                user_id=job.user_id,
                cluster=view.cluster.name,
                issued=int(self.clock()),
                array=job.array or job.kind is JobKind.CRON,
            ),
            key,
        )
        own = token.strip(message.get("field.comment", ""))
        comment = f"{own} {text}".strip()
        if len(comment.encode("utf-8", "replace")) > COMMENT_LIMIT - 1:
            notes.append(
                f"the job's comment leaves no room for the plan ({COMMENT_LIMIT} characters in "
                "all): it is placed as planned, but the node prepares nothing for it"
            )
            return
        changes.fields["comment"] = comment


def _number(text: str | None) -> int:
    return int(text) if text and text.isascii() and text.isdigit() and len(text) < 20 else -1


def scope_of(job: Job, now: float) -> Scope:
    """The nodes that a job's own options leave. Raises UsageError for one that can't be read."""
    return Scope(
        partitions=job.partitions,
        only=tuple(hostlist.expand(job.node_list)) if job.node_list else None,
        without=tuple(hostlist.expand(job.exclude)) if job.exclude else (),
        features=features.compile_expression(job.features) if job.features else None,
        reservations=tuple(r for r in (job.reservation or "").split(",") if r),
        now=now,
    )


def _environment(changes: levers.Changes, job: Job) -> dict[str, str]:
    """What sbatch itself would have exported for options that the plan added."""
    per_task = changes.fields.get("cpus_per_task")
    if job.kind is JobKind.INTERACTIVE or not per_task:
        return {}
    # srun reads SRUN_CPUS_PER_TASK from 22.05 on; scripts read SLURM_CPUS_PER_TASK.
    return {"SLURM_CPUS_PER_TASK": per_task, "SRUN_CPUS_PER_TASK": per_task}
