"""What may be removed from a destination once a step arrived there: by the rules, and leftovers.

Only steps of this job are touched, as their manifests say, and only what crater puts into them. Of
a job's nodes the one with rank 0 removes complete steps; each removes its own parts of steps that
never got complete.
"""

from __future__ import annotations

from collections.abc import Callable

from crater_slurm.checkpoint import keep
from crater_slurm.checkpoint.remote import catalogue
from crater_slurm.checkpoint.remote.catalogue import Catalogue, Stored
from crater_slurm.checkpoint.remote.store import CLAIM, RemoteError, Store
from crater_slurm.checkpoint.spec import Spec
from crater_slurm.job import layout


def clean(
    store: Store,
    known: Catalogue,
    spec: Spec,
    arrived: layout.Manifest,
    log: Callable[[str, str], None],
) -> None:
    """Remove what a part that has just arrived makes needless; a failure leaves it to the next."""
    try:
        there = known.steps(arrived.name)
        key = (arrived.name, arrived.step, arrived.run)
        now = next((s for s in there if (s.name, s.step, s.run) == key), None)
        if now is not None and now.complete and min(arrived.ranks) == 0:
            _replace(store, there, now)
            _thin_out(store, spec, there, log)
        _withdraw(store, spec, there)
    except RemoteError as error:
        log("warning", f"Old steps stay for now: {error}")


def _replace(store: Store, there: list[Stored], newer: Stored) -> None:
    """Remove the same step of older runs, once the newer is complete."""
    for stored in there:
        if stored.folder != newer.folder and catalogue.outdated(stored, newer):
            catalogue.remove(store, stored.folder)
    plain = layout.step_name(newer.step, newer.name)
    if newer.folder != plain and not any(s.folder == plain for s in there):
        owner = store.get_text(f"{plain}/{CLAIM}")
        if owner is not None and catalogue.earlier(owner, newer.run):
            catalogue.remove(store, plain)


def _thin_out(
    store: Store, spec: Spec, there: list[Stored], log: Callable[[str, str], None]
) -> None:
    own = {stored.item: stored for stored in there if stored.job_id == spec.job_id}
    for item in keep.removable(list(own), spec.keep_last, spec.keep_every):
        folder = own[item].folder
        if sum(stored.folder == folder for stored in there) == 1:
            catalogue.remove(store, folder)
            log("info", f"{folder} removed from {store.where} by the keep rules.")


def _withdraw(store: Store, spec: Spec, there: list[Stored]) -> None:
    """Remove this node's part of steps that never got complete and are needless by now."""
    own = [stored for stored in there if stored.job_id == spec.job_id]
    complete = [stored.item for stored in own if stored.complete]
    for stored in own:
        if stored.complete or not keep.superseded(
            stored.item, complete, spec.keep_last, spec.keep_every
        ):
            continue
        for part in stored.parts:
            own_run = layout.is_of_run(part.run, spec.run)
            over = own_run or catalogue.earlier(part.run, spec.run)
            if over and part.node == spec.node:
                catalogue.remove_part(store, stored.folder, part)
