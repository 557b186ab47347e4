-- Wireshark and tshark dissector for barewire: EtherType 0x88B5, every byte as in docs/wire.md.
--
--   tshark -X lua_script:docs/barewire.lua -r capture.pcapng
--   wireshark -X lua_script:docs/barewire.lua capture.pcapng
--
-- A frame that a node would refuse carries an expert item of severity error that names the
-- refusal's counter (field barewire.refused).

local ETHERTYPE = 0x88B5
local p = Proto("barewire", "barewire fabric")

local TYPES = {
  [1] = "ACK", [2] = "MSG", [3] = "PACK", [4] = "MSGM", [5] = "RNDV", [6] = "PULL", [7] = "DATA",
  [8] = "END", [9] = "NOP", [10] = "NACK", [11] = "WHO", [12] = "PROBE", [13] = "PING", [14] = "RST", [15] = "OPEN",
  [16] = "WRITE", [17] = "READ", [18] = "ATOMIC", [19] = "RESP",
  [22] = "MCAST",
}
-- Least length of the operation header.
local OP_LEN = {
  [1] = 8, [2] = 16, [3] = 8, [4] = 32, [5] = 32, [6] = 32, [7] = 16, [8] = 16, [9] = 8, [10] = 8,
  [11] = 32, [12] = 8, [13] = 0, [14] = 32, [15] = 64, [16] = 40, [17] = 48, [18] = 40, [19] = 16,
  [22] = 24,
}
local HAS_PAYLOAD = {
  [2] = true, [3] = true, [4] = true, [7] = true, [16] = true, [18] = true, [19] = true,
  [22] = true,
}
local HAS_IMM = {
  [2] = true, [4] = true, [5] = true, [16] = true, [18] = true, [22] = true,
}
-- Types that need not name a session.
local SIDLESS = { [11] = true, [14] = true, [15] = true, [22] = true }
local END_STATUS = { [0] = "ok", [1] = "truncated", [2] = "discarded", [3] = "endpoint closed" }
local NACK_REASON = {
  [1] = "unknown type", [2] = "no such endpoint", [3] = "malformed", [4] = "credit overdrawn",
  [5] = "unknown key", [6] = "access denied", [7] = "no such atomic", [8] = "misaligned",
  [9] = "no receive for the tag",
}
local ATOMIC_OP = {
  [0] = "MIN", "MAX", "SUM", "PROD", "LOR", "LAND", "BOR", "BAND", "LXOR", "BXOR", "READ", "WRITE",
  "CSWAP", "CSWAP_NE", "CSWAP_LE", "CSWAP_LT", "CSWAP_GE", "CSWAP_GT", "MSWAP", "DIFF",
}
local DATATYPE = {
  [0] = "INT8", "UINT8", "INT16", "UINT16", "INT32", "UINT32", "INT64", "UINT64", "FLOAT", "DOUBLE",
  "FLOAT_COMPLEX", "DOUBLE_COMPLEX", "LONG_DOUBLE", "LONG_DOUBLE_COMPLEX", "INT128", "UINT128",
  "FLOAT16", "BFLOAT16", "FLOAT8_E4M3", "FLOAT8_E5M2",
}
local RST_REASON = {
  [1] = "unknown session", [2] = "closed", [3] = "version", [4] = "wrong incarnation",
  [5] = "taken for dead", [6] = "another key", [7] = "no key",
}
local VERSION = 3
-- Prologue and base.
local HEAD = 26
local TRAILER = { [0] = "none", [3] = "CRC32C" }

local f = {}
local function field(name, make, ...)
  local abbr = "barewire." .. name
  f[name] = make(abbr, ...)
end

-- Prologue and base.
field("version", ProtoField.uint16, "Version", base.DEC, nil, 0xE000)
field("type", ProtoField.uint16, "Type", base.DEC, TYPES, 0x1F00)
field("sec", ProtoField.bool, "SEC", 16, nil, 0x0080)
field("ar", ProtoField.bool, "Acknowledge at once", 16, nil, 0x0040)
field("rtx", ProtoField.bool, "Retransmission", 16, nil, 0x0020)
field("ce", ProtoField.bool, "Congestion echo", 16, nil, 0x0010)
field("reserved", ProtoField.uint16, "Reserved", base.DEC, nil, 0x000C)
field("trailer", ProtoField.uint16, "Trailer", base.DEC, TRAILER, 0x0003)
field("dst_sid", ProtoField.uint32, "Destination session", base.HEX)
field("psn", ProtoField.uint32, "PSN", base.DEC)
field("cack", ProtoField.uint32, "Next PSN expected", base.DEC)
field("grant", ProtoField.uint16, "Eager units granted (low 16 bits)", base.DEC)
field("plen", ProtoField.uint16, "Payload length", base.DEC)
field("dst_station", ProtoField.uint16, "Destination station", base.DEC)
field("src_station", ProtoField.uint16, "Source station", base.DEC)
-- Messages.
field("dst_ep", ProtoField.uint16, "Destination endpoint", base.DEC)
field("rx_ctx", ProtoField.uint8, "Receive context", base.DEC)
field("src_ep", ProtoField.uint16, "Source endpoint", base.DEC)
field("flags", ProtoField.uint8, "Flags", base.HEX)
field("flags.tagged", ProtoField.bool, "Tagged", 8, nil, 0x01)
field("flags.imm", ProtoField.bool, "Remote CQ data", 8, nil, 0x02)
field("len", ProtoField.uint16, "Record length", base.DEC)
field("tag", ProtoField.uint64, "Tag", base.HEX)
field("imm", ProtoField.uint64, "Remote CQ data", base.HEX)
field("count", ProtoField.uint16, "Records", base.DEC)
field("record", ProtoField.none, "Record")
field("group_mac", ProtoField.ether, "Multicast group")
field("group_number", ProtoField.uint16, "Number of the group", base.DEC)
field("msg_len", ProtoField.uint64, "Message length", base.DEC)
field("offset", ProtoField.uint64, "Offset", base.DEC)
field("payload", ProtoField.bytes, "Payload")
-- Pulled messages.
field("src_op", ProtoField.uint32, "Announcer's operation", base.DEC)
field("src_gen", ProtoField.uint32, "Announcer's generation", base.DEC)
field("dst_op", ProtoField.uint32, "Puller's operation", base.DEC)
field("dst_gen", ProtoField.uint32, "Puller's generation", base.DEC)
field("pull_len", ProtoField.uint32, "Bytes wanted", base.DEC)
field("status", ProtoField.uint16, "Status", base.DEC, END_STATUS)
-- One-sided operations.
field("rma_flags", ProtoField.uint8, "Flags", base.HEX)
field("rma_flags.last", ProtoField.bool, "Last packet", 8, nil, 0x01)
field("rma_flags.imm", ProtoField.bool, "Remote CQ data", 8, nil, 0x02)
field("rma_flags.end", ProtoField.bool, "Last packet for this range", 8, nil, 0x04)
field("rma_flags.fetch", ProtoField.bool, "Old values wanted", 8, nil, 0x08)
field("rma_flags.compare", ProtoField.bool, "Compare values", 8, nil, 0x10)
field("rma_flags.tagged", ProtoField.bool, "On a posted receive", 8, nil, 0x20)
field("rma_flags.void", ProtoField.bool, "Withdrawn", 8, nil, 0x40)
field("rma_flags.answer", ProtoField.bool, "Answer wanted", 8, nil, 0x80)
field("seq", ProtoField.uint16, "Operation", base.DEC)
field("rkey", ProtoField.uint64, "Key", base.HEX)
field("addr", ProtoField.uint64, "Address", base.HEX)
field("left", ProtoField.uint64, "Bytes left of the range", base.DEC)
field("read_len", ProtoField.uint32, "Bytes wanted", base.DEC)
field("elements", ProtoField.uint16, "Elements", base.DEC)
field("atomic_op", ProtoField.uint8, "Operation", base.DEC, ATOMIC_OP)
field("datatype", ProtoField.uint8, "Datatype", base.DEC, DATATYPE)
field("result_at", ProtoField.uint32, "Offset in the result", base.DEC)
field("resp_status", ProtoField.uint16, "Status", base.DEC, NACK_REASON)
-- Control.
field("delay", ProtoField.uint16, "Delay since the newest packet (64 ns)", base.DEC)
field("sack_count", ProtoField.uint8, "SACK words", base.DEC)
field("dups", ProtoField.uint8, "Duplicates since the last ACK", base.DEC, nil, 0x7f)
field("resent", ProtoField.bool, "Newest was a retransmission", 8, nil, 0x80)
field("newest", ProtoField.uint32, "Newest PSN", base.DEC)
field("sack", ProtoField.uint64, "SACK word", base.HEX)
field("cuts", ProtoField.bool, "The message under way ends here", 8, nil, 1)
field("drops", ProtoField.bool, "The operation is given up", 8, nil, 2)
field("drop_seq", ProtoField.uint16, "Number of the operation given up", base.DEC)
field("units", ProtoField.uint32, "Eager units used by what it replaces", base.DEC)
field("nonce", ProtoField.uint64, "Nonce", base.HEX)
field("who_kind", ProtoField.uint8, "Kind", base.DEC, { [0] = "WHO", [1] = "HERE" })
field("host_kind", ProtoField.uint8, "Kind of host", base.DEC, { [1] = "name", [4] = "IPv4", [6] = "IPv6" })
field("service", ProtoField.uint16, "Service", base.DEC)
field("host.name", ProtoField.uint64, "Host, SipHash of its name", base.HEX)
field("host.v4", ProtoField.ipv4, "Host")
field("host.v6", ProtoField.ipv6, "Host")
field("heard", ProtoField.uint16, "Heard, bytes", base.DEC)
field("nack_reason", ProtoField.uint16, "Reason", base.DEC, NACK_REASON)
field("echo_sid", ProtoField.uint32, "Echoed session", base.HEX)
field("echo_psn", ProtoField.uint32, "Echoed PSN", base.DEC)
field("echo_epoch", ProtoField.uint32, "Echoed epoch", base.DEC)
field("inc", ProtoField.uint64, "Incarnation", base.HEX)
field("life", ProtoField.uint64, "Image of the sender's incarnation", base.HEX)
field("victim_inc", ProtoField.uint64, "Receiver's incarnation", base.HEX)
field("victim_epoch", ProtoField.uint32, "Receiver's epoch", base.DEC)
field("rst_reason", ProtoField.uint16, "Reason", base.DEC, RST_REASON)
field("version_min", ProtoField.uint8, "Lowest version spoken", base.DEC)
field("version_max", ProtoField.uint8, "Highest version spoken", base.DEC)
field("sid", ProtoField.uint32, "Sender's session", base.HEX)
field("epoch", ProtoField.uint32, "Epoch", base.DEC)
field("target_inc", ProtoField.uint64, "Incarnation wanted", base.HEX)
field("caps", ProtoField.uint32, "Capabilities", base.HEX)
field("max_frame", ProtoField.uint32, "Largest frame", base.DEC)
field("window", ProtoField.uint16, "Window", base.DEC)
field("minor", ProtoField.uint16, "Minor version", base.DEC)
field("open_grant", ProtoField.uint32, "Eager units granted from the start", base.DEC)
field("cookie", ProtoField.uint64, "Cookie", base.HEX)
field("frame", ProtoField.uint16, "Length of the OPEN that arrived", base.DEC)
field("padding", ProtoField.none, "Padding that measures the path")
field("zero", ProtoField.bytes, "Zero")
field("crc", ProtoField.uint32, "CRC32C", base.HEX)
field("crc_ok", ProtoField.bool, "CRC32C is right")
field("refused", ProtoField.string, "Refused")

local list = {}
for _, v in pairs(f) do list[#list + 1] = v end
p.fields = list

local malformed = ProtoExpert.new("barewire.malformed", "A node would refuse this frame",
  expert.group.MALFORMED, expert.severity.ERROR)
p.experts = { malformed }

-- CRC32C, one byte a step. `bit` comes with Wireshark's Lua 5.2.
local band, bor, bxor, rshift = bit.band, bit.bor, bit.bxor, bit.rshift
local crc_table = {}
for i = 0, 255 do
  local c = i
  for _ = 1, 8 do
    if band(c, 1) == 1 then c = bxor(rshift(c, 1), 0x82F63B78) else c = rshift(c, 1) end
  end
  crc_table[i] = c
end

local function crc32c(bytes)
  local c = bxor(0xFFFFFFFF, 0)
  for i = 0, bytes:len() - 1 do
    c = bxor(rshift(c, 8), crc_table[band(bxor(c, bytes:get_index(i)), 0xFF)])
  end
  c = bxor(c, 0xFFFFFFFF)
  if c < 0 then c = c + 4294967296 end
  return c
end

-- What is wrong with the frame, the first cause only; raised with error() where nothing behind it
-- can be decoded.
local function refuse(state, cause, fatal)
  if state.cause == nil then
    state.cause = cause
  end
  if fatal then error({ refused = cause }) end
end

local function zero(state, tree, buf, cause)
  for i = 0, buf:len() - 1 do
    if buf(i, 1):uint() ~= 0 then
      tree:add(f["zero"], buf)
      refuse(state, cause or "op_reserved")
      return
    end
  end
end

local function text(name, buf)
  return string.format("%s=%s", name, tostring(buf:le_uint64()))
end

-- The first 16 bytes that MSG, MSGM, RNDV and the records of a PACK share. Returns the flags.
local function message(state, tree, op, with_len)
  tree:add_le(f["dst_ep"], op(0, 2))
  tree:add_le(f["src_ep"], op(2, 2))
  local flags = op(4, 1):uint()
  local t = tree:add(f["flags"], op(4, 1))
  t:add(f["flags.tagged"], op(4, 1))
  t:add(f["flags.imm"], op(4, 1))
  tree:add(f["rx_ctx"], op(5, 1))
  if with_len then
    tree:add_le(f["len"], op(6, 2))
  elseif state.type ~= 2 then
    zero(state, tree, op(6, 2))
  end
  if flags > 3 then refuse(state, "msg_flags") end
  tree:add_le(f["tag"], op(8, 8))
  if band(flags, 1) == 0 and op(8, 8):le_uint64() ~= UInt64(0) then refuse(state, "stray_tag") end
  if with_len then return flags end
  if band(flags, 2) ~= 0 and state.buf:len() < HEAD + OP_LEN[state.type] + 8 then
    refuse(state, "op_truncated", true)
  end
  if state.type == 2 then zero(state, tree, op(6, 2), "stray_len") end
  state.info = state.info .. string.format(" ep %d > %d", op(2, 2):le_uint(), op(0, 2):le_uint())
  if band(flags, 1) == 1 then
    state.info = state.info .. " tag=0x" .. op(8, 8):le_uint64():tohex()
  end
  return flags
end

local function names(tree, op, at, side)
  tree:add_le(f[side .. "_op"], op(at, 4))
  tree:add_le(f[side .. "_gen"], op(at + 4, 4))
end

local function records(state, tree, buf, count)
  local at = 0
  for i = 1, count do
    if buf:len() - at < 16 then refuse(state, "pack_record", true) end
    local flags = buf(at + 4, 1):uint()
    local len = buf(at + 6, 2):le_uint()
    local head = band(flags, 2) ~= 0 and 24 or 16
    local padded = math.ceil((head + len) / 8) * 8
    local t = tree:add(f["record"], buf(at, math.min(padded, buf:len() - at)))
    t:append_text(string.format(" %d, %d bytes", i, len))
    message(state, t, buf(at, 16), true)
    if buf:len() - at < padded then refuse(state, "pack_record", true) end
    if head == 24 then t:add_le(f["imm"], buf(at + 16, 8)) end
    if len > 0 then t:add(f["payload"], buf(at + head, len)) end
    local pad = padded - head - len
    if pad > 0 then zero(state, t, buf(at + head + len, pad), "pack_padding") end
    at = at + padded
  end
  if at ~= buf:len() then refuse(state, "pack_trailing") end
end

local ops = {}

ops[1] = function(state, tree, op)
  tree:add_le(f["delay"], op(0, 2))
  tree:add_le(f["sack_count"], op(2, 1))
  tree:add_le(f["dups"], op(3, 1))
  tree:add_le(f["resent"], op(3, 1))
  tree:add_le(f["newest"], op(4, 4))
  local cack = state.cack
  for i = 0, op(2, 1):uint() - 1 do
    local word = op(8 + 8 * i, 8)
    local t = tree:add_le(f["sack"], word)
    t:append_text(string.format(" (from PSN %.0f)", (cack + 1 + 64 * i) % 4294967296))
  end
  state.info = state.info .. string.format(" newest=%d sack=%d", op(4, 4):le_uint(),
    op(2, 1):uint())
end

ops[2] = function(state, tree, op) message(state, tree, op) end

ops[3] = function(state, tree, op)
  tree:add_le(f["count"], op(0, 2))
  local count = op(0, 2):le_uint()
  state.info = state.info .. string.format(" %d messages", count)
  if count == 0 or count > 255 then refuse(state, "pack_count", true) end
  zero(state, tree, op(2, 6))
end

ops[4] = function(state, tree, op)
  local flags = message(state, tree, op)
  tree:add_le(f["msg_len"], op(16, 8))
  tree:add_le(f["offset"], op(24, 8))
  local len, offset = op(16, 8):le_uint64(), op(24, 8):le_uint64()
  local stop = offset + UInt64(state.plen)
  if state.plen == 0 then refuse(state, "empty_piece") end
  if stop < offset or stop > len then refuse(state, "piece_range") end
  if band(flags, 2) ~= 0 and offset ~= UInt64(0) then refuse(state, "late_imm") end
  state.info = state.info .. " " .. text("offset", op(24, 8)) .. " " .. text("of", op(16, 8))
end

ops[5] = function(state, tree, op)
  message(state, tree, op)
  tree:add_le(f["msg_len"], op(16, 8))
  names(tree, op, 24, "src")
  state.info = state.info .. " " .. text("msg_len", op(16, 8))
end

ops[6] = function(state, tree, op)
  names(tree, op, 0, "src")
  names(tree, op, 8, "dst")
  tree:add_le(f["offset"], op(16, 8))
  tree:add_le(f["pull_len"], op(24, 4))
  local len, offset = op(24, 4):le_uint(), op(16, 8):le_uint64()
  if len == 0 or len > 1048576 or offset + UInt64(len) < offset then refuse(state, "pull_range") end
  zero(state, tree, op(28, 4))
  state.info = state.info .. " " .. text("offset", op(16, 8)) .. string.format(" len=%d", len)
end

ops[7] = function(state, tree, op)
  names(tree, op, 0, "dst")
  tree:add_le(f["offset"], op(8, 8))
  local offset = op(8, 8):le_uint64()
  if offset + UInt64(state.plen) < offset then refuse(state, "piece_range") end
  state.info = state.info .. (state.plen == 0 and " withdrawn" or " " .. text("offset", op(8, 8)))
end

ops[8] = function(state, tree, op)
  names(tree, op, 0, "src")
  tree:add_le(f["status"], op(8, 2))
  local status = END_STATUS[op(8, 2):le_uint()]
  if status == nil then refuse(state, "end_status") end
  zero(state, tree, op(10, 6))
  state.info = state.info .. " " .. (status or "?")
end

ops[9] = function(state, tree, op)
  tree:add_le(f["units"], op(0, 4))
  tree:add_le(f["cuts"], op(4, 1))
  tree:add_le(f["drops"], op(4, 1))
  tree:add_le(f["drop_seq"], op(6, 2))
  local flags, seq = op(4, 1):le_uint(), op(6, 2):le_uint()
  local stray = flags < 2 and seq ~= 0
  if flags > 3 or op(5, 1):le_uint() ~= 0 or stray then refuse(state, "op_reserved") end
end

ops[12] = function(state, tree, op)
  tree:add_le(f["heard"], op(0, 2))
  zero(state, tree, op(2, 6))
  local heard = op(0, 2):le_uint()
  state.info = state.info .. (heard == 0 and " asks" or " heard " .. heard)
end

ops[13] = function() end

ops[10] = function(state, tree, op)
  tree:add_le(f["nack_reason"], op(0, 2))
  local reason = NACK_REASON[op(0, 2):le_uint()]
  if reason == nil then refuse(state, "nack_reason") end
  zero(state, tree, op(2, 6))
  state.info = state.info .. " " .. (reason or "?")
end

-- The range of versions that RST and OPEN carry at `at`.
local function versions(tree, op, at)
  tree:add(f["version_min"], op(at, 1))
  tree:add(f["version_max"], op(at + 1, 1))
  return op(at, 1):uint(), op(at + 1, 1):uint()
end

local function is_range(lowest, highest)
  return 0 < lowest and lowest <= highest and highest < 8
end

-- Which field says the host of a WHO, and how many bytes of 16 it has.
local HOST = { [1] = { "host.name", 8 }, [4] = { "host.v4", 4 }, [6] = { "host.v6", 16 } }

ops[11] = function(state, tree, op)
  tree:add_le(f["nonce"], op(0, 8))
  tree:add(f["who_kind"], op(8, 1))
  tree:add(f["host_kind"], op(9, 1))
  tree:add_le(f["service"], op(10, 2))
  local lowest, highest = versions(tree, op, 12)
  local kind, host, service = op(8, 1):uint(), HOST[op(9, 1):uint()], op(10, 2):le_uint()
  if kind > 1 or host == nil then refuse(state, "who_kind", true) end
  if host[2] == 16 or host[2] == 4 then
    tree:add(f[host[1]], op(16, host[2]))
  else
    tree:add_le(f[host[1]], op(16, host[2]))
  end
  if host[2] < 16 then zero(state, tree, op(16 + host[2], 16 - host[2])) end
  zero(state, tree, op(14, 2))
  local nonce = op(0, 8):le_uint64() ~= UInt64(0)
  if kind == 0 and not nonce or kind == 1 and service == 0 then refuse(state, "nameless") end
  if not is_range(lowest, highest) then refuse(state, "versions") end
  local what = kind == 0 and "WHO" or nonce and "HERE" or "HERE (announced)"
  state.info = state.info .. string.format(" %s %d", what, service)
end

ops[14] = function(state, tree, op)
  tree:add_le(f["echo_sid"], op(0, 4))
  tree:add_le(f["echo_psn"], op(4, 4))
  tree:add_le(f["life"], op(8, 8))
  tree:add_le(f["victim_inc"], op(16, 8))
  tree:add_le(f["victim_epoch"], op(24, 4))
  tree:add_le(f["rst_reason"], op(28, 2))
  local lowest, highest = versions(tree, op, 30)
  local reason = RST_REASON[op(28, 2):le_uint()]
  if reason == nil then refuse(state, "rst_reason") end
  if not is_range(lowest, highest) then refuse(state, "versions") end
  if op(8, 8):le_uint64() == UInt64(0) then refuse(state, "nameless") end
  state.info = state.info .. " " .. (reason or "?")
  if op(28, 2):le_uint() == 3 then
    state.info = state.info .. string.format(" %d to %d", lowest, highest)
  end
end

ops[15] = function(state, tree, op)
  tree:add_le(f["sid"], op(0, 4))
  tree:add_le(f["epoch"], op(4, 4))
  tree:add_le(f["inc"], op(8, 8))
  tree:add_le(f["target_inc"], op(16, 8))
  tree:add_le(f["echo_sid"], op(24, 4))
  tree:add_le(f["echo_epoch"], op(28, 4))
  tree:add_le(f["caps"], op(32, 4))
  tree:add_le(f["max_frame"], op(36, 4))
  tree:add_le(f["window"], op(40, 2))
  tree:add_le(f["minor"], op(42, 2))
  tree:add_le(f["open_grant"], op(44, 4))
  tree:add_le(f["cookie"], op(48, 8))
  tree:add_le(f["frame"], op(56, 2))
  local lowest, highest = versions(tree, op, 58)
  local sid, epoch = op(0, 4):le_uint(), op(4, 4):le_uint()
  local is_long = op(14, 2):uint() ~= 0 or op(22, 2):uint() ~= 0
  if (sid == 0) ~= (epoch == 0) or op(8, 8):le_uint64() == UInt64(0) or is_long then
    refuse(state, "nameless")
  end
  local echo_sid, echo_epoch = op(24, 4):le_uint(), op(28, 4):le_uint()
  if echo_sid ~= state.dst_sid or (echo_sid == 0) ~= (echo_epoch == 0) then
    refuse(state, "open_echo")
  end
  if op(40, 2):le_uint() == 0 then refuse(state, "open_window") end
  if op(36, 4):le_uint() < 256 then refuse(state, "open_max_frame") end
  local cookie = op(48, 8):le_uint64() ~= UInt64(0)
  if sid == 0 and (not cookie or echo_sid == 0) then refuse(state, "open_challenge") end
  if not is_range(lowest, highest) then refuse(state, "versions") end
  zero(state, tree, op(60, 4))
  if sid == 0 then
    state.info = state.info .. " challenge"
    return
  end
  state.info = state.info .. (echo_sid == 0 and "" or " answer") .. (cookie and " cookie" or "")
    .. string.format(" sid=0x%08x epoch=%d length=%d", sid, epoch, state.buf:len())
end

-- The first 24 bytes of WRITE, READ and ATOMIC; `known` are the flags that the type has, `whole`
-- those that it has with ANSWER. Returns the flags.
local function range(state, tree, op, known, whole)
  tree:add_le(f["dst_ep"], op(0, 2))
  tree:add_le(f["src_ep"], op(2, 2))
  local flags = op(4, 1):uint()
  local t = tree:add(f["rma_flags"], op(4, 1))
  for _, name in ipairs({ "last", "imm", "end", "fetch", "compare", "tagged", "void",
    "answer" }) do
    t:add(f["rma_flags." .. name], op(4, 1))
  end
  local answer = band(flags, 0x80) ~= 0 and band(flags, whole + 0x08) ~= whole
  if band(flags, 255 - known) ~= 0 or answer then refuse(state, "rma_flags") end
  tree:add(f["rx_ctx"], op(5, 1))
  tree:add_le(f["seq"], op(6, 2))
  tree:add_le(f["rkey"], op(8, 8))
  tree:add_le(f["addr"], op(16, 8))
  state.info = state.info .. string.format(" ep %d > %d addr=0x", op(2, 2):le_uint(),
    op(0, 2):le_uint()) .. op(16, 8):le_uint64():tohex()
  return flags
end

-- Remote CQ data has to be there, and in the last packet.
local function last_imm(state, flags)
  if band(flags, 2) == 0 then return end
  if state.buf:len() < HEAD + OP_LEN[state.type] + 8 then refuse(state, "op_truncated", true) end
  if band(flags, 1) == 0 then refuse(state, "late_imm") end
end

local function beyond(at, len)
  return at + len < at
end

ops[16] = function(state, tree, op)
  local flags = range(state, tree, op, 0x83, 0x01)
  names(tree, op, 24, "dst")
  tree:add_le(f["left"], op(32, 8))
  if op(32, 8):le_uint64() < UInt64(state.plen) then
    refuse(state, "rma_range")
  end
  last_imm(state, flags)
end

ops[17] = function(state, tree, op)
  local flags = range(state, tree, op, 0x85, 0x05)
  names(tree, op, 24, "dst")
  tree:add_le(f["offset"], op(32, 8))
  tree:add_le(f["read_len"], op(40, 4))
  local len = op(40, 4):le_uint()
  local at = op(32, 8):le_uint64()
  local whole = at == UInt64(0) and len > 0 and len <= 4096
  if len > 262144 or beyond(at, UInt64(len)) or band(flags, 0x80) ~= 0 and not whole then
    refuse(state, "rma_range")
  end
  zero(state, tree, op(44, 4))
  state.info = state.info .. string.format(" len=%d", len)
end

ops[18] = function(state, tree, op)
  local flags = range(state, tree, op, 0xff, 0x01)
  names(tree, op, 24, "dst")
  tree:add_le(f["elements"], op(32, 2))
  tree:add(f["atomic_op"], op(34, 1))
  tree:add(f["datatype"], op(35, 1))
  tree:add_le(f["result_at"], op(36, 4))
  last_imm(state, flags)
  state.info = state.info .. string.format(" %s %s x %d", ATOMIC_OP[op(34, 1):uint()] or "?",
    DATATYPE[op(35, 1):uint()] or "?", op(32, 2):le_uint())
end

ops[19] = function(state, tree, op)
  names(tree, op, 0, "dst")
  tree:add_le(f["result_at"], op(8, 4))
  tree:add_le(f["resp_status"], op(12, 2))
  local status = op(12, 2):le_uint()
  if status ~= 0 and NACK_REASON[status] == nil then refuse(state, "resp_status") end
  zero(state, tree, op(14, 2))
end

ops[22] = function(state, tree, op)
  tree:add_le(f["src_ep"], op(2, 2))
  local flags = op(4, 1):uint()
  tree:add(f["flags"], op(4, 1))
  tree:add(f["flags.imm"], op(4, 1))
  tree:add_le(f["inc"], op(8, 8))
  tree:add(f["group_mac"], op(16, 6))
  tree:add_le(f["group_number"], op(22, 2))
  zero(state, tree, op(0, 2))
  zero(state, tree, op(5, 3))
  if band(flags, 0xfd) ~= 0 then refuse(state, "msg_flags") end
  if op(8, 8):le_uint64() == UInt64(0) or op(14, 2):uint() ~= 0 then refuse(state, "nameless") end
  local mac = tostring(op(16, 6):ether())
  if band(op(16, 1):uint(), 1) == 0 or mac == "ff:ff:ff:ff:ff:ff" then
    refuse(state, "mcast_group")
  end
  if band(flags, 2) ~= 0 and state.buf:len() < HEAD + 32 then
    refuse(state, "op_truncated", true)
  end
  state.info = state.info .. string.format(" %s %d", mac, op(22, 2):le_uint())
end

-- Refuses a frame that is shorter than an operation header of `op_len` bytes and what follows it.
local function whole(state, buf, op_len)
  local stop = HEAD + op_len + state.plen
  if buf:len() < HEAD + op_len then refuse(state, "op_truncated", true) end
  if buf:len() < stop then refuse(state, "payload_truncated", true) end
  if buf:len() < stop + state.crc_len then refuse(state, "trailer_truncated", true) end
  return stop
end

-- Whether an unknown type's checksum, if it has one, is right at any place where it can be.
local function crc_anywhere(state, buf)
  if state.trailer == 0 then return true end
  for words = 0, 12 do
    local stop = HEAD + 8 * words + state.plen
    if buf:len() >= stop + 4 and crc32c(buf(0, stop):bytes()) == buf(stop, 4):le_uint() then
      return true
    end
  end
  return false
end

-- Prologue and base; `buf` starts behind the Ethernet header.
local function prologue(state, buf, pinfo, tree)
  if buf:len() < HEAD then refuse(state, "short", true) end
  local w = buf(0, 2):uint()
  for _, name in ipairs({ "version", "type", "sec", "ar", "rtx", "ce", "reserved", "trailer" }) do
    tree:add(f[name], buf(0, 2))
  end
  local version = rshift(w, 13)
  if version ~= VERSION and band(rshift(w, 8), 31) == 14 and buf:len() >= HEAD + 32 then
    -- The same in every version.
    state.foreign = true
    state.info = string.format("RST of version %d", version)
    ops[14](state, tree, buf(HEAD, 32))
    return
  end
  if version ~= VERSION then refuse(state, "version", true) end
  if band(w, 0x80) ~= 0 then refuse(state, "secured", true) end
  if band(w, 0x10) ~= 0 and band(rshift(w, 8), 31) ~= 1 then
    refuse(state, "congestion_echo", true)
  end
  if band(w, 0x0C) ~= 0 then refuse(state, "prologue_reserved", true) end
  state.trailer = band(w, 3)
  if TRAILER[state.trailer] == nil then refuse(state, "trailer_code", true) end
  state.crc_len = state.trailer == 3 and 4 or 0
  local src = tostring(pinfo.dl_src)
  local group = band(tonumber(src:sub(1, 2), 16) or 0, 1) == 1
  local zero = buf(22, 4):uint() == 0
  if src == "00:00:00:00:00:00" or group or buf(20, 2):uint() == 0xffff or not zero then
    refuse(state, "source", true)
  end
  state.type = band(rshift(w, 8), 31)
  tree:add_le(f["dst_sid"], buf(2, 4))
  tree:add_le(f["psn"], buf(6, 4))
  tree:add_le(f["cack"], buf(10, 4))
  tree:add_le(f["grant"], buf(14, 2))
  tree:add_le(f["plen"], buf(16, 2))
  tree:add_le(f["dst_station"], buf(18, 2))
  tree:add_le(f["src_station"], buf(20, 2))
  state.dst_sid = buf(2, 4):le_uint()
  state.cack = buf(10, 4):le_uint()
  state.plen = buf(16, 2):le_uint()
  state.info = string.format("%s psn=%.0f cack=%.0f", TYPES[state.type] or "?",
    buf(6, 4):le_uint(), state.cack)
  if state.plen > 0 then state.info = state.info .. string.format(" plen=%d", state.plen) end
  if band(w, 0x20) ~= 0 then state.info = state.info .. " [RTX]" end
  if band(w, 0x40) ~= 0 then state.info = state.info .. " [AR]" end
  if band(w, 0x10) ~= 0 then state.info = state.info .. " [CE]" end
  if TYPES[state.type] == nil and state.type < 16 then refuse(state, "reserved_type", true) end
  if state.dst_sid == 0 and not SIDLESS[state.type] then
    refuse(state, "no_sid", true)
  end
  if TYPES[state.type] == nil then
    whole(state, buf, 0)
    refuse(state, crc_anywhere(state, buf) and "unknown_type" or "crc", true)
  end
  if state.plen > 0 and not HAS_PAYLOAD[state.type] then refuse(state, "stray_payload", true) end
end

-- In the order of the codec, so that a frame with several faults has the same first one: least
-- lengths, checksum, operation header, lengths with what the header adds.
local function packet(state, buf, pinfo, tree)
  state.buf = buf
  prologue(state, buf, pinfo, tree)
  if state.foreign then return end
  local ty, plen = state.type, state.plen
  local op_len = OP_LEN[ty]
  whole(state, buf, op_len)
  local count = ty == 1 and buf(HEAD + 2, 1):uint() or 0
  local imm = HAS_IMM[ty] and band(buf(HEAD + 4, 1):uint(), 2) ~= 0
  local extra = 8 * count + (imm and 8 or 0)
  local ok = true
  if state.crc_len > 0 then
    local stop = whole(state, buf, op_len + extra)
    ok = crc32c(buf(0, stop):bytes()) == buf(stop, 4):le_uint()
    if not ok then refuse(state, "crc") end
  end
  if count > 64 then refuse(state, "sack_count", true) end
  if ty == 1 and buf:len() < HEAD + op_len + extra then
    refuse(state, "op_truncated", true)
  end
  ops[ty](state, tree, op_len > 0 and buf(HEAD, op_len + 8 * count) or nil)
  local stop = whole(state, buf, op_len + extra)
  if imm then tree:add_le(f["imm"], buf(HEAD + op_len, 8)) end
  if ty == 3 then
    if plen < 1 then refuse(state, "pack_record", true) end
    records(state, tree, buf(stop - plen, plen), buf(HEAD, 2):le_uint())
  elseif plen > 0 then
    tree:add(f["payload"], buf(stop - plen, plen))
  end
  if state.crc_len > 0 then
    tree:add_le(f["crc"], buf(stop, 4))
    tree:add(f["crc_ok"], buf(stop, 4), ok):set_generated()
  end
  stop = stop + state.crc_len
  local measures = ty == 15 or ty == 12 and buf(HEAD, 2):le_uint() == 0
  if measures and buf:len() > stop then tree:add(f["padding"], buf(stop)) end
end

function p.dissector(buf, pinfo, tree)
  pinfo.cols.protocol = "barewire"
  local t = tree:add(p, buf())
  local state = { info = "" }
  local done, err = pcall(packet, state, buf, pinfo, t)
  if not done and not (type(err) == "table" and err.refused) then
    error(err, 0)
  end
  if state.cause ~= nil then
    t:add(f["refused"], buf(0, 0), state.cause)
    t:add_proto_expert_info(malformed, "Refused: " .. state.cause)
    state.info = state.info .. " [refused: " .. state.cause .. "]"
  end
  pinfo.cols.info = state.info
  t:append_text(", " .. state.info)
end

DissectorTable.get("ethertype"):add(ETHERTYPE, p)
