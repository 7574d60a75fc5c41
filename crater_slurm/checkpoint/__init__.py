"""The checkpoint worker: one process per job, as the job's user, from ring to disk to destination.

crater-io-daemon starts it and hands it the trainers' connections. It lives outside the job's
cgroup, so it goes on when the job ends and when the daemon dies. It imports the standard library
and what its destination needs, refuses to touch anything outside the job's own folders and
destination, and holds no other user's data.
"""
