-- Slurm's job_submit.lua for a site that has none: all it does is call crater's filter.
-- A site with a script of its own calls the filter from there; see docs/filter.md.
--
-- If crater.lua is missing or broken, jobs pass unchanged and slurmctld's log says why.

local RETRY_SECONDS = 30

local function candidates()
  local own = debug.getinfo(1, "S").source:match("^@(.*/)") or "./"
  return os.getenv("CRATER_LUA"), "/usr/lib/crater/job_submit/crater.lua", own .. "crater.lua"
end

local function exists(path)
  local file = io.open(path, "r")
  if file then file:close() end
  return file ~= nil
end

-- The filter from the first candidate that exists; nil and a reason.
local function load_crater()
  local environment, installed, beside = candidates()
  local path = environment or (exists(installed) and installed) or beside
  local ok, crater = pcall(dofile, path)
  if not ok then return nil, tostring(crater) end
  if type(crater) ~= "table" or not crater.submit or not crater.modify then
    return nil, path .. " is not crater's filter"
  end
  return crater
end

local crater, tried

-- A filter that could not be loaded may be repaired while slurmctld runs: look again, seldom.
local function filter()
  local now = os.time()
  if crater or (tried and math.abs(now - tried) < RETRY_SECONDS) then return crater end
  tried = now
  local why
  crater, why = load_crater()
  if not crater then
    slurm.log_error("%s", "crater: the filter can't be loaded, jobs pass without it: " .. why)
  end
  return crater
end

local function call(name, ...)
  local ok, loaded = pcall(filter)
  if not ok or not loaded then return slurm.SUCCESS end
  return loaded[name](...)
end

function slurm_job_submit(job_desc, part_list, uid)
  return call("submit", job_desc, part_list, uid)
end

function slurm_job_modify(job_desc, job_rec, part_list, uid)
  return call("modify", job_desc, job_rec, part_list, uid)
end

pcall(filter)
return slurm.SUCCESS
