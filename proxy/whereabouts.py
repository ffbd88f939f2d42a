"""Where one generation is, and where it goes from there.

placed ──send──► on a worker ──refused: overloaded, draining──► on another one, of those that have not refused it
                   │  └── asked for back, and given back ─────► on the idle worker it was asked back for
                   └── lost, with the worker or by its fault ─► on another one, from what has been generated on
                                                                  └── nobody there: it waits for one

Who has failed it does not get it again, but for two cases: a full worker after a while, and one that was lost with its
stream and is connected anew, where it is the last one. A process that was started anew is another one.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from array import array
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from prefixcache.errors import NoWorkerReady, Overloaded, Unavailable, WorkerFault
from prefixcache.limits import MAX_MOVES, RETRY_AFTER_S
from prefixcache.metrics import ProxyMetrics
from prefixcache.protocol import Generate
from proxy.held_requests import HeldRequests, Patience
from proxy.placement import Placement
from proxy.placer import Asked, Placer, ReservedPrompt, Wanted
from proxy.prompt_frames import PromptFrames
from proxy.recent_placements import WorkerProcess
from proxy.reservation import ReservedChoice
from proxy.worker_link import WorkerLink
from proxy.worker_stream import Sink, WorkerStream

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """What a generation needs to get anywhere; one for the process."""

    placer: Placer
    held: HeldRequests
    metrics: ProxyMetrics
    clock: Callable[[], float] = time.monotonic


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    """What one worker process did with it."""

    error: Unavailable | WorkerFault
    stream: WorkerStream | None
    was_lost: bool
    """It went with its stream: that says little of the worker."""
    until: float
    """When it may be asked again."""
    room: int
    """Tokens of its context."""

    @property
    def is_final(self) -> bool:
        """Whether neither it nor who comes in its place is to be waited for."""
        return isinstance(self.error, WorkerFault) and not self.was_lost

    def counts(self, link: WorkerLink, now: float) -> bool:
        """Whether the worker is out of the question, also as the last one."""
        return now < self.until and not (self.was_lost and link.stream is not self.stream)


class Whereabouts:
    """Of one choice of one prompt."""

    def __init__(
        self,
        ways: Ways,
        reserved: ReservedPrompt[WorkerLink],
        frames: PromptFrames,
        choice: int,
        scopes: ExitStack,
        *,
        is_alone: bool = False,
    ) -> None:
        """`scopes` own the reservations; `is_alone`: no other generation answers the same request."""
        self._ways = ways
        self._reserved = reserved
        self._frames = frames
        self._scopes = scopes
        self._is_alone = is_alone
        self._num_moves = 0
        self._failures: dict[WorkerProcess, _Failure] = {}
        self._patience: Patience | None = None
        """Since its last token."""
        self._process: WorkerProcess | None = None
        self._stream: WorkerStream | None = None
        self._frame: Generate | None = None
        self._begun: Placement[WorkerLink] | None = None
        self.number = choice
        """Of the choice among those of its prompt."""
        self.output = array("I")
        """Ids of all that has been generated; they go along wherever it goes."""
        self.num_faults = 0
        """How often a worker failed it, or was lost with it, since its last token."""
        self.num_suspect_faults = 0
        """Of these, those that it may have caused: a worker that was lost before it began is not among them."""
        self._is_started = False
        """Where it is."""
        self.was_begun = False
        """By a worker before this one."""
        self.num_brought_tokens = 0
        """Of the output, those that it brought to where it is."""

    @property
    def placement(self) -> Placement[WorkerLink]:
        """Of the worker where it is, or was last."""
        return self._reserved.placement

    @property
    def begun(self) -> Placement[WorkerLink]:
        """Of the worker that gave its first token; before that, `placement`."""
        return self._begun or self.placement

    @property
    def asked(self) -> Asked[WorkerLink]:
        return self._reserved.asked

    @property
    def vocab_size(self) -> int:
        """Of the worker where it is."""
        return self.placement.link.record.vocab_size

    @property
    def num_prompt_tokens(self) -> int:
        return self.asked.wanted.num_tokens

    @property
    def received_at(self) -> float:
        """Of the request, by time.perf_counter()."""
        return self._frames.received_at

    @property
    def choice(self) -> ReservedChoice:
        """Its share of the reservation."""
        choices = self._reserved.reservation.choices
        return choices[self.number if len(choices) > 1 else 0]

    @property
    def stream(self) -> WorkerStream | None:
        """The one it is sent on; before that, the one it will be."""
        return self._stream or self.placement.link.stream

    @property
    def sent(self) -> tuple[WorkerStream, Generate]:
        """The last frame, and where it went."""
        assert self._stream is not None and self._frame is not None, "nothing was sent"
        return self._stream, self._frame

    @property
    def is_movable(self) -> bool:
        """Whether its worker can be asked for it, and it has not been moved so often that it should wait."""
        stream = self._stream
        is_new = self._is_alone and not self.output
        return is_new and self._num_moves < MAX_MOVES and stream is not None and stream.knows_if_waiting

    def send(self, sink: Sink) -> None:
        """Raises NoWorkerReady if the worker is gone."""
        self._send(sink, is_first=True)

    def started(self) -> None:
        """Its worker has begun."""
        self._is_started = True
        self.choice.started()

    def first_token(self) -> None:
        """Its worker has given the first token since it was sent there."""
        self._is_started = True
        self._begun = self._begun or self.placement
        # It gets on: what it has met so far was not its own doing.
        self._patience = None
        self.num_faults = self.num_suspect_faults = 0
        self.choice.first_token()

    def failed(self, error: Unavailable | WorkerFault) -> None:
        """Its worker does not take it, or has lost it: it is nowhere until it is sent elsewhere."""
        stream = self._stream
        assert self._process is not None, "it was sent to somebody"
        was_lost = stream is None or not stream.open
        self._note(self.placement.link, self._process, error, stream, was_lost=was_lost)
        if isinstance(error, WorkerFault):
            self.num_faults += 1
            self.num_suspect_faults += self._is_started or not was_lost
        self.choice.gone()  # where other choices of the prompt stay, it leaves them

    def send_elsewhere(self, sink: Sink) -> None:
        """Raises what is to be told where nobody takes it now: Overloaded, a WorkerFault, else NoWorkerReady."""
        placer, wanted = self._ways.placer, self._wanted
        while takers := self._takers(wanted.least_room):
            try:
                self._reserved = placer.place_elsewhere(self._reserved, takers, self._scopes, wanted=wanted)
            except NoWorkerReady:
                break
            try:
                return self._send(sink, is_first=False)
            except NoWorkerReady as error:
                self._note_gone(error)
        self._reserved.reservation.end_if_left()
        raise self._final_error()

    def move(self, sink: Sink, link: WorkerLink) -> None:
        """Its worker gave it back: to `link`, or elsewhere where that is gone by now. Raises as `send_elsewhere`."""
        self._num_moves += 1
        self._reserved = self._ways.placer.move(self._reserved, link, self._scopes)
        try:
            self._send(sink, is_first=False)
        except NoWorkerReady as error:
            self._note_gone(error)
            self.send_elsewhere(sink)

    def wait(self) -> asyncio.Future[None]:
        """Done when somebody with room for it may take it, failed with Unavailable if not in time.

        Its patience is that of a request that comes while no worker is there, and begins anew with each token.
        Raises at once Overloaded if too many wait, and Unavailable where nobody who may come has the room.
        """
        namespace, least_room = self.placement.link.namespace, self._wanted.least_room
        known = self._ways.placer.known_links(namespace)
        rooms = [link.max_model_len for link in known if link.process not in self._failures]
        rooms += [failure.room for failure in self._failures.values() if not failure.is_final]
        if rooms and max(rooms) < least_room:
            raise Unavailable(
                f"the rest of the answer needs a context of {least_room} tokens, a worker has {max(rooms)} at most"
            )
        is_new = self._patience is None
        self._patience = self._patience or self._ways.held.patience()
        held = self._patience.hold(
            (namespace, frozenset(self._failures.items())),
            lambda: self._ways.placer.most_room(namespace, self._is_out),
            Unavailable("no worker went on with the request in time, try again"),
            least_room=least_room,
        )
        if is_new:
            self.tell("waits for a worker")
        return held

    def count(self, outcome: str) -> None:
        self._ways.metrics.continuations.labels(outcome).inc()

    def tell(self, what: str) -> None:
        """Logs what becomes of it after a failure, and why."""
        errors = [failure.error for failure in self._failures.values()]
        _logger.warning(
            "request %s, choice %d: %s; %s after %d tokens",
            self._frames.request_id,
            self.number,
            errors[-1] if errors else "nothing failed",
            what,
            len(self.output),
        )

    def _send(self, sink: Sink, *, is_first: bool) -> None:
        link = self.placement.link
        stream = link.stream
        if stream is None:
            raise NoWorkerReady("the worker was lost as it was chosen, try again")
        frame = self._frames.frame(self.placement, self.number, is_first=is_first, output=self.output)
        try:
            stream.generate(frame, sink)
        except Unavailable as error:
            raise NoWorkerReady(str(error)) from error
        self._stream, self._frame, self._process = stream, frame, link.process
        self.was_begun = self.was_begun or self._is_started
        self._is_started = False
        self.num_brought_tokens = len(self.output)

    @property
    def _wanted(self) -> Wanted[WorkerLink]:
        """What it asks of the next worker."""
        wanted, num_output = self.asked.wanted, len(self.output)
        return wanted.continued(num_output, self.sent[1].max_tokens - num_output) if num_output else wanted

    def _note_gone(self, error: NoWorkerReady) -> None:
        """The worker that was chosen is not there."""
        link = self.placement.link
        self._note(link, link.process, error, link.stream, was_lost=True)
        self.choice.gone()

    def _note(
        self,
        link: WorkerLink,
        process: WorkerProcess,
        error: Unavailable | WorkerFault,
        stream: WorkerStream | None,
        *,
        was_lost: bool,
    ) -> None:
        until = self._ways.clock() + RETRY_AFTER_S if isinstance(error, Overloaded) else math.inf
        self._failures.pop(process, None)  # the last one stands last
        self._failures[process] = _Failure(
            error=error, stream=stream, was_lost=was_lost, until=until, room=link.max_model_len
        )

    def _is_out(self, link: WorkerLink) -> bool:
        """Whether it is not to be asked, also as the last one."""
        failure = self._failures.get(link.process)
        return failure is not None and failure.counts(link, self._ways.clock())

    def _takers(self, least_room: int) -> list[WorkerLink]:
        """Workers with room that have nothing to do with its failures, or else those that may be asked again."""
        namespace, takers = self.placement.link.namespace, self._ways.placer.takers
        now = self._ways.clock()

        def failed(link: WorkerLink) -> bool:
            failure = self._failures.get(link.process)
            return link.max_model_len < least_room or (failure is not None and now < failure.until)

        def is_out(link: WorkerLink) -> bool:
            return link.max_model_len < least_room or self._is_out(link)

        return list(takers(namespace, failed) or takers(namespace, is_out))

    def _final_error(self) -> Unavailable | WorkerFault:
        errors = [failure.error for failure in self._failures.values()]
        overloaded = [error for error in errors if isinstance(error, Overloaded)]
        if overloaded:
            return min(overloaded, key=lambda error: error.retry_after_s or 0)
        known = self._ways.placer.known_links(self.placement.link.namespace)
        least_room = self._wanted.least_room
        tried = [self._failures.get(link.process) for link in known if link.max_model_len >= least_room]
        if tried and all(failure is not None and failure.is_final for failure in tried):
            return [failure.error for failure in self._failures.values() if failure.is_final][-1]
        return NoWorkerReady("no worker takes the request now, try again in a moment")
