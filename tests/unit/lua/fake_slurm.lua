-- A stand-in for slurmctld's job_submit/lua: the `slurm` table, job_desc and job_rec with the same
-- metatable behaviour. Usage: lua fake_slurm.lua CRATER.LUA SCENARIO.LUA
--
-- What the scenario emits, and all that the filter logs, goes to stdout as netstring pairs.

local crater_path, scenario_path = ...

function emit(key, value)
  value = value == nil and "nil" or tostring(value):gsub("^(-?%d+)%.0$", "%1")
  io.write(#key, ":", key, ",", #value, ":", value, ",")
end

slurm = {
  SUCCESS = 0, ERROR = -1,
  NO_VAL = 4294967294, NO_VAL16 = 65534, NO_VAL64 = 2 ^ 64, INFINITE = 4294967295,
  GRES_ENFORCE_BIND = 16, GRES_DISABLE_BIND = 2 ^ 19, USE_MIN_NODES = 8,
}
-- As slurm_lua.c defines them: string.format first, so a stray % raises.
for _, name in ipairs({ "log_user", "log_info", "log_error", "log_debug" }) do
  slurm[name] = function(...) emit(name, string.format(...)) end
end

local STRINGS, WIDTHS = {}, {}
for name in ([[account admin_comment array_inx comment cpus_per_tres exc_nodes extra features gres
    licenses mem_per_tres name partition prefer qos req_nodes reservation script tres_bind
    tres_per_job
    tres_per_node tres_per_socket tres_per_task user_name work_dir]]):gmatch("%S+") do
  STRINGS[name] = true
end
for width, names in pairs({
  [16] = [[cpus_per_task ntasks_per_node ntasks_per_socket ntasks_per_gpu sockets_per_node
    cores_per_socket threads_per_core shared immediate]],
  [32] = "min_nodes max_nodes num_tasks min_cpus time_limit user_id het_job_offset",
  [64] = "min_mem_per_node min_mem_per_cpu bitflags",
}) do
  for name in names:gmatch("%S+") do WIDTHS[name] = width end
end
local UNSET = { [16] = 65534, [32] = 4294967294 }

local function get(values, name)
  if name == "gres" then name = "tres_per_node" end
  local value = values[name]
  if not WIDTHS[name] then return value end
  -- lua_pushnumber makes floats, also on a Lua that knows integers.
  value = value or ((name == "bitflags" or name == "immediate") and 0) or UNSET[WIDTHS[name]]
  return value and value + 0.0
end

-- luaL_checkstring takes numbers, luaL_checknumber takes numerals, neither takes nil.
local function set(values, name, value, options)
  if options.refuse == name then error("bad argument #3 to '?' (refused)", 2) end
  if STRINGS[name] then
    if type(value) ~= "string" and type(value) ~= "number" then
      error("bad argument #3 to '?' (string expected, got " .. type(value) .. ")", 2)
    end
    value = tostring(value)
    if name == "gres" then
      name = "tres_per_node"
      if value ~= "" and not value:find("^gres") then value = options.prefix .. value end
    end
    values[name] = value ~= "" and value or nil
  elseif WIDTHS[name] then
    if not tonumber(value) then
      error("bad argument #3 to '?' (number expected, got " .. type(value) .. ")", 2)
    end
    values[name] = tonumber(value)
  else
    emit("slurm_error", "_set_job_field: unrecognized field: " .. name)
  end
end

local function environment_of(variables)
  return setmetatable({}, {
    __index = function(_, name) return variables and variables[name] end,
    __newindex = function(_, name, value)
      if type(value) ~= "string" then error("bad argument #3 to '?'", 2) end
      if variables then variables[name] = value else emit("slurm_info", "no environment") end
    end,
  })
end

-- options: prefix ("gres:" of 22.05, "gres/" later), environment, cron, refuse (a field that
-- raises when it is assigned), writes (a table that counts assignments)
function job(values, options)
  options = options or {}
  options.prefix = options.prefix or "gres/"
  if values.user_id == nil then values.user_id = 1000 end
  if values.script and not options.environment then options.environment = {} end
  return setmetatable({}, {
    __index = function(_, name)
      if name == "environment" then return environment_of(options.environment) end
      if name == "cron_job" then return options.cron == true end
      if options.unreadable == name then error("can't read " .. name) end
      return get(values, name)
    end,
    __newindex = function(_, name, value)
      if options.writes then options.writes[name] = (options.writes[name] or 0) + 1 end
      set(values, name, value, options)
    end,
  })
end

function record(values)
  return setmetatable({}, { __index = values })
end

-- A transport that hands out prepared answers, for a Lua without any socket library.
function fake_driver(answers)
  local clock, driver = 0, { name = "fake", sent = {} }
  function driver.now() clock = clock + 0.001 return clock end
  function driver.advance(seconds) clock = clock + seconds end
  function driver.open() return { left = table.remove(answers, 1) or "" } end
  function driver.connect() return true end
  function driver.close() end
  function driver.send(_, data, first)
    driver.sent[#driver.sent + 1] = data:sub(first)
    return #data - first + 1
  end
  function driver.receive(conn, want)
    local chunk = conn.left:sub(1, math.min(want, 7))
    conn.left = conn.left:sub(#chunk + 1)
    if chunk == "" then return nil, "closed" end
    return chunk
  end
  return driver
end

function clock()
  local file = assert(io.open("/proc/uptime"))
  local seconds = tonumber(file:read("*l"):match("^%S+"))
  file:close()
  return seconds
end

parts = crater_path:gsub("crater%.lua$", "crater/")
prelude = assert(os.getenv("CRATER_TEST_PRELUDE"))
assert((loadstring or load)(prelude))()
crater = dofile(crater_path)
dofile(scenario_path)
