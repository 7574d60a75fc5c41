-- What the filter reads from a job and what it may write: names, kinds and Slurm's ways of saying
-- "unset". docs/protocols.md lists the same names.

local fields = {}

-- Highest value of each width that is a value: the last two of a width mean INFINITE and NO_VAL,
-- the one before them is reserved. 64-bit fields end where a double stops being exact.
local HIGHEST = { [16] = 65532, [32] = 4294967292, [64] = 9007199254740992 }

-- Fields by kind: "string", or the width of a number. 65534 means unset in a 16-bit field only;
-- as megabytes of memory it is a plain value.
fields.KIND = {
  comment = "string", extra = "string", admin_comment = "string",
  partition = "string", qos = "string", account = "string", array_inx = "string",
  gres = "string", tres_per_node = "string", tres_per_job = "string",
  tres_per_socket = "string", tres_per_task = "string", tres_bind = "string",
  cpus_per_tres = "string", mem_per_tres = "string",
  features = "string", prefer = "string", exc_nodes = "string", req_nodes = "string",
  licenses = "string", reservation = "string",
  ntasks_per_node = 16, ntasks_per_socket = 16, ntasks_per_gpu = 16, cpus_per_task = 16,
  sockets_per_node = 16, cores_per_socket = 16, threads_per_core = 16, shared = 16,
  segment_size = 16, immediate = 16,
  min_nodes = 32, max_nodes = 32, num_tasks = 32, min_cpus = 32, time_limit = 32,
  min_mem_per_node = 64, min_mem_per_cpu = 64, bitflags = 64,
}

-- Sent to the daemon, in this order.
fields.SENT = {
  "comment", "partition", "gres", "tres_per_node", "tres_per_job", "tres_per_socket",
  "tres_per_task", "min_nodes", "max_nodes", "num_tasks", "ntasks_per_node",
  "ntasks_per_socket", "ntasks_per_gpu", "cpus_per_task", "min_cpus", "min_mem_per_node",
  "min_mem_per_cpu", "features", "prefer", "exc_nodes", "req_nodes", "sockets_per_node",
  "cores_per_socket", "threads_per_core", "bitflags", "shared", "array_inx", "time_limit",
  "immediate", "qos", "account", "cpus_per_tres", "mem_per_tres", "tres_bind", "reservation",
}

-- Assignable by the answer, in the order of assignment. Whose job it is, what it runs and what it
-- costs (account, qos, priority, time, script, array) are not ours to change. Memory comes last
-- because Lua can't put "unset" back there: 2^64-2 is no double.
fields.SETTABLE = {
  "comment", "extra", "admin_comment", "partition", "features", "prefer", "exc_nodes",
  "req_nodes", "licenses", "gres", "tres_per_node", "tres_per_job", "tres_per_socket",
  "tres_per_task", "tres_bind", "cpus_per_tres", "mem_per_tres", "min_nodes", "max_nodes",
  "num_tasks", "ntasks_per_node", "ntasks_per_socket", "ntasks_per_gpu", "cpus_per_task",
  "min_cpus", "sockets_per_node", "cores_per_socket", "threads_per_core", "shared",
  "segment_size", "min_mem_per_node", "min_mem_per_cpu",
}

-- Users put these where a Prolog can see them, so a copied plan could hide in them.
fields.GUARDED = { "comment", "extra" }

-- Slurm refuses a job whose comment is longer; its message then blames a "pathname".
fields.LONGEST_COMMENT = 1024
local LONGEST = {
  comment = fields.LONGEST_COMMENT, extra = fields.LONGEST_COMMENT,
  admin_comment = fields.LONGEST_COMMENT, features = 1024, prefer = 1024, partition = 1024,
}

-- Longest value of a string field that Slurm takes (node lists may be long).
function fields.longest(name)
  return LONGEST[name] or 65536
end

fields.RECORD = { "comment", "user_id", "job_id", "job_state" }

fields.FLAGS = {
  GRES_ENFORCE_BIND = true, GRES_DISABLE_BIND = true, GRES_ALLOW_TASK_SHARING = true,
  GRES_MULT_TASKS_PER_SHARING = true, GRES_ONE_TASK_PER_SHARING = true, SPREAD_JOB = true,
  USE_MIN_NODES = true,
}

-- Environment variables that the answer may set, by prefix; never a loader's or a shell's.
fields.ENVIRONMENT = {
  "CRATER_", "SLURM_", "SRUN_", "OMP_", "GOMP_", "KMP_", "NCCL_", "UCX_", "CUDA_",
}

function fields.in_range(value, width)
  return value >= 0 and value <= HIGHEST[width]
end

-- One field of job_desc or job_rec; nil for a field that this Slurm doesn't know or won't give.
function fields.get(source, name)
  local ok, value = pcall(function() return source[name] end)
  if ok then return value end
  return nil
end

-- Decimal text without exponent or fraction, the same on every Lua.
function fields.decimal(value)
  return string.format("%.0f", value)
end

-- A field's value as text; nil when the user didn't set it.
function fields.text(source, name)
  local value = fields.get(source, name)
  local kind = fields.KIND[name]
  if kind == "string" then
    return type(value) == "string" and value or nil
  end
  if type(value) ~= "number" or not fields.in_range(value, kind) then return nil end
  if (name == "bitflags" or name == "immediate") and value == 0 then return nil end
  return fields.decimal(value)
end

-- Does the job ask for shards? One that asks for more than a GPU has would wait for ever.
function fields.asks_for_shards(source)
  for _, name in ipairs({ "tres_per_node", "tres_per_job", "tres_per_socket", "tres_per_task" }) do
    if (fields.text(source, name) or ""):find("shard", 1, true) then return true end
  end
  return false
end

-- "gres:gpu:2" on 22.05, "gres/gpu:2" later: the separator as this job's own strings show it.
local function style_of_strings(job_desc)
  for _, name in ipairs({ "tres_per_node", "tres_per_job", "tres_per_socket", "tres_per_task" }) do
    local style = (fields.text(job_desc, name) or ""):match("gres([:/])")
    if style then return style end
  end
end

-- Slurm adds its own prefix to what is assigned to .gres; on a job without one we can look.
local function style_by_probe(job_desc)
  if fields.get(job_desc, "gres") ~= nil then return nil end
  local _, style = pcall(function()
    job_desc.gres = "gpu:1"
    local text = job_desc.gres
    job_desc.gres = ""
    return type(text) == "string" and text:match("^gres([:/])") or nil
  end)
  if fields.get(job_desc, "gres") ~= nil then pcall(function() job_desc.gres = "" end) end
  return (style == ":" or style == "/") and style or nil
end

-- The separator, or nil. What a user's strings show counts for that job alone; what Slurm itself
-- showed is kept in `state`, also when it showed nothing.
function fields.gres_style(job_desc, state, may_probe)
  if state.gres_style then return state.gres_style end
  local style = style_of_strings(job_desc)
  if style or not may_probe or state.gres_style == false then return style end
  state.gres_style = style_by_probe(job_desc) or false
  return state.gres_style or nil
end

return fields
