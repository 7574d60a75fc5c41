-- crater's submit filter for Slurm's job_submit/lua plugin: asks crater-scheduler what a job needs
-- and applies the answer. It decides nothing itself, and it never loses a job: if the daemon is
-- absent, slow or wrong, or if this code fails, the job goes through as the user wrote it.
--
--     local crater = dofile("/usr/lib/crater/job_submit/crater.lua")
--     crater.submit(job_desc, part_list, uid)             in slurm_job_submit
--     crater.modify(job_desc, job_rec, part_list, uid)    in slurm_job_modify
--
-- Both return slurm.SUCCESS or slurm.ERROR and never raise. Runs on Lua 5.1 to 5.4.
-- docs/filter.md has the settings, docs/protocols.md what is said over the socket.

local here = (debug.getinfo(1, "S").source:match("^@(.*/)") or "./") .. "crater/"
local text = dofile(here .. "text.lua")
local frame = dofile(here .. "frame.lua")
local fields = dofile(here .. "fields.lua")
local answer = dofile(here .. "answer.lua")
local config = dofile(here .. "config.lua")
local transport = dofile(here .. "transport.lua")

-- The one global. It outlives a call, and a script that loads us again in the same Lua state.
local state = rawget(_G, "CRATER_FILTER") or { config = {}, breaker = {}, said = {} }
rawset(_G, "CRATER_FILTER", state)

local crater = {}

-- Logging ----------------------------------------------------------------------------------

-- "%s" keeps a % in the text from being taken for a format; a failing log is no reason to fail.
local function write(name, line)
  pcall(function() slurm[name]("%s", line) end)
end

local function log(line)
  write("log_info", "crater: " .. text.line(line))
end

local function complain(line)
  write("log_error", "crater: " .. text.line(line))
end

local function tell_user(lines)
  for _, message in ipairs(lines) do
    for _, line in ipairs(text.lines(message)) do write("log_user", line) end
  end
end

-- Says a thing that stays true only when it becomes true.
local function complain_once(topic, line)
  if state.said[topic] == line then return end
  state.said[topic] = line
  if line then complain(line) end
end

-- Off switch -------------------------------------------------------------------------------

-- A file that we may not read is there all the same; switching off must not need permissions.
local function switched_off(path)
  local file, why, code = io.open(path, "r")
  if file then file:close() end
  local off = file ~= nil or (code ~= 2 and code ~= 20)
  local how = file and "" or (" (" .. tostring(why) .. ")")
  complain_once("off", off and "switched off by " .. path .. how or nil)
  return off
end

-- The daemon, behind a breaker ---------------------------------------------------------------

-- nil and a reason when there is nothing to ask with.
local function driver()
  if state.driver == nil then
    local found, why = transport.driver()
    state.driver = found or false
    if not found then
      complain("neither lua-posix nor lua-socket loads, so no job is enriched: " .. why)
    end
  end
  return state.driver or nil, "neither lua-posix nor lua-socket is installed"
end

local function open_breaker(now, settings, why)
  local breaker = state.breaker
  breaker.until_time = now + settings.breaker_seconds
  breaker.opened = now
  breaker.settings = settings
  -- One line for an outage, however long it lasts and whatever its later tries fail of.
  local line = string.format("crater-scheduler fails: %s; jobs pass without it, next try in %d s",
    why, settings.breaker_seconds)
  if breaker.why then write("log_debug", "crater: " .. text.line(line)) else complain(line) end
  breaker.why = why
end

local function close_breaker()
  if state.breaker.why then log("crater-scheduler answers again") end
  state.breaker = {}
end

-- New settings deserve a new try: the old ones may have been what was wrong.
local function breaker_is_open(now, settings)
  local breaker = state.breaker
  return breaker.settings == settings and now < breaker.until_time and now >= breaker.opened
end

-- Pairs of the daemon's answer; nil and a reason. A request that can't be framed is that user's
-- doing and says nothing about the daemon, so it doesn't open the breaker.
local function ask(request, settings)
  local connection, why = driver()
  if not connection then return nil, why end
  local now = connection.now()
  if breaker_is_open(now, settings) then return nil, state.breaker.why end
  local bytes, body, result
  bytes, why = frame.encode(request)
  if not bytes then return nil, why end
  body, why = transport.exchange(frame, connection, settings.socket, bytes,
    settings.deadline_ms / 1000)
  if body then result, why = frame.decode_body(body) end
  if result then
    close_breaker()
    return result
  end
  open_breaker(connection.now(), settings, why)
  return nil, why
end

-- Requests -----------------------------------------------------------------------------------

local function add(request, key, value)
  if value ~= nil then request[#request + 1] = { key, value } end
end

local function add_fields(request, job_desc, comment)
  for _, name in ipairs(fields.SENT) do
    local value
    if name == "comment" then value = comment else value = fields.text(job_desc, name) end
    add(request, "field." .. name, value)
  end
end

local function whole_number(value)
  return type(value) == "number" and value >= 0 and value < 2 ^ 53 and fields.decimal(value) or nil
end

-- The job's owner: root may submit for another user, and a plan is bound to the one who runs it.
local function owner(job_desc, uid)
  local user_id = fields.get(job_desc, "user_id")
  if type(user_id) == "number" and fields.in_range(user_id, 32) then return user_id end
  return uid
end

-- "crater check" submits with --test-only and a nonce, to recognise its own question.
local function check_nonce(job_desc)
  local environment = fields.get(job_desc, "environment")
  local nonce = environment and fields.get(environment, "CRATER_CHECK")
  return type(nonce) == "string" and nonce:sub(1, 256) or nil
end

local function kind_of(job)
  if fields.get(job.desc, "cron_job") == true then return "cron" end
  return job.script and "batch" or "interactive"
end

local function het_component(job_desc)
  local offset = fields.get(job_desc, "het_job_offset")
  return type(offset) == "number" and fields.in_range(offset, 32) and fields.decimal(offset) or nil
end

local function submit_request(job)
  local request = {}
  add(request, "op", "submit")
  add(request, "gres_style", fields.gres_style(job.desc, state, true))
  add(request, "uid", whole_number(owner(job.desc, job.uid)))
  add(request, "user", fields.get(job.desc, "user_name"))
  add(request, "kind", kind_of(job))
  if job.script then
    add(request, "script", job.header)
    add(request, "late_directive", job.late and fields.decimal(job.late))
    add(request, "check", check_nonce(job.desc))
  end
  add(request, "het", het_component(job.desc))
  add_fields(request, job.desc, job.comment)
  return request
end

local function modify_request(job, record)
  local request = {}
  add(request, "op", "modify")
  add(request, "gres_style", fields.gres_style(job.desc, state, false))
  add(request, "uid", whole_number(job.uid))
  add_fields(request, job.desc, job.comment)
  for _, name in ipairs(fields.RECORD) do
    local value = fields.get(record, name)
    add(request, "record." .. name, type(value) == "string" and value or whole_number(value))
  end
  return request
end

-- Plan tokens --------------------------------------------------------------------------------

-- Takes every plan token out of what the user wrote, and puts a record's own token back: a plan
-- can be neither brought along, nor edited, nor dropped. Assigns only what changes by it.
local function guard_field(job_desc, record, name)
  local given = fields.get(job_desc, name)
  if type(given) ~= "string" then return true end
  local own = record and fields.get(record, name)
  local token = type(own) == "string" and text.find_token(own)
  local kept = text.strip_tokens(given)
  if token then
    local room = fields.LONGEST_COMMENT - #token - 1
    if #kept > room then
      tell_user({ string.format("crater: this job's %s also holds its plan, which leaves room for "
        .. "%d characters; yours has %d", name, room, #kept) })
      return false
    end
    kept = kept == "" and token or kept .. " " .. token
  end
  if kept ~= given then job_desc[name] = kept end
  return true
end

-- False when the user's text and the plan are too long together; Slurm would refuse that too,
-- but with words that nobody understands.
local function guard_tokens(job_desc, record)
  for _, name in ipairs(fields.GUARDED) do
    if not guard_field(job_desc, record, name) then return false end
  end
  return true
end

-- Verdicts -----------------------------------------------------------------------------------

local function unavailable(job, settings, why)
  if settings.unavailable ~= "reject" or not job.strict then return slurm.SUCCESS end
  tell_user({
    "crater: this job has crater directives and the crater scheduler can't be asked: " .. why,
    "crater: submit again later, or take the crater directives out of the job",
  })
  return slurm.ERROR
end

-- An answer that came in time but can't be used: the daemon lives, so the breaker stays closed.
local function unusable(job, settings, why)
  complain("the scheduler's answer is not applied: " .. why)
  return unavailable(job, settings, "its answer was not understood")
end

local function consult(job, request, settings)
  local pairs_list, why = ask(request, settings)
  if not pairs_list then return unavailable(job, settings, why) end
  local result
  result, why = answer.parse(pairs_list, fields)
  if not result then return unusable(job, settings, why) end
  if result.verdict == "accept" then
    local applied
    applied, why = answer.apply(result, job.desc, fields, job.script ~= nil, complain)
    if not applied then return unusable(job, settings, why) end
  end
  for _, line in ipairs(result.logs) do log(line) end
  tell_user(result.messages)
  return result.verdict == "accept" and slurm.SUCCESS or slurm.ERROR
end

-- Entry points ---------------------------------------------------------------------------------

local function look_at(job_desc, uid)
  local job = { desc = job_desc, uid = uid }
  job.comment = fields.text(job_desc, "comment")
  local script = fields.get(job_desc, "script")
  if type(script) == "string" then
    job.script = script
    job.header = text.header(script)
    job.late = text.late_directive(script, job.header)
  end
  job.strict = text.has_directives(job.header, job.comment)
  return job
end

local function wanted(job, settings)
  return settings.ask == "always" or job.late ~= nil or text.mentions_crater(job.header)
    or text.mentions_crater(job.comment) or fields.asks_for_shards(job.desc)
end

local function submit(job_desc, uid)
  local settings = config.current(state.config, complain)
  if switched_off(settings.off_switch) then return slurm.SUCCESS end
  guard_tokens(job_desc, nil)
  local job = look_at(job_desc, uid)
  if not wanted(job, settings) then return slurm.SUCCESS end
  return consult(job, submit_request(job), settings)
end

-- Does this modification touch anything that a plan is about? Comments are dealt with here.
local function touches_plan(job_desc)
  for _, name in ipairs(fields.SENT) do
    if name ~= "comment" and name ~= "bitflags" and fields.text(job_desc, name) then return true end
  end
  return false
end

local function modify(job_desc, record, uid)
  local settings = config.current(state.config, complain)
  if switched_off(settings.off_switch) then return slurm.SUCCESS end
  if not guard_tokens(job_desc, record) then return slurm.ERROR end
  local own = fields.get(record, "comment")
  if type(own) ~= "string" or not text.find_token(own) or not touches_plan(job_desc) then
    return slurm.SUCCESS
  end
  local comment = fields.text(job_desc, "comment")
  local job = { desc = job_desc, uid = uid, comment = comment and text.strip_tokens(comment) }
  return consult(job, modify_request(job, record), settings)
end

-- Since 26.05 a Lua error rejects the job; before, it accepts it half changed. So none leaves.
local function guarded(what, ...)
  local ok, rc = pcall(...)
  if ok and (rc == slurm.SUCCESS or rc == slurm.ERROR) then return rc end
  complain(what .. " failed, the job goes on unchanged: " .. tostring(rc))
  return slurm.SUCCESS
end

function crater.submit(job_desc, _, uid)
  return guarded("submit", submit, job_desc, uid)
end

function crater.modify(job_desc, record, _, uid)
  return guarded("modify", modify, job_desc, record, uid)
end

return crater
