"""crater-io-daemon: prepares a node for each planned job, binds its memory, cleans up after it.

One module per Slurm context (``prolog``, ``task_prolog``, ``epilog``) behind one dispatcher
(``server``); what they use is beside them: cache, cgroups, ledger, binding, environment, report.
It must also start in a guest that has nothing but Python, PyYAML and pydantic.
"""
