-- Everything that only looks at text: plan tokens in comments, the header of a batch script, and
-- lines that are fit for a log or a terminal. Pure functions; they know neither Slurm nor sockets.
--
-- A user chooses these texts and slurmctld holds its locks while we read them, so every function
-- is linear in its input: plain finds, no pattern that can backtrack over a run of blanks.

local text = {}

local TOKEN = "crater-plan:"
local SPACE = "[ \t\n\r\f\v]"

-- sbatch reads directives up to the first line that is neither blank nor a comment; so do we.
text.HEADER_LIMIT = 256 * 1024

local function without_trailing_blanks(value, first, last)
  while last >= first do
    local byte = value:byte(last)
    if byte ~= 32 and byte ~= 9 then break end
    last = last - 1
  end
  return value:sub(first, last)
end

-- First and last byte of the first thing at or after `from` that looks like a plan token.
local function token_at(value, from)
  local first = value:find(TOKEN, from, true)
  if not first then return nil end
  local stop = value:find(SPACE, first)
  return first, stop and stop - 1 or #value
end

-- The user's own part of a comment. A comment without a token comes back as it is, blanks and all.
function text.strip_tokens(comment)
  local first, last = token_at(comment, 1)
  if not first then return comment end
  local parts, position = {}, 1
  while first do
    parts[#parts + 1] = without_trailing_blanks(comment, position, first - 1)
    position = last + 1
    first, last = token_at(comment, position)
  end
  parts[#parts + 1] = comment:sub(position)
  return text.trim(table.concat(parts))
end

-- The first token of a comment, nil when there is none.
function text.find_token(comment)
  local first, last = token_at(comment, 1)
  return first and comment:sub(first, last) or nil
end

function text.trim(value)
  local first = value:find("[^ \t\n\r\f\v]")
  if not first then return "" end
  local last = #value
  while value:sub(last, last):find(SPACE) do last = last - 1 end
  return value:sub(first, last)
end

-- Bytes of the script that stand before its first command, at most HEADER_LIMIT of them.
-- A header that is longer is cut between two lines: half a directive would be another directive.
function text.header(script)
  local capped = "\n" .. script:sub(1, text.HEADER_LIMIT)
  local command = capped:find("\n[ \t\r\f\v]*[^#%s]")
  if command then return capped:sub(2, command - 1) end
  if #script <= text.HEADER_LIMIT then return script end
  local last = #capped
  while capped:byte(last) ~= 10 do last = last - 1 end
  return capped:sub(2, last - 1)
end

-- Number of the first line starting with "#CRATER " after the header, nil when there is none:
-- sbatch's rule makes it void, and its author should hear of it.
function text.late_directive(script, header)
  local found = script:find("\n#CRATER ", #header + 1, true)
  if not found then return nil end
  local _, newlines = script:sub(1, found):gsub("\n", "")
  return newlines + 1
end

function text.mentions_crater(value)
  return value ~= nil and value:lower():find("crater", 1, true) ~= nil
end

-- Does the job ask for something, as crater's own parser reads it? Stricter than a mention.
function text.has_directives(header, comment)
  if header and ("\n" .. header .. "\n"):find("\n#CRATER%s") then return true end
  return comment ~= nil and (" " .. comment:lower()):find("[;%s]crater:") ~= nil
end

-- One line for a log or a terminal: no control characters, no more than `limit` bytes.
function text.line(value, limit)
  value = tostring(value):sub(1, limit or 2000)
  return (value:gsub("%c", "?"))
end

-- Lines of a message, each fit to print.
function text.lines(value)
  local result = {}
  for line in (value .. "\n"):gmatch("([^\n]*)\n") do
    if line ~= "" then result[#result + 1] = text.line(line) end
  end
  return result
end

return text
