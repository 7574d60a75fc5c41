"""An explanation as text: pure, from the records to lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from crater_slurm.cli import observed_view
from crater_slurm.model.request import BY_ATTRIBUTE
from crater_slurm.model.slices import share_text
from crater_slurm.model.units import format_mib


def lines(
    decision: Mapping[str, Any],
    grants: Sequence[Mapping[str, Any]],
    job: Mapping[str, str],
    notes: Sequence[str],
    observations: Sequence[Mapping[str, Any]] = (),
    actions: Sequence[Mapping[str, Any]] = (),
) -> Iterator[str]:
    """Lines for a person: request, conditions, nodes, Slurm, what was done, what the job got."""
    if job:
        yield from _job(job)
    if decision:
        yield from _decision(decision)
    if actions:
        yield ""
        yield "What crater did while it waited"
        for action in actions:
            yield _action(action)
    if grants or observations:
        yield ""
        yield "What the job got"
        for grant in grants:
            yield from _grant(grant)
        for seen in observations:
            yield f"  seen on {seen['node']} for {observed_view.span(seen)}:"
            yield f"    {observed_view.sentence(seen)}"
    if notes:
        yield ""
        yield from notes


def _job(job: Mapping[str, str]) -> Iterator[str]:
    state, reason = job.get("JobState", "?"), job.get("Reason", "None")
    text = f"Job {job.get('JobId', '?')} ({job.get('JobName', '')}) is {state}"
    if reason not in ("None", ""):
        text += f"; Slurm's reason: {reason}"
    if job.get("NodeList", "(null)") not in ("(null)", ""):
        text += f"; on {job['NodeList']}"
    yield text


def _decision(decision: Mapping[str, Any]) -> Iterator[str]:
    verdict = decision.get("verdict")
    if verdict:
        when = datetime.fromtimestamp(decision["time"]).astimezone().isoformat(" ", "seconds")
        yield (
            f"Plan {decision['id']}: {verdict} ({decision.get('mode')}), {when}, "
            f"decided in {decision.get('duration_us', 0) / 1000:.2f} ms"
        )
    if request := decision.get("request"):
        yield "  asked    " + " ".join(_directive(k, v) for k, v in request.items())
    if options := decision.get("options"):
        yield "  options  " + " ".join(f"{k.replace('_', '-')}={v}" for k, v in options.items())
    if conditions := decision.get("conditions"):
        yield ""
        yield from _conditions(conditions)
    if "nodes_considered" in decision and conditions:
        yield ""
        yield (
            f"Nodes: {decision['nodes_passed']} of {decision['nodes_considered']} can run it"
            + (f": {decision['passed_nodes']}" if decision.get("passed_nodes") else "")
        )
        for example, count, reason in decision.get("excluded", ()):
            who = example if count == 1 else f"{count} nodes such as {example}"
            yield f"  not {who}: {reason}"
    yield from _prediction(decision.get("prediction", {}))
    if scores := decision.get("scores"):
        yield ""
        yield from _scores(scores)
    yield from _health(decision.get("health", {}))
    if decision.get("nearest_node") and verdict == "refused":
        yield f"Nearest: {decision['nearest_node']}"
    if change := decision.get("smallest_change"):
        yield "It would fit with " + ", or with ".join(change)
    if plan := decision.get("plan"):
        yield ""
        yield "Plan, per node: " + ", ".join(_plan_words(plan))
    yield from (f"  {fact}" for fact in decision.get("facts", ()))
    if fields := decision.get("fields"):
        verb = "Asked of Slurm" if decision.get("mode") == "enforce" else "Would be asked of Slurm"
        yield f"{verb}: " + ", ".join(
            f"{name}={_short(str(value))}" for name, value in fields.items() if name != "comment"
        )
    # The first sums up what stands above; of directives that can't be read nothing does.
    for message in decision.get("messages", ())[1 if conditions else 0 :]:
        if not (decision.get("prediction") and message.startswith("predicted for each GPU")):
            yield f"Note: {message}"


def _directive(attribute: str, value: Any) -> str:
    """A requirement as its user wrote it; one of a newer version as it is."""
    requirement = BY_ATTRIBUTE.get(attribute)
    return requirement.format(value) if requirement else f"{attribute}={value}"


def _conditions(conditions: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    rows = [("condition", "need", "best there is", "nodes")]
    for c in conditions:
        total = c["passed_nodes"] + c["failed_nodes"]
        rows.append((c["name"], c["need"], c["have"], f"{c['passed_nodes']} of {total}"))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    for i, row in enumerate(rows):
        mark = " " if i == 0 else ("✓" if conditions[i - 1]["passed_nodes"] else "✗")
        yield (
            f"  {mark} "
            + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )


def _prediction(found: Mapping[str, Any]) -> Iterator[str]:
    """What was predicted of the workload: the interval, what decided, each term."""
    if "expected_mib" not in found:
        return
    yield ""
    source = {"observed": f"corrected by {found.get('peaks', 0)} peaks that were seen"}
    yield (
        f"Predicted for each GPU: {format_mib(found['expected_mib'])} "
        f"({format_mib(found['lower_mib'])} to {format_mib(found['upper_mib'])}), "
        f"{found['model']} with {found['recipe']}, "
        f"{source.get(found['decided_by'], 'by ' + found['decided_by'])}"
    )
    for term in found.get("terms", ()):
        yield f"  {format_mib(term['mib']):>10}  {term['name']}: {term['why']}"
    if found.get("host"):
        yield "  and of the host, for each GPU or as said"
    for need in found.get("host", ()):
        yield (
            f"  {need['expected']:>7g} {need['unit']}  {need['name']} "
            f"({need['lower']:g} to {need['upper']:g})"
        )
    for assumed in found.get("assumed", ()):
        yield f"  assumed: {assumed}"


def _scores(scores: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Each group of nodes with its score and what it is made of; a star for the preferred."""
    yield "Score of the nodes that can run it (* preferred)"
    for entry in scores:
        who = (
            entry["example"]
            if entry["count"] == 1
            else f"{entry['count']} such as {entry['example']}"
        )
        yield f"  {'*' if entry.get('preferred') else ' '} {entry['value']:.2f}  {who}"
        for term in entry.get("terms", ()):
            yield (
                f"      {term['weight']:.2f} x {term['value']:.2f}  {term['name']}: {term['why']}"
            )


def _health(health: Mapping[str, Any]) -> Iterator[str]:
    """Degraded nodes among those that can run the job, with what is wrong there."""
    told = health.get("degraded", ())
    for node in told:
        seen = "; ".join(f"{t['name']}: {t['seen']}" for t in node.get("worst", ()))
        yield f"  degraded {node['node']}: score {node['score']:.2f}" + (
            f" ({seen})" if seen else ""
        )
    if (more := health.get("degraded_nodes", 0) - len(told)) > 0:
        yield f"  degraded too: {more} more nodes"
    if health.get("left_out"):
        yield f"  left out for their health: {health['left_out']}"


def _plan_words(plan: Mapping[str, Any]) -> Iterator[str]:
    if plan.get("shards"):
        yield share_text(
            plan["shards"], plan.get("slices", 0), plan.get("gpu_memory_mib", 0), plan.get("card")
        )
    elif plan.get("gpus"):
        kind = f" ({plan['gpu_type']})" if plan.get("gpu_type") else ""
        yield f"{plan['gpus']} GPU{'s' * (plan['gpus'] > 1)}{kind}"
    if plan.get("cpus"):
        yield f"{plan['cpus']} core{'s' * (plan['cpus'] > 1)}"
    if plan.get("domains"):
        yield f"on {plan['domains']} NUMA node{'s' * (plan['domains'] > 1)}"
    units = (
        ("memory_bandwidth_gb_s", "GB/s"),
        ("ssd_iops", "IOPS"),
        ("cache_gb", "GB of NVMe cache"),
    )
    for name, unit in units:
        if plan.get(name):
            yield f"{plan[name]:.12g} {unit}"
    yield from _checkpoint_words(plan)
    yield f"numa={plan.get('numa', 'best_effort')}"


def _checkpoint_words(plan: Mapping[str, Any]) -> Iterator[str]:
    where = {"on": "to the site's place", "off": "off"}
    if place := plan.get("checkpoint"):
        yield f"checkpoints {where.get(place, f'to {_short(place)}')}"
    if plan.get("checkpoint_credentials"):
        yield f"credentials {_short(plan['checkpoint_credentials'])}"
    if plan.get("checkpoint_keep"):
        yield f"the last {plan['checkpoint_keep']} kept"
    if plan.get("checkpoint_keep_every"):
        yield f"every {plan['checkpoint_keep_every']} steps kept"
    if plan.get("ring_gb"):
        yield f"a ring of {plan['ring_gb']} GB"
    if plan.get("stage"):
        yield f"a copy of {_short(plan['stage'])}"


def _short(text: str, limit: int = 120) -> str:
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


def _action(action: Mapping[str, Any]) -> str:
    when = datetime.fromtimestamp(action["time"]).astimezone().isoformat(" ", "seconds")
    value = f" {_short(action['value'])}" if action.get("value") else ""
    outcome = {"done": "", "noted": ""}.get(action["outcome"], f" [{action['outcome']}]")
    return (
        f"  {when}  job {_short(action['job'])}  {action['kind']}: {action['action']}{value}"
        f"{outcome}: {action['message']}"
    )


def _grant(grant: Mapping[str, Any]) -> Iterator[str]:
    got = grant["got"]
    yield f"  on {grant['node']} ({got.get('phase', '?')}):"
    for name, value in got.items():
        if name != "phase" and value not in (None, "", [], {}):
            yield f"    {name.replace('_', ' ')}: {_short(_plain(value))}"


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(_plain(v) for v in value)
    if isinstance(value, dict):
        return ", ".join(f"{k} {_plain(v)}" for k, v in value.items())
    return str(value)
