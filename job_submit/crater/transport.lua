-- One question and one answer over a Unix stream socket, within one total deadline.
--
-- slurmctld waits for us with its locks held, so connect, send and receive share one deadline on
-- a clock that nobody can set, and nothing here blocks without a time limit. Two libraries can do
-- it: lua-posix (poll and CLOCK_MONOTONIC, preferred) and lua-socket (its own timeouts follow the
-- wall clock, so it waits in short slices and looks at /proc/uptime between them).

local transport = {}

-- How long to sleep before the next try when the daemon's queue of connections is full.
local RETRY_SECONDS = 0.002

local function posix_driver()
  local socket = require("posix.sys.socket")
  local poll = require("posix.poll")
  local fcntl = require("posix.fcntl")
  local unistd = require("posix.unistd")
  local time = require("posix.time")
  local errno = require("posix.errno")
  local driver = { name = "lua-posix" }

  function driver.now()
    local spec = time.clock_gettime(time.CLOCK_MONOTONIC)
    return spec.tv_sec + spec.tv_nsec / 1e9
  end

  local function again(code)
    return code == errno.EAGAIN or code == errno.EINTR or code == errno.EINPROGRESS
  end

  local function wait_for(fd, event, seconds)
    poll.poll({ [fd] = { events = { [event] = true } } }, math.max(1, math.ceil(seconds * 1000)))
  end

  function driver.open()
    local fd, why = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0)
    if not fd then return nil, why end
    fcntl.fcntl(fd, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.O_NONBLOCK)
    return fd
  end

  function driver.close(fd)
    unistd.close(fd)
  end

  -- true when connected, false to try again, nil and a reason
  function driver.connect(fd, path)
    local ok, why, code = socket.connect(fd, { family = socket.AF_UNIX, path = path })
    if ok then return true end
    if not again(code) then return nil, why end
    time.nanosleep({ tv_sec = 0, tv_nsec = RETRY_SECONDS * 1e9 })
    return false
  end

  -- bytes sent, 0 to try again, nil and a reason
  function driver.send(fd, data, first, seconds)
    local sent, why, code = socket.send(fd, data:sub(first, first + 65535))
    if sent then return sent end
    if not again(code) then return nil, why end
    wait_for(fd, "OUT", seconds)
    return 0
  end

  -- bytes received, "" to try again, nil and a reason
  function driver.receive(fd, want, seconds)
    local data, why, code = socket.recv(fd, math.min(want, 65536))
    if data == "" then return nil, "the daemon hung up before its answer was complete" end
    if data then return data end
    if not again(code) then return nil, why end
    wait_for(fd, "IN", seconds)
    return ""
  end

  return driver
end

-- Seconds since boot: the one steady clock that plain Lua can read (to 10 ms, on Linux).
local function uptime()
  local file = assert(io.open("/proc/uptime"))
  local line = file:read("*l")
  file:close()
  return assert(tonumber(line:match("^%S+")))
end

local function luasocket_driver()
  local socket = require("socket")
  local unix = require("socket.unix")
  local stream = type(unix) == "table" and (unix.stream or unix.tcp) or unix
  local SLICE = 0.01
  uptime() -- raises here, where it makes us say no, rather than at the first job
  local driver = { name = "lua-socket", now = uptime }

  function driver.open()
    local sock, why = stream()
    return sock and { sock = sock }, why
  end

  function driver.close(conn)
    conn.sock:close()
  end

  function driver.connect(conn, path)
    conn.sock:settimeout(0)
    local ok, why = conn.sock:connect(path)
    if ok then return true end
    if why ~= "timeout" then return nil, why end
    -- lua-socket destroys what could not connect at once
    conn.sock:close()
    conn.sock = assert(stream())
    socket.sleep(RETRY_SECONDS)
    return false
  end

  function driver.send(conn, data, first, seconds)
    conn.sock:settimeout(math.min(seconds, SLICE))
    local last, why, partial = conn.sock:send(data, first, math.min(first + 65535, #data))
    if last then return last - first + 1 end
    if why ~= "timeout" then return nil, why end
    return math.max(0, (partial or first - 1) - first + 1)
  end

  function driver.receive(conn, want, seconds)
    conn.sock:settimeout(math.min(seconds, SLICE))
    local data, why, partial = conn.sock:receive(want)
    if data then return data end
    if partial and partial ~= "" then return partial end
    if why == "timeout" then return "" end
    return nil, why == "closed" and "the daemon hung up before its answer was complete" or why
  end

  return driver
end

-- The best driver that loads here; nil and why none did.
function transport.driver()
  local reasons = {}
  for _, candidate in ipairs({ posix_driver, luasocket_driver }) do
    local ok, driver = pcall(candidate)
    if ok then return driver end
    reasons[#reasons + 1] = tostring(driver):match("^[^\n]*")
  end
  return nil, table.concat(reasons, "; ")
end

local function remaining(driver, stop, what)
  local seconds = stop - driver.now()
  if seconds <= 0 then error({ late = what }, 0) end
  return seconds
end

local function connect(driver, conn, path, stop)
  repeat
    remaining(driver, stop, "accept a connection")
    local connected, why = driver.connect(conn, path)
    if connected == nil then error({ why = path .. ": " .. tostring(why) }, 0) end
  until connected
end

local function send(driver, conn, data, stop)
  local first = 1
  while first <= #data do
    local sent, why = driver.send(conn, data, first, remaining(driver, stop, "read the request"))
    if not sent then error({ why = "sending: " .. tostring(why) }, 0) end
    first = first + sent
  end
end

local function receive(driver, conn, count, stop)
  local chunks, missing = {}, count
  while missing > 0 do
    local chunk, why = driver.receive(conn, missing, remaining(driver, stop, "answer"))
    if not chunk then error({ why = tostring(why) }, 0) end
    chunks[#chunks + 1] = chunk
    missing = missing - #chunk
  end
  return table.concat(chunks)
end

local function receive_frame(frame, driver, conn, stop)
  local line = receive(driver, conn, frame.SHORTEST, stop)
  while line:sub(-1) ~= "\n" and #line < frame.LONGEST_HEADER do
    line = line .. receive(driver, conn, 1, stop)
  end
  local length, why = frame.body_length(line)
  if not length then error({ why = why }, 0) end
  return receive(driver, conn, length, stop)
end

local function reason(problem, seconds)
  if type(problem) ~= "table" then return tostring(problem) end
  if problem.why then return problem.why end
  return string.format("the daemon did not %s within %.0f ms", problem.late, seconds * 1000)
end

-- Body of the answer to `request` (a whole frame); nil and a reason. Never raises, never takes
-- longer than `seconds` plus one tick of the clock, never leaves a socket open.
function transport.exchange(frame, driver, path, request, seconds)
  local opened, conn, why = pcall(driver.open)
  if not opened or not conn then return nil, "no socket: " .. tostring(opened and why or conn) end
  local ok, result = pcall(function()
    local stop = driver.now() + seconds
    connect(driver, conn, path, stop)
    send(driver, conn, request, stop)
    return receive_frame(frame, driver, conn, stop)
  end)
  pcall(driver.close, conn)
  if ok then return result end
  return nil, reason(result, seconds)
end

return transport
