"""Tells which nodes a ``--constraint`` expression could match.

Only as much of the grammar as is needed to know that a node can not match: names, ``&``, ``|``
and parentheses. Counts (``*4``), alternatives in ``[]`` and node_features plugins that change
features by rebooting are left to Slurm: ``compile_expression`` answers None, which means any node.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Set

_TOKEN = re.compile(r"\s*([&|()]|[^&|()\s]+)")
Predicate = Callable[[Set[str]], bool]


def compile_expression(text: str) -> Predicate | None:
    """Predicate over a node's features, or None when this grammar can't decide."""
    if not text or any(c in text for c in "*[]{}"):
        return None
    tokens = _TOKEN.findall(text)
    if "".join(tokens) != re.sub(r"\s", "", text):
        return None
    position = 0

    def expression() -> Predicate:
        # Slurm reads & and | from left to right without precedence.
        nonlocal position
        left = term()
        while position < len(tokens) and tokens[position] in "&|":
            operator = tokens[position]
            position += 1
            left = _combine(operator, left, term())
        return left

    def term() -> Predicate:
        nonlocal position
        word = tokens[position]
        position += 1
        if word == "(":
            inner = expression()
            if tokens[position] != ")":
                raise IndexError
            position += 1
            return inner
        if word in "&|)":
            raise IndexError
        return lambda features: word in features

    try:
        predicate = expression()
    except IndexError:
        return None  # malformed: Slurm says so itself, better than we could
    return predicate if position == len(tokens) else None


def _combine(operator: str, left: Predicate, right: Predicate) -> Predicate:
    if operator == "&":
        return lambda features: left(features) and right(features)
    return lambda features: left(features) or right(features)
