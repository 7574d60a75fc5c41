-- Lua 5.1 to 5.4: only what all of them have. slurmctld provides `slurm` and calls the two hooks.
std = "min"
max_line_length = 100
read_globals = { "slurm" }
files["job_submit/job_submit.lua"] = { globals = { "slurm_job_submit", "slurm_job_modify" } }
files["etc/filter.lua"] = { ignore = { "611", "612", "613", "614" } }
