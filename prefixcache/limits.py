"""Every limit, timeout and interval of the path in one place. Seconds, bytes and counts as the names say."""

from __future__ import annotations

# --- what a client may send -------------------------------------------------------------------------------
MAX_BODY_BYTES = 32 * 1024 * 1024
"""Agent prompts pass aiohttp's default of 1 MiB daily."""
MAX_BODY_LISTS = 131_072
MAX_BODY_COMMAS = 2_500_000
"""A body with more objects and lists than a context of a million tokens has, or with more members than
MAX_TOKENIZE_CHARS ids, is not taken apart: that would hold up all others for over 50 ms and take up to 30 times its
bytes (3.5 million short lists: 1.1 s). Text counts, too."""
MAX_BODY_COLONS = 262_144
"""So is one with more members: a million take 0.2 s to read, and twice as long to be written down in their order."""
MAX_LARGE_BODIES_BYTES = 256 * 1024 * 1024
"""Sum of the bodies of LARGE_BODY_BYTES and more that a proxy holds, eight of the longest; a further one is not read
before there is room ..."""
MAX_MEDIUM_BODIES_BYTES = 256 * 1024 * 1024
"""... and so, apart from those, of bodies of OFFLOAD_BODY_BYTES and more. Shorter ones cost less than all else that
stands behind a connection, and wait for nothing."""
BODY_ROOM_S = 30.0
"""Wait for that room; edge and clients wait for longer."""
BODY_GRACE_S = 30.0
BODY_LEAST_BYTES_PER_S = 128 * 1024
"""A body that holds room must be there in this time: of a slow client's 32 MiB in five minutes."""
MAX_HEADER_LINE_BYTES = 16 * 1024
"""The request line, or one header: edge and proxy take the same, so that neither's word depends on the other."""
MAX_MESSAGES = 16_384
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1_024
MAX_METADATA_BYTES = 64 * 1024
MAX_TOP_LOGPROBS = 20
MAX_TEMPERATURE = 2.0
MIN_REPETITION_PENALTY = 0.01
MAX_REPETITION_PENALTY = 10.0
MAX_PENALTY = 2.0
"""Presence and frequency penalties lie between its negative and itself, as in OpenAI's API; so does MAX_LOGIT_BIAS."""
MAX_LOGIT_BIAS = 100.0
MAX_LOGIT_BIAS_TOKENS = 1_024
MAX_STOP_TOKEN_IDS = 256
"""Those of the model and those of the request."""
MAX_CHOICES = 128
"""Choices of one prompt, as OpenAI's `n`."""
MAX_GENERATIONS = 512
"""Prompts times choices of one request: half of a worker's waiting queue."""
MAX_ECHO_CHARS = 16 * 1024 * 1024
"""Text of prompts that one answer repeats, over all its choices."""
MAX_REQUEST_ID_CHARS = 128
MAX_STREAM_BACKLOG_BYTES = 1024 * 1024
"""Bytes a client may leave unread before its stream is cut."""

# --- protocol v1 ------------------------------------------------------------------------------------------
MAX_FRAME_BYTES = 64 * 1024 * 1024
HELLO_TIMEOUT_S = 5.0
BEAT_INTERVAL_S = 0.5
MAX_HELLO_BYTES = 64 * 1024
"""Bytes a peer may send before its hello is complete."""
MAX_PROXY_BACKLOG_BYTES = 8 * 1024 * 1024
"""Bytes a proxy may leave unread on its worker stream before the worker cuts it."""

# --- registry, leases and index ---------------------------------------------------------------------------
LEASE_S = 5.0
LEASE_RENEWAL_S = 0.25
REGISTRY_READ_S = 0.25
INDEX_DEADLINE_S = 0.030
INDEX_WRITE_TIMEOUT_S = 1.0
REANNOUNCE_JITTER_S = 5.0
"""A new incarnation after a fault spreads its announcement over this time."""
INDEX_CONNECT_TIMEOUT_S = 1.0
INDEX_CONNECTIONS = 16
"""Most connections of one process to Redis; a call takes well under a millisecond."""
MAX_APPLY_HASHES = 256
MATCH_LOADS = 8
"""Deepest holders, and candidates named by the proxy, whose load comes with a match."""
LOAD_REPORT_S = 0.25
LOAD_RECORD_S = 3.0
"""A load record that is not written again counts for nothing after this time."""
LOAD_KEY_S = 30.0
PENDING_S = 60.0
"""A pending claim of a request that never said how it ended."""
PENDING_SETTLED_S = 2.0
"""After its first token: the worker's own claims are on their way."""
SHORT_PREFILL_TOKENS = 256
"""A request with less to compute is sent without waiting for its commit."""
DEAD_AFTER_S = 30.0
"""A lease that ended only hides its incarnation; this long after its end the keeper removes it."""
RECORD_DEAD_AFTER_S = 600.0
"""A worker's record without a lease for this long is removed."""
KEEPER_S = 10.0
"""Length of the keeper's office; each of its calls renews it."""
KEEPER_PAUSE_S = 1.0
"""Between two calls of an idle keeper."""
SWEEP_PAUSE_S = 0.005
"""Between two calls while there is more to sweep."""
SWEEP_FIELDS = 768
"""Index blocks that one call of the keeper looks at, give or take a bucket."""
INDEX_DEAD_CONNECTION_S = 1.0
"""A hot connection that owes a reply for this long is closed."""
INDEX_MOST_CALLS = 1_024
"""Calls that one hot connection may owe a reply; a further one fails at once."""
BREAKER_STALLS = 3
"""So many times in a row a reply was overdue, and calls fail at once until a trial was answered in time."""
BREAKER_PAUSE_S = 1.0
"""Before an open breaker is tried."""
DEFAULT_PREFILL_RATE = 1_000.0
"""Uncached tokens a second of a worker, as long as none of its kind has measured it: of the order of a few CPU cores.

Rather low than high: as long as nobody knows, all times scale alike, and against a measured wait a rate that is too low
lets a prefix weigh more, which costs a little balance and saves work.
"""
RECENT_PLACEMENTS = 65_536
"""Blocks of which a proxy remembers where it sent them, some 10 MB: the last few thousand prompts."""
MAX_MATCH_BLOCKS = 16_384
"""Index blocks of one match: a prompt of a million tokens; deeper ones are not looked up."""

# --- worker engine ----------------------------------------------------------------------------------------
MAX_STEP_TOKENS = 512
"""Tokens computed in one engine step: decodes first, prefill chunks take the rest."""
MAX_STEP_S = 0.5
"""What prefill chunks add to a step at most while decodes wait for it. Measured with the demo model on one core: about
what a full chunk takes at the head of a prompt, so that only deeper ones are cut. Beside a prompt of 7,500 tokens the
longest gap in an answer falls from 4.3 s to 0.8 s, and the prompt takes up to 1.4 times as long. A GPU never gets
there."""
MAX_RUNNING_REQUESTS = 256
"""Below MAX_STEP_TOKENS by far, so that decodes never starve the oldest prefill."""
MAX_WAITING_REQUESTS = 1_024
ENGINE_STOP_TIMEOUT_S = 3.0
"""A worker that ends waits this long for its current step."""
DRAIN_TIMEOUT_S = 30.0
"""A program that is told to end finishes what it has for at most so long: most answers, and the patience that
orchestrators have by default."""
CLOSE_TIMEOUT_S = 1.0
"""Time for the last frames to reach their peers when a worker ends."""
LOADING_POLL_S = 0.05
"""A worker whose model is loaded stops answering that it loads after this time at most."""
INDEX_RETRY_S = 0.25
"""Pause before an index write that failed is sent again."""
PUBLISH_PAUSE_S = 0.05
"""Between two batches of a worker's changes, for each costs as much CPU as several steps of a quick model. Until then
pending claims stand for what was stored."""
REDIS_MEMORY_S = 5.0
"""Between two looks of a proxy at Redis' own account of its memory; one takes some 50 us there."""
INDEX_CHECK_S = 5.0
"""Without changes, a worker asks this often whether the index still knows its last batch."""
SELF_QUESTION_S = 10.0
"""A health check that wants to see a token gives a worker's engine a question of one token at most so often, and none
while others get tokens."""
SELF_ANSWER_WAIT_S = 4.0
"""It waits so long for that token; what comes later counts for the next check."""
SELF_STUCK_S = 30.0
"""An engine that owes a token and makes no step for this long does not answer. Below WORKER_STUCK_UNKNOWN_S, after
which proxies cut it: a check that fails restarts nothing."""

# --- health checks ----------------------------------------------------------------------------------------
PROBE_QUESTION_S = 10.0
"""A check of a proxy asks for a one-token answer at most so often; between them the last one counts."""
PROBE_ANSWER_S = 8.0
"""For that answer. One that is late because others wait before it says nothing against the proxy."""
PROBE_TIMEOUT_S = 5.0
"""For everything else that a check asks."""

# --- edge -------------------------------------------------------------------------------------------------
EDGE_LOOK_S = 1.0
"""From the beginning of one look at which proxies there are, and which are ready, to that of the next, unless it takes
longer; below half of the drain delay of a proxy."""
EDGE_READY_TIMEOUT_S = 1.0
"""For a proxy's word on whether it is ready ..."""
EDGE_SILENT_LOOKS = 3
"""... which may be missed twice in a row: a proxy whose loop is late is not gone."""
EDGE_RELOADS = 10
EDGE_RELOADS_S = 60.0
"""So many times in this time nginx takes a new list at once, then every EDGE_CALM_S: each list is a generation of its
processes, which stay until their streams have ended."""
EDGE_CALM_S = 10.0
EDGE_CONNECT_TIMEOUT_S = 2
EDGE_TRIES = 3
"""Proxies that get a request at most, one after the other, all before the first byte of an answer."""
EDGE_READ_TIMEOUT_S = 3_600
"""Between two pieces of an answer; a prefill of any length has passed by then."""
EDGE_GENERATION_S = 3_600
"""How long processes of an old list may keep their streams."""
EDGE_CLIENTS = 4_096
"""Requests in hand at once, unless told otherwise; a further one is told to come again."""
EDGE_HEADER_BUFFERS = 2
"""Of MAX_HEADER_LINE_BYTES, for the head of one request."""
EDGE_HEADER_TIMEOUT_S = 10
"""For the whole of a head: until then nobody knows who it is that takes the place."""
EDGE_BODY_BUFFER_BYTES = 16 * 1024
"""What is longer lies in EDGE_TMP_DIR. With the head and the piece of an answer it is what a client costs of memory:
`edge/capacity.py` has the sum."""
EDGE_ANSWER_BUFFER_BYTES = 16 * 1024

# --- tokenizer --------------------------------------------------------------------------------------------
MAX_TOKENIZER_BYTES = 64 * 1024 * 1024
TOKENIZE_INLINE_CHARS = 2_048
"""Uncached text up to this length is tokenized on the event loop (under 0.5 ms); more goes to a thread."""
TOKENIZE_THREADS = 2
MAX_TOKENIZE_CHARS = 2 * 1024 * 1024
"""Most characters (or ids) of one /tokenize or /detokenize; each costs some 140 bytes while it is in work."""
LARGE_BODY_BYTES = 1024 * 1024
"""From this size on (0.4 s) bodies are taken apart one at a time, so that one tokenizing thread is everybody else's."""
PIECE_CACHE_BYTES = 64 * 1024 * 1024
"""Memory of one renderer's memoised pieces of prompt, text and ids together."""
MAX_PROMPT_CHARS = 64 * 1024 * 1024
"""Most characters a chat template may write: one that repeats the tools with every message multiplies a body."""
OFFLOAD_BODY_BYTES = 64 * 1024
"""Bodies from this size on are parsed and rendered in a thread."""
OFFLOAD_MESSAGES = 64
"""So are chats of this many messages: a template takes 35 us for each, however short it is."""
TOKENIZER_FETCH_TIMEOUT_S = 60.0

# --- upstream ---------------------------------------------------------------------------------------------
CONNECT_TIMEOUT_S = 5.0
RECONNECT_FIRST_S = 0.05
RECONNECT_MOST_S = 2.0
WORKER_SILENCE_S = 2.0
"""A worker that sends no beat for this long (four of them) hangs: its stream is cut, and what it had goes on
elsewhere. It costs one that was merely late no more than to compute that again. So does one whose beats count for this
long fewer requests than were sent to it."""
WORKER_KNOWS_S = 1.0
"""A request that was sent so long ago stands in a beat: two of them, in case they have crossed."""
WORKER_SUSPECT_S = 1.25
"""After two missing beats a worker gets no further request as long as another one may take it."""
WORKER_STUCK_LEAST_S = 5.0
WORKER_STUCK_CHUNKS = 10.0
"""So does one that beats and has work, but makes no step for the longer of the time above and of so many full chunks at
its prefill rate ..."""
WORKER_DEEP_TOKENS = 1_000
"""... where prefills are due, of as many chunks at the end of the longest context it takes: more is not known of their
depth, and its rate is a mean over all. At this depth a chunk takes twice as long as at the head: measured with the demo
model on one core, 0.5 s there and 4.3 s at 7,500 tokens; on a GPU, or with a larger model, it grows more slowly. To cut
an honest worker costs more than to find a stuck one late, for the next one computes the whole prompt, and is cut, too.
For the depth alone, however, it is no longer ..."""
WORKER_STUCK_UNKNOWN_S = 120.0
"""... than this, which also stands while it prefills and has not measured its rate: the first chunk of a large model on
a few cores is honest work."""
WORKER_FAULTS = 3
"""So many faults in a row, and a worker is passed over while there is another one, but for one request at a time."""
WORKER_TRIAL_FIRST_S = 1.0
WORKER_TRIAL_MOST_S = 30.0
"""Before that request, doubled from the first to the most with each one that fails."""
END_WAIT_S = 1.0
"""Wait for a worker's last word after an abort on a stop string; the usage in it is the true one."""
SECRET_READ_S = 5.0
MAX_MOVES = 3
"""A request that was given to an idle worker so often waits where it is; one that so many workers failed once they
had begun it, and a further one fails, too, is given up: it may be what breaks them."""
MAX_STEAL_CANDIDATES = 64
"""Requests with the most ahead of them that are looked at for an idle worker: some 20 us each."""
HELD_POLL_S = 0.05
"""Between two looks whether a worker is there for the requests that wait for one."""

# --- plain engines ----------------------------------------------------------------------------------------
ENGINE_ASK_S = 2.0
"""Between two probes of an engine that is up."""
ENGINE_ASK_TIMEOUT_S = 5.0
"""For each question of a probe."""
ENGINE_FAILED_PROBES = 2
"""So many in a row, and an engine that was up is down; a refused connection of a request is enough."""
ENGINE_RETRY_FIRST_S = 0.25
ENGINE_RETRY_MOST_S = 5.0
"""Between two probes of an engine that is down, doubled from the first to the most."""
ENGINE_CONTROL_S = 600.0
"""For what every engine is told to do: to load weights from a disk takes minutes."""
ENGINE_SUSPECT_S = 2.0
"""An engine that takes longer to list its models gets no further request as long as another one may take it."""
ENGINE_STUCK_S = 60.0
"""Nor does one with requests that sent no byte and counted no token for so long."""
FAMILY_READ_S = 0.25
"""A generation that another proxy opened is known after this time; it has claims only when one more was opened."""
FAMILY_SETTLED_S = 5.0
"""Proxies see within this time that an engine lost its cache; what the first one began is not begun again."""
MAX_QUEUED_CLAIMS = 256
"""Prompts of one engine whose claims wait to be written; of more the oldest are lost."""

# --- connections to engines -------------------------------------------------------------------------------
ENGINE_CONNECTIONS = 1_024
"""Requests at once to one engine; a further one waits. Far above what an engine runs at once (vLLM: 256 sequences)."""
ENGINE_KEEP_ALIVE_S = 4.0
"""An idle connection is not used again after this time: uvicorn, so vLLM and SGLang, closes its own after 5 s."""
ENGINE_KEEP_ALIVE_SHARE = 0.8
"""Of the time that an engine names in `Keep-Alive: timeout=N`: the rest is for the way there and a late loop."""
ENGINE_GAP_S = 300.0
"""Between two pieces of an answer's body: a preempted sequence is computed anew before its next token.

There is none before the first piece, unless it is set: a long prompt behind others, or a whole answer that is not
streamed, may take half an hour; a host that vanished is found by ENGINE_PROBE_S, a hung engine by its health.
"""
ENGINE_PROBE_S = 30
"""A connection on which nothing came for this long is probed by the kernel ..."""
ENGINE_PROBE_INTERVAL_S = 10
ENGINE_LOST_S = 60
"""... and given up after this time without any sign from the engine's host, also while a request waits to be read."""
ENGINE_WATCH_S = 1.0
"""Most time between two looks at what is overdue; a quarter of the shortest limit if that is less."""
MAX_ENGINE_HEAD_BYTES = 64 * 1024
"""Bytes of an engine's head; also those between two pieces of a body, of chunk extensions and trailers."""

# --- proxy ------------------------------------------------------------------------------------------------
MAX_MATCHES_AT_ONCE = 8
"""Prompts of one request that are looked up together; other requests share the connection to Redis."""
LISTEN_BACKLOG = 1_024
"""Connections that the kernel holds until they are accepted; a burst of clients beyond it is refused."""
CORS_MAX_AGE_S = 600
"""How long a browser may remember what a preflight allowed."""
CLIENT_DRAIN_S = 30.0
"""Wait for a client to read the end of a finished stream."""
SHUTDOWN_CLOSE_S = 1.0
"""A proxy that ends waits so long for its last words to be written."""
RETRY_AFTER_S = 1
AWAY_RETRY_AFTER_S = 5
"""Where the proxy leaves, or has no room for a body, or the edge finds none. OpenAI's clients ask twice more: together
that is longer than the only proxy is away for its restart (measured on two busy cores: 4 to 7 s)."""
SAME_WARNING_S = 10.0
"""A warning that repeats is logged once in this time."""

# --- requests to plain engines ----------------------------------------------------------------------------
MAX_SSE_EVENT_BYTES = 8 * 1024 * 1024
"""Longest event, or whole answer, that is looked into; of a longer one the usage is not known, its bytes go on."""
MAX_ANSWER_BYTES = 256 * 1024
"""Bytes of an answer that are kept to claim it with its prompt (some 1,300 tokens as a stream); of a longer one the
prompt alone is claimed, which is most of a prefix all the same. So it is where the body has LARGE_BODY_BYTES."""
MAX_KEPT_ANSWERS = 256
"""Of those that are on their way ..."""
MAX_KEPT_PROMPT_BYTES = 64 * 1024 * 1024
"""... with bodies of so many bytes together ..."""
MAX_QUEUED_ANSWERS = 64
"""... and of those that are over and wait to be read: 80 MB of answers in all at most, and 128 MB of bodies."""
MAX_PREDICTED_PROMPTS = 512
"""A completion of more prompts is not predicted; nor is, by its tokens, ..."""
MAX_PREDICTED_TEXT_BYTES = 4 * 1024 * 1024
"""... a text of more bytes as UTF-8: each takes up to 200 bytes while it is in work, and a million tokens are about as
long."""
MAX_PREDICTED_COMMAS = 262_144
"""Nor any chat with more commas, text included: to write its tools down in their order takes up to 0.6 us each."""
MAX_CACHE_KEY_CHARS = 64 * 1024
"""Nor anything whose `cache_salt`, or other key of its own, is longer."""
MAX_HELD_REQUESTS = 1_024
"""Requests of one proxy that wait for one engine; a further one is told when to come again."""
HELD_BATCH_S = 0.05
"""Prefills that together take no longer than this are given to an engine at once: it computes them in one step."""
HELD_OVERRUN = 1.5
HELD_OVERRUN_S = 0.05
"""A prefill whose end nobody sees, for its answer comes whole, is taken for done after 1.5 x its estimate and this."""
HELD_STREAM_S = 30.0
"""So is one of a stream that has not begun after this time, or ten times the estimate: an engine that is full of
decodes, or holds its streams back, is not kept from what it could do besides."""
HELD_DOWN_S = 10.0
"""Wait for an engine to come back, while none that serves the model is up."""
RETRY_AFTER_MOST_S = 60
RELAY_BACKLOG_BYTES = 256 * 1024
"""Bytes a client may leave unread before its engine is read no further."""
