-- The filter's own settings: a Lua file that returns a table, with a default for each of them.
--
-- It is read by slurmctld while a user waits, so whatever is wrong in it costs a log line and
-- means the defaults; it never costs a submission.

local config = {}

config.DEFAULTS = {
  socket = "/run/crater/filter.sock",
  deadline_ms = 100,
  breaker_seconds = 30,
  unavailable = "accept",
  off_switch = "/etc/crater/off",
  ask = "directives",
}

-- Plain Lua can't stat, and reading at each submission would be wasteful.
local RECHECK_SECONDS = 5
local MAX_BYTES = 65536
-- A file that loops for ever must not stop slurmctld.
local MAX_INSTRUCTIONS = 1000000

local function path(value)
  if type(value) ~= "string" or value:sub(1, 1) ~= "/" then return "an absolute path" end
end

local function number(low, high)
  return function(value)
    if type(value) ~= "number" or not (value >= low and value <= high) then
      return "a number from " .. low .. " to " .. high
    end
  end
end

local function one_of(first, second)
  return function(value)
    if value ~= first and value ~= second then
      return string.format('"%s" or "%s"', first, second)
    end
  end
end

-- Each answers nil when the value is fine, else what it should be. Two seconds under slurmctld's
-- locks is already a long time: a longer deadline is a mistake.
local CHECKS = {
  socket = path,
  deadline_ms = number(1, 2000),
  breaker_seconds = number(1, 86400),
  unavailable = one_of("accept", "reject"),
  off_switch = path,
  ask = one_of("directives", "always"),
}

local function keys()
  local names = {}
  for name in pairs(CHECKS) do names[#names + 1] = name end
  table.sort(names)
  return table.concat(names, ", ")
end

-- Chunk of a settings file that sees no global at all, on every Lua.
local function compile(source, name)
  if source:sub(1, 1) == "\27" then return nil, "compiled Lua is not accepted" end
  local setfenv = rawget(_G, "setfenv")
  if not setfenv then return load(source, name, "t", {}) end
  local chunk, why = rawget(_G, "loadstring")(source, name)
  return chunk and setfenv(chunk, {}), why
end

local function run(chunk)
  debug.sethook(function() error("it runs too long", 0) end, "", MAX_INSTRUCTIONS)
  local ok, result = pcall(chunk)
  debug.sethook()
  if not ok then return nil, tostring(result) end
  if type(result) ~= "table" then return nil, "it returns no table" end
  return result
end

local function with_defaults(given)
  local settings = {}
  for name, value in pairs(config.DEFAULTS) do settings[name] = value end
  for name, value in pairs(given) do settings[name] = value end
  return settings
end

-- Settings of a file's text, and a list of problems; a setting with a problem has its default.
function config.parse(source, name)
  local chunk, why = compile(source, "@" .. name)
  local result
  if chunk then result, why = run(chunk) end
  if not result then return with_defaults({}), { "defaults are used: " .. tostring(why) } end
  local given, problems = {}, {}
  for key, value in pairs(result) do
    local check = CHECKS[key]
    local expected = check and check(value)
    if not check then
      problems[#problems + 1] = "unknown setting " .. tostring(key) .. "; valid are " .. keys()
    elseif expected then
      problems[#problems + 1] = key .. " must be " .. expected .. "; its default is used"
    else
      given[key] = value
    end
  end
  table.sort(problems)
  return with_defaults(given), problems
end

-- Text of the file; nil when there is none; nil and a reason when it can't be read.
local function read(name)
  local file, why, code = io.open(name, "r")
  if not file then
    if code == 2 then return nil end
    return nil, tostring(why)
  end
  local source, problem = file:read(MAX_BYTES + 1)
  file:close()
  if problem then return nil, tostring(problem) end
  if source and #source > MAX_BYTES then return nil, "longer than " .. MAX_BYTES .. " bytes" end
  return source or ""
end

local function file_name()
  return os.getenv("CRATER_FILTER_CONF") or "/etc/crater/filter.lua"
end

-- Present settings. `state` keeps what was read last; `log` gets a line when that changed.
function config.current(state, log)
  local now = os.time()
  -- The wall clock may jump; a jump backwards must not stop us from looking again.
  if state.settings and math.abs(now - state.checked) < RECHECK_SECONDS then
    return state.settings
  end
  state.checked = now
  local source, why = read(file_name())
  local seen = source or why or false
  if state.settings and seen == state.seen then return state.settings end
  state.seen = seen
  local settings, problems = with_defaults({}), {}
  if source then
    settings, problems = config.parse(source, file_name())
  elseif why then
    problems = { "defaults are used: " .. why }
  end
  for _, problem in ipairs(problems) do log(file_name() .. ": " .. problem) end
  state.settings = settings
  return settings
end

return config
