"""``crater-probe serve``: keeps the scheduler's picture of this node current, and shows metrics."""
