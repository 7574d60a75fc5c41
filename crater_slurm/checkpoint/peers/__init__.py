"""Copies of a node's checkpoint parts on the node beside it, so that a lost node loses nothing.

Each node of a job sends its newest part to the next one, whose worker keeps it in its own cache:

    <folder>/.peer-<node>/step-000000120.<run>/...       the same layout as everywhere

Nothing here waits for a trainer: a copy that fails is a copy that is missing, and is said so.
"""
