-- The frame of docs/protocols.md: "CRATER1 <length>\n", then netstrings, keys and values in turn.
-- Pure; crater_slurm/hooks/frame.py is the reference.

local frame = {}

local MAGIC = "CRATER1 "

frame.MAX_BODY = 1024 * 1024
-- "CRATER1 0\n": what a receiver may ask for before it knows the length.
frame.SHORTEST = #MAGIC + 2
frame.LONGEST_HEADER = #MAGIC + 12
-- Decoding happens inside slurmctld; a megabyte of empty strings would take it far too long.
frame.MAX_PAIRS = 4096

-- Frame of a list of {key, value}; nil and a reason when it would be too long.
function frame.encode(pairs_list)
  local parts = {}
  for _, pair in ipairs(pairs_list) do
    parts[#parts + 1] = #pair[1] .. ":" .. pair[1] .. "," .. #pair[2] .. ":" .. pair[2] .. ","
  end
  local body = table.concat(parts)
  if #body > frame.MAX_BODY then
    return nil, "the job's request is longer than " .. frame.MAX_BODY .. " bytes"
  end
  return MAGIC .. #body .. "\n" .. body
end

-- Body length that a header line (with its newline) announces; nil and a reason.
function frame.body_length(line)
  local digits = line:match("^CRATER1 (%d+)\n$")
  if not digits or #line > frame.LONGEST_HEADER then return nil, "the answer is no crater frame" end
  local length = tonumber(digits)
  if length > frame.MAX_BODY then
    return nil, "an answer of " .. digits .. " bytes, more than " .. frame.MAX_BODY
  end
  return length
end

local function netstring(body, position)
  local colon = body:find(":", position, true)
  local digits = colon and colon - position <= 9 and body:sub(position, colon - 1) or ""
  if not digits:find("^%d+$") then return nil, "no length at byte " .. position end
  local stop = colon + 1 + tonumber(digits)
  if body:sub(stop, stop) ~= "," then return nil, "no comma at byte " .. stop end
  return body:sub(colon + 1, stop - 1), stop + 1
end

-- List of {key, value} of a body; nil and a reason on anything but complete pairs.
function frame.decode_body(body)
  local result, position = {}, 1
  while position <= #body do
    local key, value, after
    key, after = netstring(body, position)
    if not key then return nil, after end
    value, position = netstring(body, after)
    if not value then return nil, position end
    result[#result + 1] = { key, value }
    if #result > frame.MAX_PAIRS then return nil, "more than " .. frame.MAX_PAIRS .. " pairs" end
  end
  return result
end

return frame
