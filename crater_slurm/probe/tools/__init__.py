"""What tools print of a machine: pure parsers, each with a thin reader that runs its tool.

A parser takes text and returns typed data, or raises one CraterError that says what it could not
read; a reader never raises for what the machine does, and says in a note why it has nothing.
"""
