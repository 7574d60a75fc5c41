-- /etc/crater/filter.lua: crater's submit filter, as slurmctld runs it.
--
-- Read again within a few seconds after a change; no restart needed. Every line is optional, and
-- the values below are the defaults. A mistake here is logged by slurmctld and costs no job.
-- SlurmUser must be able to read this file.

return {
  -- Where crater-scheduler listens (its setting filter.socket).
  -- socket = "/run/crater/filter.sock",

  -- Milliseconds for connecting, asking and answering together. slurmctld waits this long at most.
  -- deadline_ms = 100,

  -- After a failure the next jobs pass without asking, for this many seconds.
  -- breaker_seconds = 30,

  -- What happens to a job with crater directives when nobody answers: "accept" or "reject".
  -- unavailable = "accept",

  -- While this file exists, the filter does nothing at all.
  -- off_switch = "/etc/crater/off",

  -- Which jobs are sent to the scheduler: those with crater "directives", or "always" all of them.
  -- ask = "directives",
}
