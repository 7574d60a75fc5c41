"""What slurmctld is answered: fields, flags, environment and words, by mode and outcome."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from crater_slurm.model.plan import Decision, Mode
from crater_slurm.model.slices import share_text
from crater_slurm.placement.outcome import Outcome
from crater_slurm.scheduler.state import View
from crater_slurm.slurm import levers

PREFIX = "crater: "


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


def hands_off(notes: list[str], why: str, mode: Mode) -> Answer:
    text = f"the job is left as it is: {why}"
    shown = [*notes, text] if mode.rank >= Mode.ADVISE.rank else []
    return Answer(messages=[PREFIX + n for n in shown], log=[text])


def refusal(record: Decision, outcome: Outcome, view: View, notes: list[str], mode: Mode) -> Answer:
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


def accepted(
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


def summary_of(outcome: Outcome, together: bool) -> str:
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
