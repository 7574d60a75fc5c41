"""Decisions as JSON data, and back.

They are read tolerantly, since only crater writes them, and an older ``crater explain`` must show
what a newer scheduler decided.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from crater_slurm.errors import StoreError
from crater_slurm.model.plan import Condition, Decision, Mode, NodeScore, Plan, ScoreTerm, Verdict
from crater_slurm.store.codec import field_names, plain


def decision_to_dict(decision: Decision) -> dict[str, Any]:
    """The decision as JSON data, complete."""
    return cast("dict[str, Any]", plain(decision))


def decision_from_dict(data: Mapping[str, Any]) -> Decision:
    """The decision of such data; keys that this version doesn't know are left out.

    Raises StoreError when what makes a decision is missing or of a kind unknown here.
    """
    fields = _known(Decision, data)
    try:
        fields["verdict"] = Verdict(fields["verdict"])
        fields["mode"] = Mode(fields["mode"])
        fields["conditions"] = tuple(
            Condition(
                **{**entry, "failed_examples": tuple(entry.get("failed_examples", ()))},
            )
            for entry in (_known(Condition, item) for item in fields.get("conditions", ()))
        )
        fields["excluded"] = tuple(
            (str(nodes), int(count), str(reason))
            for nodes, count, reason, *_ in fields.get("excluded", ())
        )
        fields["scores"] = tuple(_score(entry) for entry in fields.get("scores", ()))
        for name in ("smallest_change", "messages"):
            fields[name] = tuple(fields.get(name, ()))
        if fields.get("plan") is not None:
            fields["plan"] = Plan(**_known(Plan, fields["plan"]))
        return Decision(**fields)
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(
            f"can't read the decision {data.get('id', '?')}: {error}; it may come from a newer "
            "crater-slurm"
        ) from error


def _score(data: Mapping[str, Any]) -> NodeScore:
    terms = tuple(ScoreTerm(**_known(ScoreTerm, term)) for term in data.get("terms", ()))
    return NodeScore(**{**_known(NodeScore, data), "terms": terms})


def _known(kind: type, data: Mapping[str, Any]) -> dict[str, Any]:
    names = field_names(kind)
    return {key: value for key, value in data.items() if key in names}
