"""``crater explain`` and ``crater check``: what was asked, what is there, and why."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from crater_slurm.cli.context import loaded
from crater_slurm.errors import CraterError, SlurmError, UsageError
from crater_slurm.files import is_file

if TYPE_CHECKING:
    from crater_slurm.slurm.client import Client


@dataclass(slots=True)
class Explained:
    """Everything that is known of one decision, from the scheduler and from Slurm."""

    decision: dict[str, Any] = field(default_factory=dict)
    grants: list[dict[str, Any]] = field(default_factory=list)
    observations: list[dict[str, Any]] = field(default_factory=list)
    actions: list[dict[str, Any]] = field(default_factory=list)
    job: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@click.command()
@click.argument("what")
@click.option("--json", "as_json", is_flag=True, help="The whole record as JSON.")
def explain(what: str, as_json: bool) -> None:
    """Say why a job went where it went, or why it waits or was refused.

    WHAT is a job id, a plan id (from the submit message), or a batch script.
    """
    # Job ids have at most ten digits; a plan's twelve characters may happen to be digits too.
    if re.fullmatch(r"\d{1,10}([_+]\d+)?", what):
        result = _explain_job(what)
    elif is_file(what):
        result = _check(Path(what), ())
    else:
        result = _explain_plan(what)
    _show(result, as_json)


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("script", type=click.Path(path_type=Path))
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
@click.option("--json", "as_json", is_flag=True, help="The whole record as JSON.")
def check(script: Path, options: tuple[str, ...], as_json: bool) -> None:
    """Say what SCRIPT would get, without submitting it.

    OPTIONS are sbatch's own. Slurm itself reads script and options (sbatch --test-only), so the
    answer is the one that a submission would get now.
    """
    if not is_file(script):
        raise UsageError(f"there is no script {script}")
    result = _check(script, options)
    _show(result, as_json)
    if result.decision.get("verdict") == "refused":
        click.get_current_context().exit(1)


def slurm_client() -> Client:
    from crater_slurm.slurm.client import Client

    slurm = loaded().settings.slurm
    return Client(bin_dir=slurm.bin_dir, conf=slurm.conf, timeout_seconds=slurm.timeout_seconds)


def _fetch(key: str, result: Explained) -> None:
    from crater_slurm.scheduler import client

    answer = client.decision(loaded().settings.scheduler.url, key)
    result.decision = answer["decision"]
    result.grants = answer["grants"]
    result.observations = answer.get("observations", [])
    result.actions = answer.get("actions", [])
    result.notes += answer.get("notes", [])


def _explain_plan(plan_id: str) -> Explained:
    result = Explained()
    _fetch(plan_id, result)
    return result


def _explain_job(job_id: str) -> Explained:
    from crater_slurm.model import token

    result = Explained(job=slurm_client().job(job_id))
    payload = token.read_unverified(result.job.get("Comment", ""))
    if payload is None:
        result.notes.append("this job has no crater plan: it had no directives, or mode=off")
        return result
    try:
        _fetch(str(payload.get("i", "")), result)
    except CraterError as error:
        # The plan travels with the job, so the essence is known even then.
        result.notes.append(f"only the plan in the job's comment is known: {error}")
        result.decision = {"id": payload.get("i"), "plan": _plan_of(payload)}
    return result


def _plan_of(payload: dict[str, Any]) -> dict[str, Any]:
    from crater_slurm.model.token import plan_fields

    return plan_fields(payload)


def _check(script: Path, options: tuple[str, ...]) -> Explained:
    """Let Slurm parse the script without submitting it, and fetch what crater decided."""
    from crater_slurm.cli import test_only

    done = test_only.run(slurm_client(), script, options)
    result = Explained()
    said = list(done.said)
    result.notes += [f"Slurm: {line}" for line in said if line and not line.startswith("crater:")]
    from crater_slurm.scheduler.client import NotFoundError

    try:
        _fetch(done.nonce, result)
    except NotFoundError:
        result.notes += [line for line in said if line.startswith("crater:")]
        if done.failed:
            raise SlurmError("\n".join(said) or "sbatch --test-only failed") from None
        result.notes.append(
            "crater made no decision: the script has no directives, mode=off, or the filter is off"
        )
    return result


def _show(result: Explained, as_json: bool) -> None:
    if as_json:
        document = {
            "decision": result.decision,
            "grants": result.grants,
            "observations": result.observations,
            "actions": result.actions,
            "job": result.job,
            "notes": result.notes,
        }
        click.echo(json.dumps(document, indent=2, ensure_ascii=False))
        return
    from crater_slurm.cli.explanation import lines

    for line in lines(
        result.decision,
        result.grants,
        result.job,
        result.notes,
        observations=result.observations,
        actions=result.actions,
    ):
        click.echo(line)
