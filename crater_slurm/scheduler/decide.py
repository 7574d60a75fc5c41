"""One submission: the filter's message in, the answer and the record out.

Nothing here waits for anything: no store, no Slurm, no network. Whatever goes wrong lets the job
through unchanged; only a request that can never run, or that can't be read, is refused.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from crater_slurm.errors import UsageError
from crater_slurm.model import token
from crater_slurm.model.directives import DirectiveError, Directives, parse_job
from crater_slurm.model.job import GpuOption, Job, JobKind
from crater_slurm.model.plan import Decision, Mode, NodeScore, Plan, ScoreTerm, Verdict
from crater_slurm.model.request import Request
from crater_slurm.model.slices import share_text
from crater_slurm.placement.outcome import Outcome, Scope
from crater_slurm.scheduler import steering
from crater_slurm.scheduler.health import Board
from crater_slurm.scheduler.state import View
from crater_slurm.slurm import features, hostlist, levers
from crater_slurm.slurm.fields import job_from_fields, planning_fields

#: slurmctld refuses longer comments (MAX_STR_LEN), at submit and at every later update.
COMMENT_LIMIT = 1024
_ANYTHING = "crater: "
#: Of the user's options this much is kept in a record; a node list may be longer than useful.
_LONGEST_OPTION = 500
_MOST_ITEMS = 50
_MOST_SCORES = 20
#: All of them together that a job is planned again from; a list of 5,000 nodes fits.
_LONGEST_SUBMITTED = 65_536


@dataclass(slots=True)
class Answer:
    """What goes back to slurmctld: fields, flags, environment, words; and the record of it."""

    reject: bool = False
    fields: dict[str, str] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    decision: Decision | None = None

    def pairs(self) -> list[tuple[str, str]]:
        """The answer as the frame carries it, see docs/protocols.md."""
        pairs = [("verdict", "reject" if self.reject else "accept")]
        if not self.reject:
            pairs += [(f"set.{name}", value) for name, value in self.fields.items()]
            pairs += [("flag", name) for name in self.flags]
            pairs += [(f"env.{name}", value) for name, value in self.environment.items()]
        pairs += [("message", line) for text in self.messages for line in text.splitlines()]
        pairs += [("log", line) for line in self.log]
        return pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class Decider:
    """Decides submissions under a site's mode. ``key`` gives the signing key or None."""

    mode: Mode
    key: Callable[[], bytes | None]
    consume: frozenset[str] = frozenset({"membw", "nviops", "nvme"})
    prefer: bool = True
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
            return Answer(messages=[_ANYTHING + n for n in shown])
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
            user_name=_kept(message.get("user", "")),
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
        record = _record(decision_id, self.mode, now, Request(), job, outcome, view, message)
        return _refusal(record, outcome, view, [], self.mode)

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
            return _hands_off(notes, "crater-scheduler has not read the cluster yet", mode)
        try:
            job = job_from_fields(message)
            scope = scope_of(job, self.clock())
        except (ValueError, UsageError) as error:
            # Not ours to judge: slurmctld says in its own words what is wrong with the option.
            return _hands_off(notes, f"its Slurm options can't be read ({error})", mode)
        outcome = view.planner.plan(decision_id, directives.request, job, scope)
        if not outcome.known:
            unknown = [p for p in job.partitions if p not in view.planner.inventory.partitions]
            why = "no node that its options allow has a profile (crater nodes import)"
            return _hands_off(
                notes, f"crater knows no partition {unknown[0][:80]!r}" if unknown else why, mode
            )
        now = self.clock()
        record = _record(decision_id, mode, now, directives.request, job, outcome, view, message)
        notes += outcome.notes
        own = message.get("field.prefer", "")
        steered = steering.steer(self.board(), view, outcome, scope, own)
        record = dataclasses.replace(record, health=steered.record)
        if not outcome.feasible:
            return _refusal(record, outcome, view, notes, mode)
        notes += steered.notes
        excluded = outcome.failed | steered.left_out
        prefer = steering.preference(view, outcome, job, scope, steered.left_out)
        if own and not steering.lasts(view, own, outcome, scope, steered.left_out, unread=True):
            notes.append("Slurm refuses a job whose --prefer names too few nodes that can run it")
        if job.het_component:
            notes.append("each component of a heterogeneous job is planned on its own")
        changes = levers.changes(
            outcome.placement,  # type: ignore[arg-type]
            job,
            message,
            exclude=view.hostlist(excluded) if excluded else "",
            prefer=prefer if self.prefer else (),
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
        together = changes.together or not outcome.placement.domains  # type: ignore[union-attr]
        summary = _summary(outcome, together)
        return _accepted(record, summary, changes, environment, notes, mode)

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


def _hands_off(notes: list[str], why: str, mode: Mode) -> Answer:
    text = f"the job is left as it is: {why}"
    shown = [*notes, text] if mode.rank >= Mode.ADVISE.rank else []
    return Answer(messages=[_ANYTHING + n for n in shown], log=[text])


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


def _options(job: Job) -> dict[str, Any]:
    """The user's own options that were stated, for the record."""
    shown: dict[str, Any] = {}
    for entry in dataclasses.fields(job):
        value = getattr(job, entry.name)
        if value in (None, "", (), {}, False) or entry.name in {"user_id", "user_name", "comment"}:
            continue
        if entry.name == "gpus":
            value = [" ".join(_gpu_words(g)) for g in value]
        shown[entry.name] = _kept(value)
    return shown


def _gpu_words(option: GpuOption) -> Iterator[str]:
    yield f"{option.count} shards" if option.shards else str(option.count)
    yield f"per {option.scope}"
    if option.type:
        yield option.type


def _kept(value: Any) -> Any:
    """A user's text as it may be kept and shown: short, and nothing that a terminal obeys."""
    if isinstance(value, str):
        return "".join(c if c.isprintable() else "\ufffd" for c in value[:_LONGEST_OPTION])
    if isinstance(value, list | tuple):
        return [_kept(item) for item in value[:_MOST_ITEMS]]
    if isinstance(value, dict):
        return {_kept(name): item for name, item in list(value.items())[:_MOST_ITEMS]}
    return value


def _replayable(message: Mapping[str, str]) -> dict[str, str]:
    """What planning read, whole or not at all: half a node list would be another job."""
    found = planning_fields(message)
    size = sum(len(value) for value in found.values())
    return found if size <= _LONGEST_SUBMITTED else {}


def _record(
    decision_id: str,
    mode: Mode,
    now: float,
    request: Request,
    job: Job,
    outcome: Outcome,
    view: View,
    message: Mapping[str, str],
) -> Decision:
    return Decision(
        id=decision_id,
        verdict=Verdict.PLANNED if outcome.feasible else Verdict.REFUSED,
        mode=mode,
        time=now,
        user_id=job.user_id,
        user_name=_kept(job.user_name),
        request=request.given(),
        options=_options(job),
        conditions=outcome.conditions,
        nodes_considered=(outcome.passed | outcome.failed).bit_count(),
        nodes_passed=outcome.passed.bit_count(),
        passed_nodes=view.hostlist(outcome.passed),
        excluded=outcome.excluded,
        scores=_scores(outcome),
        nearest_node=outcome.nearest_node,
        smallest_change=outcome.smallest_change,
        plan=outcome.plan,
        submitted=_replayable(message),
        facts=outcome.facts,
    )


def _scores(outcome: Outcome) -> tuple[NodeScore, ...]:
    """The scores of the nodes that can run the job, where there is something to tell them apart."""
    return tuple(
        NodeScore(
            example=group.example,
            count=group.nodes.bit_count(),
            value=round(group.score.value, 4),
            preferred=bool(group.nodes & outcome.preferred),
            terms=tuple(
                ScoreTerm(
                    name=term.name,
                    weight=round(term.weight, 4),
                    value=round(term.value, 4),
                    why=term.why,
                )
                for term in group.score.terms
            ),
        )
        for group in outcome.ranked[:_MOST_SCORES]
        if group.score.terms
    )


def _refusal(
    record: Decision, outcome: Outcome, view: View, notes: list[str], mode: Mode
) -> Answer:
    """No node can: say the need, what is there, the nearest node and the way out."""
    nodes = record.nodes_considered
    if outcome.passed and record.nodes_passed >= outcome.need.nodes:
        failed = view.hostlist(outcome.failed)
        lines = [f"the node list of this job names {failed}, which can't run it"]
    elif outcome.passed:
        lines = [
            f"this job needs {outcome.need.nodes} nodes and only {record.nodes_passed} of {nodes} "
            f"can run it: {record.passed_nodes}"
        ]
    else:
        lines = [f"none of the {nodes} nodes that its options allow can run this job"]
    if outcome.nearest_node:
        lines.append(f"nearest is {outcome.nearest_node}: {'; '.join(outcome.nearest_have)}")
    if outcome.smallest_change:
        lines.append(f"it would fit with {', or with '.join(outcome.smallest_change)}")
    lines.append(f"every condition: crater explain {record.id}")
    record = dataclasses.replace(record, messages=tuple(lines + notes))
    if mode is Mode.OBSERVE:
        return Answer(log=lines, decision=record)
    reject = mode is Mode.ENFORCE
    head = "refused: " if reject else "would be refused: "
    texts = [f"crater: {head}{lines[0]}"]
    texts += [f"crater:   {line}" for line in lines[1:]] + [f"crater: {n}" for n in notes]
    return Answer(reject=reject, messages=texts, log=lines[:1], decision=record)


def _environment(changes: levers.Changes, job: Job) -> dict[str, str]:
    """What sbatch itself would have exported for options that the plan added."""
    per_task = changes.fields.get("cpus_per_task")
    if job.kind is JobKind.INTERACTIVE or not per_task:
        return {}
    # srun reads SRUN_CPUS_PER_TASK from 22.05 on; scripts read SLURM_CPUS_PER_TASK.
    return {"SLURM_CPUS_PER_TASK": per_task, "SRUN_CPUS_PER_TASK": per_task}


def _accepted(
    record: Decision,
    summary: str,
    changes: levers.Changes,
    environment: dict[str, str],
    notes: list[str],
    mode: Mode,
) -> Answer:
    summary = (
        f"{summary}; {record.nodes_passed} of {record.nodes_considered} nodes can run it "
        f"(crater explain {record.id})"
    )
    record = dataclasses.replace(
        record,
        fields=changes.fields | ({"flags": ",".join(changes.flags)} if changes.flags else {}),
        environment=environment,
        messages=(summary, *notes),
    )
    if mode is Mode.OBSERVE:
        return Answer(log=[f"would plan {record.id}: {summary}"], decision=record)
    head = "planned" if mode is Mode.ENFORCE else "would plan"
    answer = Answer(
        messages=[f"crater: {head} {summary}", *(f"crater: {n}" for n in notes)],
        log=[f"plan {record.id}: {summary}"],
        decision=record,
    )
    if mode is Mode.ENFORCE:
        answer.fields = changes.fields
        answer.flags = changes.flags
        answer.environment = environment
    return answer


def _summary(outcome: Outcome, together: bool) -> str:
    """``2 GPUs, 8 cores on one NUMA node``; the NUMA nodes only where Slurm will see to them."""
    need = outcome.need
    parts = [f"{need.gpus} GPU{'s' * (need.gpus > 1)}"] if need.gpus else []
    if share := outcome.share:
        parts = [share_text(share.shards, share.slices, share.memory_mib, share.card)]
    if need.cpus:
        word = "CPU" if need.cpus_are_threads else "core"
        parts.append(f"{need.cpus} {word}{'s' * (need.cpus > 1)}")
    text = ", ".join(parts) or "the job"
    if outcome.plan and need.strict and outcome.plan.domains and together:
        count = outcome.plan.domains
        text += f" on {'one NUMA node' if count == 1 else f'{count} NUMA nodes'}"
    return text + (f" on each of {need.nodes} nodes" if need.nodes > 1 else "")
