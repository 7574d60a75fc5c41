-- Reads the daemon's answer and applies it: first everything is understood and checked, only then
-- is the job touched, and what was touched is put back if Slurm refuses something halfway.

local answer = {}

local MAX_MESSAGES = 100

local function problem(text, ...)
  error({ answer = string.format(text, ...) }, 0)
end

local function index(list)
  local result = {}
  for position, name in ipairs(list) do result[name] = position end
  return result
end

local function value_of(fields, name, value)
  local kind = fields.KIND[name]
  if value:find("\0", 1, true) then problem("set.%s holds a NUL", name) end
  if kind == "string" then
    if #value > fields.longest(name) then
      problem("set.%s has %d characters, Slurm takes %d", name, #value, fields.longest(name))
    end
    return value
  end
  local number = value:find("^%d+$") and #value <= 16 and tonumber(value)
  if not number or not fields.in_range(number, kind) then
    problem("set.%s=%s is no number that fits %d bits", name, value:sub(1, 40), kind)
  end
  return number
end

local function check_environment(fields, name, value)
  local allowed = false
  for _, prefix in ipairs(fields.ENVIRONMENT) do
    allowed = allowed or name:sub(1, #prefix) == prefix
  end
  if not allowed or not name:find("^[A-Z][A-Z0-9_]*$") then
    problem("env.%s is not a variable that the filter sets", name:sub(1, 40))
  end
  if value:find("\0", 1, true) then problem("env.%s holds a NUL", name) end
end

local READERS = {}

function READERS.verdict(result, value)
  if value ~= "accept" and value ~= "reject" then problem("verdict %s", value:sub(1, 40)) end
  if result.verdict then problem("two verdicts") end
  result.verdict = value
end

function READERS.flag(result, value, fields)
  if not fields.FLAGS[value] then problem("unknown flag %s", value:sub(1, 40)) end
  result.flags[#result.flags + 1] = value
end

function READERS.message(result, value)
  if #result.messages < MAX_MESSAGES then result.messages[#result.messages + 1] = value end
end

function READERS.log(result, value)
  if #result.logs < MAX_MESSAGES then result.logs[#result.logs + 1] = value end
end

local function read_pair(result, key, value, fields, settable)
  local name = key:match("^set%.(.*)$")
  if name then
    if not settable[name] then problem("unknown field %s", key:sub(1, 40)) end
    if result.set[name] then problem("%s is there twice", key) end
    result.set[name] = value_of(fields, name, value)
    return
  end
  name = key:match("^env%.(.*)$")
  if name then
    check_environment(fields, name, value)
    result.env[#result.env + 1] = { name, value }
  elseif READERS[key] then
    READERS[key](result, value, fields)
  else
    problem("unknown key %s", key:sub(1, 40))
  end
end

-- A checked answer {verdict, set, flags, env, messages, logs} of a list of pairs; nil and a reason.
function answer.parse(pairs_list, fields)
  local result = { set = {}, flags = {}, env = {}, messages = {}, logs = {} }
  local settable = index(fields.SETTABLE)
  local ok, why = pcall(function()
    for _, pair in ipairs(pairs_list) do
      read_pair(result, pair[1], pair[2], fields, settable)
    end
    if not result.verdict then problem("no verdict") end
  end)
  if ok then return result end
  return nil, type(why) == "table" and why.answer or tostring(why)
end

-- Assigns, and remembers how to take it back. "" clears a string; nil would raise. What a number
-- was before is put back only if Slurm showed one.
local function assign(job_desc, fields, undo, name, value)
  local before = fields.get(job_desc, name)
  if before == nil and type(value) == "string" then before = "" end
  undo[#undo + 1] = function()
    if before ~= nil then job_desc[name] = before end
  end
  job_desc[name] = value
end

local function set_flag(job_desc, fields, undo, name, log)
  local bit = slurm[name]
  local flags = fields.get(job_desc, "bitflags")
  -- A double holds 53 bits; beyond that an addition would change others.
  if type(bit) ~= "number" or type(flags) ~= "number" or flags >= 2 ^ 53 or bit < 1 then
    log("flag " .. name .. " is not known to this Slurm; the job goes on without it")
  elseif math.floor(flags / bit) % 2 == 0 then
    assign(job_desc, fields, undo, "bitflags", flags + bit)
  end
end

local function set_environment(environment, undo, name, value)
  local before = environment[name]
  undo[#undo + 1] = function()
    environment[name] = before or ""
  end
  environment[name] = value
end

-- Applies a parsed answer. True, or nil and a reason with the job as it was before.
function answer.apply(result, job_desc, fields, is_batch, log)
  local undo = {}
  local ok, why = pcall(function()
    for _, name in ipairs(fields.SETTABLE) do
      if result.set[name] ~= nil then assign(job_desc, fields, undo, name, result.set[name]) end
    end
    for _, name in ipairs(result.flags) do set_flag(job_desc, fields, undo, name, log) end
    if #result.env > 0 and is_batch then
      local environment = job_desc.environment
      for _, pair in ipairs(result.env) do
        set_environment(environment, undo, pair[1], pair[2])
      end
    end
  end)
  if ok then return true end
  for step = #undo, 1, -1 do pcall(undo[step]) end
  return nil, tostring(why)
end

return answer
