"""The brain: pure functions from profiles, cluster and request to a plan with its reasons.

Knows no I/O and no Slurm syntax. A decision runs through stages, one module each: ``need`` (what
is really asked), ``rules`` with ``abilities``, ``mig`` and ``numa`` (which nodes can), ``advice``
(what would help when none can), ``planner`` (the decision), ``site`` (what partitions and
reservations say beside it). Prediction refines the need before the rules, and health scores
the nodes after them: ``planner.plan`` takes both as arguments.
"""
