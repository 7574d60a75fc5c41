"""The answer of ``crater estimate``: put together once, shown as tables or as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import click

from crater_slurm.catalogue.llms import Known, describe
from crater_slurm.model.workload import Workload
from crater_slurm.placement.prediction.fit import Change, Fit, fit, smallest_change
from crater_slurm.placement.prediction.host import HostNeed, host_needs
from crater_slurm.placement.prediction.memory import Prediction, predict


@dataclass(frozen=True, slots=True)
class Answer:
    """``change`` is None where no card was asked for, or where no change helps."""

    known: Known
    workload: Workload
    prediction: Prediction
    cards: tuple[tuple[str, int, Fit], ...]
    host: tuple[HostNeed, ...]
    on: tuple[str, int, Fit] | None
    change: Change | None


def answer(
    workload: Workload,
    *,
    cards: Sequence[tuple[str, int]],
    on: tuple[str, int] | None,
    headroom: float,
    io_pattern: str,
) -> Answer:
    """Everything that is told of ``workload``, whose model's size is known."""
    known = describe(workload)
    assert known is not None
    asked = fit(workload, on[1], headroom=headroom, known=known) if on else None
    return Answer(
        known=known,
        workload=workload,
        prediction=asked.prediction if asked else predict(workload, known),
        cards=tuple(
            (name, memory, fit(workload, memory, headroom=headroom, known=known))
            for name, memory in sorted(cards, key=lambda card: card[1])
        ),
        host=host_needs(workload, known, io_pattern=io_pattern),
        on=(*on, asked) if on and asked else None,
        change=smallest_change(workload, on[1], headroom=headroom) if on else None,
    )


def document(found: Answer) -> dict[str, Any]:
    """The answer as plain data; memory in bytes of one GPU, cards in MiB as drivers state it."""
    p = found.prediction
    result: dict[str, Any] = {
        "model": {"name": found.known.name, "source": found.known.note,
                  "architecture": asdict(found.known.architecture)},
        "memory": {
            "expected": round(p.expected), "lower": round(p.lower), "upper": round(p.upper),
            "needed": round(p.needed), "decided_by": p.decided_by, "highest_at": p.point,
            "recipe": p.recipe, "assumed": list(p.assumed),
            "terms": [{"name": t.name, "bytes": round(t.bytes), "why": t.why} for t in p.terms],
        },
        "cards": [
            {"card": name, "memory_mib": memory, "fits": each.fits, "needed_mib": each.needed_mib}
            for name, memory, each in found.cards
        ],
        "host": [asdict(need) for need in found.host],
    }  # fmt: skip
    if found.on:
        name, memory, asked = found.on
        result["on"] = {
            "card": name,
            "memory_mib": memory,
            "fits": asked.fits,
            "needed_mib": asked.needed_mib,
            "change": list(found.change.directives) if found.change else None,
        }
    return result


def show(found: Answer) -> None:
    """Tables for a person."""
    from crater_slurm.cli.output import print_table

    p = found.prediction
    click.echo(f"{found.known.name}: {found.known.note}")
    click.echo(f"recipe {p.recipe}, highest at {p.point}\n")
    print_table(["term", "GB", "why"], [(t.name, _gb(t.bytes), t.why) for t in p.terms])
    click.echo(
        f"\nOne GPU: {_gb(p.expected)} GB ({p.expected / 2**30:.1f} GiB), with 95 % between "
        f"{_gb(p.lower)} and {_gb(p.upper)} GB; decided by: {p.decided_by}"
    )
    if p.assumed:
        click.echo("assumed, since not said: " + "; ".join(p.assumed))
    if found.on:
        _show_on(found)
    else:
        _show_cards(found)
    click.echo("")
    print_table(
        ["host, per GPU", "expected", "95 %", "why"],
        [
            (need.name, f"{_short(need.expected)} {need.unit}".strip(),
             f"{_short(need.lower)} to {_short(need.upper)}", need.why)
            for need in found.host
        ],
    )  # fmt: skip


def _show_cards(found: Answer) -> None:
    fitting = [(name, memory) for name, memory, each in found.cards if each.fits]
    click.echo("")
    if not fitting:
        name, memory, each = found.cards[-1]
        click.echo(
            f"fits on no card: it may need {each.needed_mib} MiB of each GPU, and the largest, "
            f"{name}, has {memory}; --on {name.split(' ')[0]} says what would make it fit"
        )
        return
    not_fitting = [name for name, _, each in found.cards if not each.fits]
    click.echo("fits on:    " + ", ".join(name for name, _ in fitting))
    if not_fitting:
        click.echo("not on:     " + ", ".join(not_fitting))


def _show_on(found: Answer) -> None:
    assert found.on is not None
    name, memory, asked = found.on
    click.echo(
        f"\non {name} ({memory} MiB): "
        + ("fits" if asked.fits else "does not fit")
        + f", it may need {asked.needed_mib} MiB of {asked.usable_mib}"
    )
    if asked.fits:
        return
    if found.change is None:
        click.echo(
            "no change of batch, length, method, optimiser or up to 64 GPUs would make it fit"
        )
        return
    click.echo(
        f"it would fit with {' '.join(found.change.directives)}: {found.change.fit.needed_mib} MiB"
    )


def _gb(value: float) -> str:
    return f"{value / 1e9:.2f}"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
