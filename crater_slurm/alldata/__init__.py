"""AllData's side of crater: what a task in JSON means, and how it becomes a job."""
