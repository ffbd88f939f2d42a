"""One request: token ids in, text out, and what it cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixcache.errors import Unavailable, WorkerFault
from prefixcache.protocol import (
    Abort,
    End,
    EndReason,
    Fail,
    Generate,
    Hello,
    Sampling,
    Started,
    Step,
    StepEntry,
    Usage,
    decode_from_proxy,
    encode,
)
from prefixcache.rendering.renderer import Renderer
from proxy import generation as generation_module
from proxy.generation import Generation
from proxy.scored_tokens import ScoredToken, ScoredTokens
from proxy.worker_stream import WorkerStream
from tests.support.fake_worker import made_up_logprobs, token_ids
from tests.support.recording_transport import RecordingTransport
from tests.support.reservations import OneWorker, RecordedChoice
from tests.support.tiny_tokenizer import TINY_EOS_ID, tiny_tokenizer_files

SPACE = "0123456789abcdef"
RENDERER = Renderer(tiny_tokenizer_files())
TEXT = "Hello world, the answer is né \N{BALLOON}!"


@dataclass
class Case:
    """A generation on a stream whose other end is the test."""

    stops: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = (TINY_EOS_ID,)
    is_scored: bool = False
    min_tokens: int = 0
    max_tokens: int = 1000
    texts: list[str] = field(default_factory=list)
    tokens: list[ScoredToken] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.stream = WorkerStream("w1", Hello(namespace=SPACE), lambda beat: None)
        self.transport = RecordingTransport(self.stream)
        self.stream.connection_made(self.transport)
        self.stream.data_received(encode(Hello(namespace=SPACE, incarnation=1)))
        frame = Generate(
            id="a",
            root=1,
            prompt_ids=bytes(4 * 32),
            sampling=Sampling(seed=1, min_tokens=self.min_tokens),
            stop_token_ids=self.stop_token_ids,
            max_tokens=self.max_tokens,
        )
        self.reserved = RecordedChoice()
        self.generation = Generation(
            OneWorker(self.stream, frame, self.reserved),
            detokenizer=RENDERER.detokenizer(),
            stop_strings=self.stops,
            scored=ScoredTokens(RENDERER.token_bytes) if self.is_scored else None,
            on_text=self._take_text,
            on_tokens=self.counts.append,
        )

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def _take_text(self, text: str, tokens: Sequence[ScoredToken]) -> None:
        self.texts.append(text)
        self.tokens += tokens

    def started(self, cached_tokens: int = 16) -> None:
        self.stream.data_received(encode(Started(id="a", cached_tokens=cached_tokens)))

    def step(self, index: int, *ids: int) -> None:
        logprobs = made_up_logprobs(ids, 1 if self.is_scored else None)
        self.stream.data_received(encode(Step(entries=(StepEntry(id="a", index=index, ids=ids, logprobs=logprobs),))))

    def steps(self, ids: tuple[int, ...], ids_a_step: int = 1) -> None:
        for start in range(0, len(ids), ids_a_step):
            self.step(start, *ids[start : start + ids_a_step])

    def end(self, reason: EndReason, output_tokens: int, cached_tokens: int = 16) -> None:
        usage = Usage(
            cached_tokens=cached_tokens,
            computed_tokens=32 - cached_tokens,
            output_tokens=output_tokens,
            queue_s=0,
            prefill_s=0,
            decode_s=0,
            preemptions=0,
        )
        self.stream.data_received(encode(End(id="a", reason=reason, usage=usage)))

    def num_aborts(self) -> int:
        return sum(isinstance(decode_from_proxy(body), Abort) for body in self.transport.frames())


@pytest.mark.parametrize("ids_a_step", [1, 3, 1000])
@pytest.mark.parametrize("reason", ["stop", "length"])
async def test_text_reason_and_usage(ids_a_step: int, reason: EndReason) -> None:
    ids = token_ids(TEXT)
    case = Case(max_tokens=len(ids))
    async with case.generation as generation:
        case.started()
        assert not generation.first.done()
        case.steps(ids, ids_a_step)
        assert generation.first.done() and not generation.done.done()
        case.end(reason, len(ids))
        await generation.done
    assert case.text == TEXT
    assert generation.finish_reason == reason
    assert (generation.output_tokens, generation.cached_tokens, generation.error) == (len(ids), 16, None)
    assert sum(case.counts) == len(ids)
    assert case.num_aborts() == 0


async def test_the_stop_token_gives_no_text() -> None:
    case = Case()
    async with case.generation as generation:
        case.steps((*token_ids("hi"), TINY_EOS_ID))
        case.end("stop", 3)
        await generation.done
    assert case.text == "hi"
    assert generation.output_tokens == 3


async def test_a_stop_token_that_is_an_ordinary_word_gives_no_text_either() -> None:
    (word,) = token_ids(" the")
    case = Case(stop_token_ids=(word,))
    async with case.generation as generation:
        case.steps((*token_ids("hi"), word))
        case.end("stop", 3)
        await generation.done
    assert case.text == "hi"


async def test_an_answer_without_any_token() -> None:
    case = Case()
    async with case.generation as generation:
        case.end("stop", 0)
        await generation.first
        await generation.done
    assert (case.text, generation.finish_reason, generation.output_tokens) == ("", "stop", 0)


async def test_an_incomplete_character_at_the_end_is_flushed_once() -> None:
    ids = token_ids("a\N{BALLOON}")[:-1]
    case = Case(max_tokens=len(ids))
    async with case.generation as generation:
        case.steps(ids)
        assert case.text == "a"
        case.end("length", len(ids))
        await generation.done
    assert case.text.startswith("a\N{REPLACEMENT CHARACTER}")


@pytest.mark.parametrize("ids_a_step", [1, 2, 5, 1000])
async def test_a_stop_string_over_several_tokens(ids_a_step: int) -> None:
    case = Case(stops=("answer", " the"))
    ids = token_ids(TEXT)
    completing = len(token_ids("Hello world, the"))
    async with case.generation as generation:
        case.started(cached_tokens=0)
        case.steps(ids, ids_a_step)
        assert case.text == "Hello world,"
        assert case.num_aborts() == 1
        assert not generation.done.done(), "the worker's last word is awaited"
        case.end("aborted", len(ids), cached_tokens=16)
        await generation.done
    assert generation.finish_reason == "stop"
    assert generation.output_tokens == completing
    assert generation.cached_tokens == 16
    assert case.num_aborts() == 1


async def test_a_worker_that_does_not_end_after_the_stop_string(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation_module, "END_WAIT_S", 0.01)
    case = Case(stops=("world",))
    async with case.generation as generation:
        case.started(cached_tokens=16)
        case.steps(token_ids("Hello world"))
        await generation.done
    assert (generation.finish_reason, generation.cached_tokens, generation.error) == ("stop", 16, None)
    assert case.stream.num_running == 0, "nothing is kept of it"


async def test_a_worker_lost_after_the_stop_string_takes_nothing_away() -> None:
    case = Case(stops=("world",))
    async with case.generation as generation:
        case.started(cached_tokens=16)
        case.steps(token_ids("Hello world"))
        case.transport.abort()
        await generation.done
    assert (case.text, generation.finish_reason, generation.error) == ("Hello ", "stop", None)


async def test_a_possible_stop_prefix_is_released_at_the_end() -> None:
    ids = token_ids("Hello world")
    case = Case(stops=("worldwide",), max_tokens=len(ids))
    async with case.generation as generation:
        case.steps(ids)
        assert case.text == "Hello "
        case.end("length", len(ids))
        await generation.done
    assert (case.text, generation.finish_reason) == ("Hello world", "length")


async def test_a_stop_string_completed_only_by_the_flush() -> None:
    ids = token_ids("a\N{BALLOON}")[:-1]
    case = Case(stops=("\N{REPLACEMENT CHARACTER}",), max_tokens=len(ids))
    async with case.generation as generation:
        case.steps(ids)
        case.end("length", len(ids))
        await generation.done
    assert (case.text, generation.finish_reason) == ("a", "stop")


async def test_ids_sent_twice_are_taken_once() -> None:
    case = Case()
    a, b, c = token_ids("abc")
    async with case.generation as generation:
        case.step(0, a, b)
        case.step(0, a, b)
        case.step(1, b, c)
        case.end("stop", 3)
        await generation.done
    assert case.text == "abc"


async def test_a_skipped_token_is_a_fault_of_the_worker() -> None:
    case = Case()
    async with case.generation as generation:
        case.step(0, *token_ids("a"))
        case.step(2, *token_ids("c"))
        await generation.done
    assert isinstance(generation.error, WorkerFault)
    assert generation.finish_reason is None
    assert case.num_aborts() == 1


async def test_a_worker_that_aborts_by_itself_is_a_fault() -> None:
    case = Case()
    async with case.generation as generation:
        case.end("aborted", 0)
        await generation.done
    assert isinstance(generation.error, WorkerFault)


async def test_a_fail_before_the_first_token_sets_both() -> None:
    case = Case()
    async with case.generation as generation:
        case.stream.data_received(encode(Fail(id="a", kind="overloaded", message="full")))
        await generation.first
        await generation.done
    assert isinstance(generation.error, Unavailable)


@pytest.mark.parametrize("phase", ["waiting", "prefill", "decode"])
async def test_leaving_the_scope_aborts(phase: str) -> None:
    case = Case()
    async with case.generation:
        if phase != "waiting":
            case.started()
        if phase == "decode":
            case.step(0, *token_ids("a"))
    assert case.num_aborts() == 1
    assert (case.stream.num_waiting, case.stream.num_running) == (0, 0)
    case.step(1, 5)
    assert len(case.counts) <= 1, "nothing is heard of it any more"


async def test_a_lost_stream_refuses_the_request() -> None:
    case = Case()
    case.transport.abort()
    with pytest.raises(Unavailable):
        async with case.generation:
            raise AssertionError("not reached")


@given(st.text(alphabet="abé \N{BALLOON}", max_size=12), st.text(alphabet="abé ", min_size=1, max_size=3), st.data())
async def test_any_cut_gives_the_text_before_the_stop(text: str, stop: str, data: st.DataObject) -> None:
    ids = token_ids(text)
    case = Case(stops=(stop,), max_tokens=len(ids))
    async with case.generation as generation:
        place = 0
        while place < len(ids) and generation.finish_reason is None:
            count = data.draw(st.integers(1, 4))
            case.step(place, *ids[place : place + count])
            place += count
        case.end("aborted" if generation.finish_reason else "length", len(ids))
        await generation.done
    expected, found, _ = text.partition(stop)
    assert case.text == expected
    assert generation.finish_reason == ("stop" if found else "length")
    if found:
        least = next(n for n in range(len(ids) + 1) if stop in _decoded(ids[:n]))
        assert generation.output_tokens == least


def _decoded(ids: tuple[int, ...]) -> str:
    """Whole characters only."""
    return RENDERER.detokenizer().feed(ids)


@pytest.mark.parametrize("ids_a_step", [1, 3, 1000])
async def test_each_token_comes_with_the_text_that_begins_with_it(ids_a_step: int) -> None:
    case = Case(is_scored=True)
    ids = token_ids(TEXT)
    async with case.generation as generation:
        case.steps((*ids, TINY_EOS_ID), ids_a_step)
        case.end("stop", len(ids) + 1)
        await generation.done
    assert case.text == TEXT
    assert tuple(token.id for token in case.tokens) == ids, "the stop token is none of the text's"
    assert [token.logprobs.logprob for token in case.tokens] == [-id / 8 for id in ids]
    joined = b"".join(RENDERER.token_bytes(token.id) or b"" for token in case.tokens)
    assert joined.decode() == TEXT
    for token, place in zip(case.tokens, range(len(ids)), strict=True):
        assert token.offset == len(_decoded(ids[:place]))


async def test_tokens_that_a_stop_string_cut_off_are_not_told() -> None:
    case = Case(stops=("world",), is_scored=True)
    ids = token_ids("Hello world")
    async with case.generation as generation:
        case.steps(ids)
        case.end("aborted", len(ids))
        await generation.done
    offsets = [token.offset for token in case.tokens]
    assert case.text == "Hello "
    assert offsets and offsets == sorted(offsets) and offsets[-1] < len(case.text)


async def test_half_a_character_at_the_end_is_told_with_its_bytes() -> None:
    ids = token_ids("a\N{BALLOON}")[:-1]
    case = Case(is_scored=True, max_tokens=len(ids))
    async with case.generation as generation:
        case.steps(ids)
        assert [token.id for token in case.tokens] == list(ids[:1])
        case.end("length", len(ids))
        await generation.done
    assert [token.id for token in case.tokens] == list(ids)
    joined = b"".join(RENDERER.token_bytes(token.id) or b"" for token in case.tokens)
    assert joined == "a\N{BALLOON}".encode()[:-1]


async def test_tokens_without_text_are_told_at_the_end_at_the_latest() -> None:
    ids = (*token_ids("hi"), TINY_EOS_ID, TINY_EOS_ID)
    case = Case(is_scored=True, stop_token_ids=(), max_tokens=len(ids))
    async with case.generation as generation:
        case.steps(ids)
        case.end("length", len(ids))
        await generation.done
    assert case.text == "hi"
    assert tuple(token.id for token in case.tokens) == ids


@pytest.mark.parametrize("ids_a_step", [1, 3, 1000])
async def test_what_comes_after_the_last_token_is_cut_off(ids_a_step: int) -> None:
    most = len(token_ids("Hello world"))
    case = Case(max_tokens=most)
    async with case.generation as generation:
        case.steps(token_ids(TEXT), ids_a_step)
        await generation.done
    assert case.text == "Hello world"
    assert (generation.finish_reason, generation.output_tokens, generation.error) == ("length", most, None)
    assert case.num_aborts() == 1, "the worker would go on"


async def test_what_comes_after_a_stop_token_is_cut_off() -> None:
    case = Case()
    async with case.generation as generation:
        case.steps((*token_ids("hi"), TINY_EOS_ID, *token_ids("there")), 1000)
        await generation.done
    assert (case.text, generation.finish_reason, generation.output_tokens) == ("hi", "stop", 3)


async def test_what_is_billed_is_what_came() -> None:
    case = Case()
    async with case.generation as generation:
        case.started(cached_tokens=1_000)
        assert generation.cached_tokens == 32, "of a prompt of 32"
        case.steps(token_ids("hi"))
        case.end("stop", output_tokens=700, cached_tokens=-5)
        await generation.done
    assert (generation.output_tokens, generation.cached_tokens) == (len(token_ids("hi")), 0)


async def test_an_answer_that_is_cut_short_is_a_fault_of_the_worker() -> None:
    case = Case(max_tokens=3)
    async with case.generation as generation:
        case.steps(token_ids("a"))
        case.end("length", 3)
        await generation.done
    assert isinstance(generation.error, WorkerFault) and "at 1 of 3 tokens" in str(generation.error)


async def test_tokens_without_their_log_probabilities_are_a_fault_of_the_worker() -> None:
    case = Case(is_scored=True)
    async with case.generation as generation:
        case.is_scored = False
        case.step(0, *token_ids("a"))
        await generation.done
    assert isinstance(generation.error, WorkerFault)


async def test_a_stop_string_before_min_tokens_is_text() -> None:
    ids = token_ids("abcabc")
    case = Case(stops=("b",), min_tokens=len(token_ids("abc")))
    async with case.generation as generation:
        case.steps(ids)
        case.end("aborted", len(ids))
        await generation.done
    assert (case.text, generation.finish_reason) == ("abca", "stop")


@given(st.text(alphabet="abé \N{BALLOON}", max_size=12), st.text(alphabet="abé ", min_size=1, max_size=3), st.data())
async def test_any_cut_tells_the_tokens_that_begin_in_the_text(text: str, stop: str, data: st.DataObject) -> None:
    ids = token_ids(text)
    case = Case(stops=(stop,), is_scored=True, max_tokens=len(ids))
    async with case.generation as generation:
        place = 0
        while place < len(ids) and generation.finish_reason is None:
            count = data.draw(st.integers(1, 4))
            case.step(place, *ids[place : place + count])
            place += count
        case.end("aborted" if generation.finish_reason else "length", len(ids))
        await generation.done
    begins = [len(_decoded(ids[:place])) for place in range(len(ids))]
    kept = [place for place, begin in enumerate(begins) if begin < len(case.text)]
    assert [token.id for token in case.tokens] == [ids[place] for place in kept]
    assert [token.offset for token in case.tokens] == [begins[place] for place in kept]
