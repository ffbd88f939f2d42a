"""Protocol v1: the only words that proxy and worker exchange about a request.

One TCP or unix stream per proxy process and worker; a frame is a u32 big-endian length and that many bytes of
msgpack (one map with its type under "type"); many requests are interleaved.

    proxy                                   worker
      hello  ────────────────────────────────►          both sides first, once; a mismatch ends the stream
             ◄────────────────────────────────  hello
      prove  ────────────────────────────────►          where there is a worker token: see worker_token.py
      generate {id} ─────────────────────────►
             ◄──────────────────────────────── accepted {id}     it waits
             ◄──────────────────────────────── started {id}      its first chunk is being computed
             ◄──────────────────────────────── step [{id} ..]    one frame an engine step, all requests of the stream
             ◄──────────────────────────────── end {id} | fail {id}      exactly one of them, and the last word on id
      abort {id} ────────────────────────────►          answered by `end` with reason "aborted", or crosses another end
      abort {id, if_waiting} ────────────────►          the same if it waits, else nothing: its `started` was sent
             ◄──────────────────────────────── beat              every 0.5 s and when no first token is owed any more

Unknown fields and unknown frame types are ignored, so that adjacent minor versions work together; the major version
must be equal. Text lives in the proxy only: a worker sees and returns token ids.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from prefixcache.errors import ProtocolError
from prefixcache.limits import MAX_FRAME_BYTES

MAJOR = 1
MINOR = 3


class Frame(msgspec.Struct, frozen=True, tag_field="type", omit_defaults=True):
    """Base of all frames."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the next token is drawn. The draw for output token n depends on (seed, choice, n) alone.

    Order: logit_bias, penalties (repetition first), min_tokens, temperature, top_k, top_p, min_p. Log probabilities
    are those of the model's own logits, before any of it.
    """

    seed: int
    """0 <= seed < 2**64, made by the proxy if the client sent none."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int | None = None
    """Only the k most likely tokens; None for all."""
    min_p: float = 0.0
    """Only tokens at least this fraction as likely as the most likely one."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of each token in the output so far."""
    frequency_penalty: float = 0.0
    """Subtracted for each time that a token stands in the output so far."""
    repetition_penalty: float = 1.0
    """Positive logits of tokens in prompt or output are divided by it, negative ones multiplied."""
    logit_bias: dict[int, float] = {}
    """Token id -> what is added to its logit."""
    min_tokens: int = 0
    """Stop ids are not drawn before this many output tokens."""
    top_logprobs: int | None = None
    """Alternatives whose log probabilities come with each token; 0 for the drawn token alone, None for nothing."""


class Hello(Frame, frozen=True, kw_only=True, tag="hello"):
    major: int = 1
    minor: int = 0
    """Version 1.0 does not send its number, so what is absent means that for good; say `minor=MINOR` of this side."""
    namespace: str
    """16 hex digits; a proxy says which one it expects, a worker which one it holds."""
    incarnation: int = 0
    """The life of the worker's KV cache; from a worker only."""
    started_at: float = 0.0
    """Of the worker's process, as in its record: an unknown one has an empty cache. 0 tells nothing."""
    nonce: bytes = b""
    """Random, from a side that has a worker token; the proofs are over those of both sides."""
    proof: bytes = b""
    """That the worker knows the worker token; from a worker only."""


class Prove(Frame, frozen=True, kw_only=True, tag="prove"):
    proof: bytes
    """That the proxy knows the worker token; sent once, between the worker's hello and everything else."""


class Generate(Frame, frozen=True, kw_only=True, tag="generate"):
    id: str
    """Made by the proxy, unique on the stream."""
    root: int
    """Root hash: parent of block 0."""
    prompt_ids: bytes
    """u32 little-endian."""
    output_ids: bytes = b""
    """Tokens generated so far by another worker, u32 little-endian; limits and draws go on from here."""
    sampling: Sampling
    stop_token_ids: tuple[int, ...] = ()
    choice: int = 0
    max_tokens: int
    """Output tokens in total, `output_ids` included; at least one more than those."""
    waited_s: float = 0.0
    """Seconds since the request came to the proxy: what it has waited before it came to this worker."""
    predicted_hit_tokens: int | None = None
    """Prompt tokens that the index says this worker holds, from claims alone.

    None where the expectation was another one: pending claims, a retry, a move or a continuation.
    """
    predicted_for: int = 0
    """The incarnation whose claims were read; of another life of the cache a prediction tells nothing."""


class Abort(Frame, frozen=True, kw_only=True, tag="abort"):
    id: str
    if_waiting: bool = False
    """Only a request that has not started is ended; one whose `started` was sent goes on."""


class Accepted(Frame, frozen=True, kw_only=True, tag="accepted"):
    id: str
    position: int
    """Requests that wait already; which of them goes first is the worker's to choose."""


class Started(Frame, frozen=True, kw_only=True, tag="started"):
    id: str
    cached_tokens: int
    """Prompt tokens whose KV was there when the first chunk began; `end` has the final count."""


LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot write, and for all below it; OpenAI's API has the same."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural log probabilities at one output token, none below LEAST_LOGPROB."""

    logprob: float
    """Of the token drawn."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log probability), most likely first; as many as were asked for."""


class StepEntry(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one request."""

    id: str
    index: int
    """Place of the first of `ids` in the output, counting from the beginning of `output_ids`."""
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One for each of `ids` where they were asked for."""


class Step(Frame, frozen=True, kw_only=True, tag="step"):
    entries: tuple[StepEntry, ...]


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What a request cost. Token counts; seconds on the worker's clock."""

    cached_tokens: int
    """Prompt tokens whose KV was reused, in whole blocks: the truth that the client is told, as engines count it."""
    copied_tokens: int = 0
    """Less than a block of them after those, copied from a block that begins alike."""
    computed_tokens: int
    """Tokens computed in prefills, also those of `output_ids` and most of those repeated after a preemption.

    Without either, cached + copied + computed = prompt.
    """
    output_tokens: int
    """Drawn by this worker: `output_ids` are not counted."""
    queue_s: float
    prefill_s: float
    decode_s: float
    preemptions: int


EndReason = Literal["stop", "length", "aborted"]
FailKind = Literal["refused", "overloaded", "draining", "worker_fault"]
"""refused: the request is wrong; overloaded, draining: another worker may take it; worker_fault: this one broke."""


class End(Frame, frozen=True, kw_only=True, tag="end"):
    id: str
    reason: EndReason
    usage: Usage


class Fail(Frame, frozen=True, kw_only=True, tag="fail"):
    id: str
    kind: FailKind
    message: str
    retry_after_s: float = 0.0
    """With `overloaded`: after so many seconds there should be room; 0 where it is not known."""


class Beat(Frame, frozen=True, kw_only=True, tag="beat"):
    incarnation: int
    step: int
    """Counts engine steps: standing still while something runs means hung."""
    running: int
    waiting: int
    prefilling: int = 0
    """Of those that run: without a first token. Absent from version 1.1 and older."""
    draining: bool = False
    """The worker finishes what it has and takes nothing new. Version 1.2 and older tell it by a `fail` alone."""


ProxyFrame = Hello | Prove | Generate | Abort
WorkerFrame = Hello | Accepted | Started | Step | End | Fail | Beat


class _Envelope(msgspec.Struct):
    """Just enough of a frame that did not decode to say what it was about."""

    type: str
    id: str | None = None


class MalformedFrame(ProtocolError):
    """One frame with wrong content inside a sound stream; `request_id` tells whose it was, where it says so."""

    def __init__(self, message: str, request_id: str | None) -> None:
        super().__init__(message)
        self.request_id = request_id


_encoder = msgspec.msgpack.Encoder()
_proxy_decoder = msgspec.msgpack.Decoder(ProxyFrame)
_worker_decoder = msgspec.msgpack.Decoder(WorkerFrame)
_envelope_decoder = msgspec.msgpack.Decoder(_Envelope)
_known_types = {
    str(frame.__struct_config__.tag)
    for frame in (Hello, Prove, Generate, Abort, Accepted, Started, Step, End, Fail, Beat)
}


def encode(frame: Frame) -> bytes:
    """The frame with its length prefix. Raises ProtocolError above MAX_FRAME_BYTES."""
    buffer = bytearray(4)
    _encoder.encode_into(frame, buffer, 4)
    size = len(buffer) - 4
    if size > MAX_FRAME_BYTES:
        raise ProtocolError(f"frame of {size} bytes is over the limit of {MAX_FRAME_BYTES}")
    buffer[:4] = size.to_bytes(4, "big")
    return bytes(buffer)


class FrameReader:
    """Cuts a byte stream into frame bodies, whatever the cuts of the reads."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Bodies completed by `data`. Raises ProtocolError as soon as a length over the limit is announced."""
        buffer = self._buffer
        buffer += data
        bodies: list[bytes] = []
        start = 0
        while len(buffer) - start >= 4:
            size = int.from_bytes(buffer[start : start + 4], "big")
            if size > MAX_FRAME_BYTES:
                raise ProtocolError(f"peer announced a frame of {size} bytes, over the limit of {MAX_FRAME_BYTES}")
            end = start + 4 + size
            if len(buffer) < end:
                break
            bodies.append(bytes(buffer[start + 4 : end]))
            start = end
        if start:
            del buffer[:start]
        return bodies


def decode_from_proxy(body: bytes) -> ProxyFrame | None:
    """What a proxy sent; None for a frame type this version does not know. Raises MalformedFrame, ProtocolError."""
    try:
        return _proxy_decoder.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        _raise_unless_unknown_type(body, error)
        return None


def decode_from_worker(body: bytes) -> WorkerFrame | None:
    """What a worker sent; None for a frame type this version does not know. Raises MalformedFrame, ProtocolError."""
    try:
        return _worker_decoder.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        _raise_unless_unknown_type(body, error)
        return None


def _raise_unless_unknown_type(body: bytes, error: Exception) -> None:
    try:
        envelope = _envelope_decoder.decode(body)
    except (msgspec.DecodeError, RecursionError):
        raise ProtocolError(f"frame is not a protocol v1 map: {error}") from error
    if envelope.type in _known_types:
        raise MalformedFrame(f"{envelope.type} frame: {error}", envelope.id) from error


def check_hello(mine: Hello, theirs: Hello) -> None:
    """Raises ProtocolError unless both sides can work together."""
    if theirs.major != mine.major:
        raise ProtocolError(f"peer speaks protocol {theirs.major}.{theirs.minor}, this side {mine.major}.{mine.minor}")
    if theirs.namespace != mine.namespace:
        raise ProtocolError(f"peer is in namespace {theirs.namespace}, this side in {mine.namespace}")
