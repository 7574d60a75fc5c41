"""Tells which nodes a ``--constraint`` expression could match.

Only as much of the grammar as is needed to know that a node can not match: names, ``&``, ``|``
and parentheses. Counts (``*4``), alternatives in ``[]`` and node_features plugins that change
features by rebooting are left to Slurm: ``compile_expression`` answers None, which means any node.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Set
from typing import TypeAlias

_TOKEN = re.compile(r"\s*([&|()]|[^&|()\s]+)")
Predicate = Callable[[Set[str]], bool]
#: Terms, each a name or a chain in parentheses, with the operator before it.
_Chain: TypeAlias = list[tuple[str, "str | _Chain"]]
_DEEPEST = 50
_LONGEST = 1024  # as Slurm has it


def compile_expression(text: str) -> Predicate | None:
    """Predicate over a node's features, or None when this grammar can't decide."""
    if not text or len(text) > _LONGEST or any(c in text for c in "*[]{}"):
        return None
    tokens = _TOKEN.findall(text)
    if "".join(tokens) != re.sub(r"\s", "", text):
        return None
    try:
        tree, rest = _chain(tokens, 0, 0)
    except _MalformedError:
        return None  # Slurm says so itself, better than we could
    return (lambda features: _holds(tree, features)) if rest == len(tokens) else None


class _MalformedError(Exception):
    """The expression ends where a name should stand, or is nested too deep to be meant."""


def _chain(tokens: list[str], position: int, depth: int) -> tuple[_Chain, int]:
    """Terms with their operators up to a closing parenthesis or the end, and where that is.

    Slurm reads & and | from left to right without precedence, so a chain stays flat.
    """
    if depth > _DEEPEST:
        raise _MalformedError
    chain: _Chain = []
    operator = "|"  # nothing | the first term
    while True:
        word = tokens[position] if position < len(tokens) else ")"
        position += 1
        if word in ("&", "|", ")"):
            raise _MalformedError
        term: str | _Chain = word
        if word == "(":
            term, position = _chain(tokens, position, depth + 1)
            if position >= len(tokens):
                raise _MalformedError
            position += 1  # a chain ends before its parenthesis or at the end
        chain.append((operator, term))
        if position >= len(tokens) or tokens[position] == ")":
            return chain, position
        if tokens[position] not in ("&", "|"):
            raise _MalformedError
        operator = tokens[position]
        position += 1


def _holds(chain: _Chain, features: Set[str]) -> bool:
    result = False
    for operator, term in chain:
        if (operator == "&") is result:  # else the left side has settled it
            result = term in features if isinstance(term, str) else _holds(term, features)
    return result
