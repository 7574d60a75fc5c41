"""Where a job strands least: what a node's rest is still good for, as a score over the cluster."""
