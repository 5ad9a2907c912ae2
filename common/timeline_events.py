"""The events that a timeline's reader must know by name, and those that several rooms record.

A step is one pass of an engine. Lanes of one request, and its marks at the gateway, are what its arrows
across the services are drawn from, so they carry its id.
"""

from common.timeline import define

# a request's life, at the gateway
RECEIVED = define("received", "mark")
PLACED = define("placed", "mark")
FIRST_TOKEN = define("first token", "mark")
SECOND_TOKEN = define("second token", "mark")
CONTINUED = define("continued", "mark", "attempt")
FINISHED = define("finished", "mark")
FAILED = define("failed", "mark")
REFUSED = define("refused", "mark")
LEFT = define("left", "mark")
ENDS = (FINISHED, FAILED, REFUSED, LEFT)
"""One of them is its last; LEFT: its client has, before its end."""

# one request's calls, from one service to another
PLACE_REQUEST = define("place request", "lane", "attempt")
DISPATCH = define("dispatch", "lane", "attempt")
OFFER_SEQUENCE = define("offer sequence", "lane", "attempt")
TRANSFER_KV = define("transfer KV", "lane", "attempt", "bytes", "first layer", "last layer")
PULL_KV = define("pull KV", "lane", "attempt", "portion", "bytes")
SWAP_KV = define("swap KV", "lane", "attempt", "blocks")
MOVE_KV = define("move KV", "lane", "attempt", "blocks")

# engines
PREFILL_STEP = define("prefill step", "step", "sequences", "tokens")
DECODE_STEP = define("decode step", "step", "sequences", "context tokens")
ATTENTION_STEP = define("attention step", "step", "sequences", "tokens", "layers", "attention ns")
SLICE = define("slice", "compute", "layer", "batch")
ATTENTION = define("attention", "compute", "layer", "tokens")
LAYER = define("layer", "compute", "layer", "tokens")
SAMPLE = define("sample", "compute", "sequences")
EMULATED = define("emulated", "compute", "sequences", "tokens")

# one layer's exchange between a model worker and an attention worker
SEND_PLAN = define("send plan", "exchange", "sequences", "bytes")
SEND_Q = define("send Q", "exchange", "layer", "bytes")
SEND_KV = define("send KV", "exchange", "layer", "bytes")
SEND_OUTPUT = define("send output", "exchange", "layer", "bytes")
TAKE_OUTPUT = define("take output", "exchange", "layer")
WAIT_Q = define("wait for Q", "waiting", "layer")
WAIT_KV = define("wait for KV", "waiting", "layer")
WAIT_OUTPUT = define("wait for output", "waiting", "layer")
WAIT_BATCH = define("wait for a batch", "waiting")

# event loops
TAKE_TOKENS = define("take tokens", "span", "tokens")
DECIDE = define("decide", "span", "commands")

# what waits and what is held
OPEN_REQUESTS = define("open requests", "counter", "requests")
QUEUES = define("queues", "counter", "prefill", "hand-over", "decode")
RUNNING = define("decoding", "counter", "sequences")
KV_BLOCKS = define("KV blocks", "counter", "used", "quarantined")
