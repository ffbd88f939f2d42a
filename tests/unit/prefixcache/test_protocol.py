"""Frames of protocol v1: every value survives, every cut is joined, every malformed frame names its request."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixcache import protocol
from prefixcache.errors import ProtocolError
from prefixcache.limits import MAX_FRAME_BYTES
from prefixcache.protocol import (
    Abort,
    Accepted,
    Beat,
    End,
    Fail,
    Frame,
    FrameReader,
    Generate,
    Hello,
    MalformedFrame,
    Prove,
    Sampling,
    Started,
    Step,
    StepEntry,
    TokenLogprobs,
    Usage,
)

counts = st.integers(0, 2**40)
token_ids = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
seconds = st.floats(0, 1e6, allow_nan=False)
names = st.text(max_size=20)

samplings = st.builds(
    Sampling,
    seed=u64,
    temperature=st.floats(0, 2),
    top_p=st.floats(0, 1),
    top_k=st.none() | counts,
    min_p=st.floats(0, 1),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.1, 10),
    logit_bias=st.dictionaries(token_ids, st.floats(-100, 100), max_size=3),
    min_tokens=counts,
    top_logprobs=st.none() | st.integers(0, 20),
)
token_logprobs = st.builds(
    TokenLogprobs,
    st.floats(-9999, 0),
    st.lists(st.tuples(token_ids, st.floats(-9999, 0)), max_size=3).map(tuple),
)
step_entries = st.builds(
    StepEntry,
    id=names,
    index=counts,
    ids=st.lists(token_ids, max_size=4).map(tuple),
    logprobs=st.none() | st.lists(token_logprobs, max_size=4).map(tuple),
)
hellos = st.builds(
    Hello,
    major=counts,
    minor=counts,
    namespace=names,
    incarnation=counts,
    nonce=st.binary(max_size=20),
    proof=st.binary(max_size=40),
)
proxy_frames: st.SearchStrategy[Frame] = st.one_of(
    hellos,
    st.builds(Prove, proof=st.binary(max_size=40)),
    st.builds(
        Generate,
        id=names,
        root=u64,
        prompt_ids=st.binary(max_size=64),
        output_ids=st.binary(max_size=64),
        sampling=samplings,
        stop_token_ids=st.lists(token_ids, max_size=3).map(tuple),
        choice=counts,
        max_tokens=counts,
        waited_s=seconds,
        predicted_hit_tokens=st.none() | counts,
        predicted_for=counts,
    ),
    st.builds(Abort, id=names, if_waiting=st.booleans()),
)
worker_frames: st.SearchStrategy[Frame] = st.one_of(
    hellos,
    st.builds(Accepted, id=names, position=counts),
    st.builds(Started, id=names, cached_tokens=counts),
    st.builds(Step, entries=st.lists(step_entries, max_size=4).map(tuple)),
    st.builds(
        End,
        id=names,
        reason=st.sampled_from(["stop", "length", "aborted"]),
        usage=st.builds(
            Usage,
            cached_tokens=counts,
            computed_tokens=counts,
            output_tokens=counts,
            queue_s=seconds,
            prefill_s=seconds,
            decode_s=seconds,
            preemptions=counts,
        ),
    ),
    st.builds(
        Fail,
        id=names,
        kind=st.sampled_from(["refused", "overloaded", "draining", "worker_fault"]),
        message=names,
        retry_after_s=seconds,
    ),
    st.builds(Beat, incarnation=counts, step=counts, running=counts, waiting=counts, prefilling=counts),
)


def body_of(frame: Frame) -> bytes:
    (body,) = FrameReader().feed(protocol.encode(frame))
    return body


def packed(content: object) -> bytes:
    return msgspec.msgpack.encode(content)


@given(proxy_frames)
def test_frames_of_a_proxy_survive(frame: Frame) -> None:
    assert protocol.decode_from_proxy(body_of(frame)) == frame


@given(worker_frames)
def test_frames_of_a_worker_survive(frame: Frame) -> None:
    assert protocol.decode_from_worker(body_of(frame)) == frame


@given(st.lists(worker_frames, max_size=5), st.data())
def test_reader_joins_any_cut(frames: list[Frame], data: st.DataObject) -> None:
    stream = b"".join(protocol.encode(frame) for frame in frames)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    reader = FrameReader()
    bodies: list[bytes] = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        bodies += reader.feed(stream[start:end])
    assert [protocol.decode_from_worker(body) for body in bodies] == frames


def test_reader_takes_single_bytes_and_empty_reads() -> None:
    stream = protocol.encode(Abort(id="a")) + protocol.encode(Abort(id="b"))
    reader = FrameReader()
    bodies = [body for byte in stream for body in reader.feed(bytes([byte])) + reader.feed(b"")]
    assert [protocol.decode_from_proxy(body) for body in bodies] == [Abort(id="a"), Abort(id="b")]


def test_length_is_big_endian() -> None:
    frame = protocol.encode(Abort(id="x" * 300))
    assert frame[:2] == b"\0\0"
    assert int.from_bytes(frame[:4], "big") == len(frame) - 4


def test_announced_length_over_the_limit_is_refused_before_the_bytes_come() -> None:
    with pytest.raises(ProtocolError, match=str(MAX_FRAME_BYTES + 1)):
        FrameReader().feed((MAX_FRAME_BYTES + 1).to_bytes(4, "big"))
    assert FrameReader().feed(MAX_FRAME_BYTES.to_bytes(4, "big")) == []


def test_frame_over_the_limit_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "MAX_FRAME_BYTES", 100)
    with pytest.raises(ProtocolError, match="over the limit of 100"):
        protocol.encode(Fail(id="a", kind="refused", message="x" * 100))


def test_unknown_fields_are_ignored() -> None:
    body = packed({"type": "abort", "id": "a", "if_waiting": True, "later": {"deep": [1]}})
    assert protocol.decode_from_proxy(body) == Abort(id="a", if_waiting=True)


@pytest.mark.parametrize("content", [{"type": "from_the_future", "id": "a"}, {"type": "from_the_future", "x": [1, {}]}])
def test_unknown_types_are_ignored(content: dict[str, object]) -> None:
    assert protocol.decode_from_proxy(packed(content)) is None
    assert protocol.decode_from_worker(packed(content)) is None


def test_fields_at_their_default_may_be_absent() -> None:
    body = packed(
        {"type": "generate", "id": "a", "root": 1, "prompt_ids": b"", "sampling": {"seed": 1}, "max_tokens": 1}
    )
    assert protocol.decode_from_proxy(body) == Generate(
        id="a", root=1, prompt_ids=b"", sampling=Sampling(seed=1), max_tokens=1
    )


@pytest.mark.parametrize(
    "content",
    [
        {"type": "generate", "id": "a"},
        {"type": "generate", "id": "a", "root": "1"},
        {"type": "generate", "id": "a", "root": 1, "prompt_ids": b"", "sampling": [], "max_tokens": 1},
    ],
)
def test_malformed_frame_names_its_request(content: dict[str, object]) -> None:
    with pytest.raises(MalformedFrame) as caught:
        protocol.decode_from_proxy(packed(content))
    assert caught.value.request_id == "a"


@pytest.mark.parametrize(
    "content",
    [{"type": "end", "id": "a", "reason": "bored"}, {"type": "started", "id": "a", "cached_tokens": None}],
)
def test_malformed_frame_of_a_worker_names_its_request(content: dict[str, object]) -> None:
    with pytest.raises(MalformedFrame) as caught:
        protocol.decode_from_worker(packed(content))
    assert caught.value.request_id == "a"


def test_malformed_frame_without_an_id_names_none() -> None:
    with pytest.raises(MalformedFrame) as caught:
        protocol.decode_from_worker(packed({"type": "beat", "incarnation": "x"}))
    assert caught.value.request_id is None


@pytest.mark.parametrize("body", [b"", b"\xc1", packed([1, 2]), packed({"id": "a"}), packed("abort"), b"\x91" * 5_000])
def test_frame_that_is_no_map_with_a_type_breaks_the_stream(body: bytes) -> None:
    for decode in (protocol.decode_from_proxy, protocol.decode_from_worker):
        with pytest.raises(ProtocolError) as caught:
            decode(body)
        assert not isinstance(caught.value, MalformedFrame)


@given(st.binary(max_size=200))
def test_any_bytes_give_a_frame_or_a_protocol_error(body: bytes) -> None:
    for decode in (protocol.decode_from_proxy, protocol.decode_from_worker):
        try:
            decode(body)
        except ProtocolError:
            continue


@given(
    st.dictionaries(
        st.sampled_from(["type", "id", "root", "prompt_ids", "sampling", "max_tokens", "choice"]),
        st.one_of(st.none(), st.integers(), st.sampled_from(["generate", "abort", "a"]), st.binary()),
    )
)
def test_any_map_gives_a_frame_or_a_protocol_error(content: dict[str, object]) -> None:
    try:
        body = packed(content)
    except OverflowError:
        return
    try:
        protocol.decode_from_proxy(body)
    except ProtocolError:
        return


def test_a_frame_of_the_other_side_is_malformed() -> None:
    """Known types that do not belong into this direction must not pass as unknown ones."""
    with pytest.raises(MalformedFrame):
        protocol.decode_from_proxy(body_of(Started(id="a", cached_tokens=1)))
    with pytest.raises(MalformedFrame):
        protocol.decode_from_worker(body_of(Abort(id="a")))


def test_the_hello_of_version_1_0_has_no_number_and_no_nonce() -> None:
    """As it was on the wire; a later version says its number."""
    old = {"type": "hello", "namespace": "0" * 16}
    assert protocol.decode_from_proxy(packed(old)) == Hello(major=1, minor=0, namespace="0" * 16)
    now = Hello(major=protocol.MAJOR, minor=protocol.MINOR, namespace="0" * 16)
    assert msgspec.msgpack.decode(body_of(now)) == {**old, "minor": 3}


def test_version_1_1_asks_and_tells_nothing_that_is_new_in_1_2() -> None:
    """Frames as they were on the wire: what they do not say must mean what it meant then."""
    generate = {"type": "generate", "id": "a", "root": 1, "prompt_ids": b"", "sampling": {"seed": 1}, "max_tokens": 1}
    request = protocol.decode_from_proxy(packed(generate))
    assert isinstance(request, Generate)
    assert (request.waited_s, request.predicted_hit_tokens, request.predicted_for) == (0.0, None, 0)
    assert protocol.decode_from_proxy(packed({"type": "abort", "id": "a"})) == Abort(id="a", if_waiting=False)
    beat = {"type": "beat", "incarnation": 5, "step": 4, "running": 2, "waiting": 1}
    assert protocol.decode_from_worker(packed(beat)) == Beat(incarnation=5, step=4, running=2, waiting=1, prefilling=0)
    fail = protocol.decode_from_worker(packed({"type": "fail", "id": "a", "kind": "overloaded", "message": "full"}))
    assert isinstance(fail, Fail) and fail.retry_after_s == 0.0


def test_a_worker_of_version_1_2_does_not_say_in_a_beat_that_it_drains() -> None:
    old = {"type": "beat", "incarnation": 5, "step": 4, "running": 2, "waiting": 1, "prefilling": 1}
    now = Beat(incarnation=5, step=4, running=2, waiting=1, prefilling=1)
    assert protocol.decode_from_worker(packed(old)) == now and not now.draining
    assert msgspec.msgpack.decode(body_of(now)) == old, "nor does one of today that stays"


def test_hello_must_agree_on_major_version_and_namespace() -> None:
    mine = Hello(namespace="0" * 16)
    protocol.check_hello(mine, Hello(namespace="0" * 16, minor=mine.minor + 1, incarnation=7))
    with pytest.raises(ProtocolError, match="protocol 2"):
        protocol.check_hello(mine, Hello(namespace="0" * 16, major=2))
    with pytest.raises(ProtocolError, match="namespace"):
        protocol.check_hello(mine, Hello(namespace="1" * 16))
