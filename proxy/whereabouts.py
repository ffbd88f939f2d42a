"""Where one generation is, and where it goes from there as long as no token of it has come.

placed ──send──► on a worker ──refused: overloaded, draining──► on another one, of those that have not refused it
                      └── asked for back, and given back ──► on the idle worker it was asked back for
"""

from __future__ import annotations

from contextlib import ExitStack

from prefixcache.errors import ContextLengthExceeded, NoWorkerReady, Overloaded, Unavailable
from prefixcache.limits import MAX_MOVES
from prefixcache.protocol import Generate
from proxy.placement import Placement
from proxy.placer import Asked, Placer, ReservedPrompt
from proxy.prompt_frames import PromptFrames
from proxy.reservation import ReservedChoice
from proxy.worker_link import WorkerLink
from proxy.worker_stream import Sink, WorkerStream


class Whereabouts:
    """Of one choice of one prompt."""

    def __init__(
        self,
        placer: Placer,
        reserved: ReservedPrompt[WorkerLink],
        frames: PromptFrames,
        choice: int,
        scopes: ExitStack,
        *,
        is_alone: bool = False,
    ) -> None:
        """`scopes` own the reservations; `is_alone`: no other generation answers the same request."""
        self._placer = placer
        self._reserved = reserved
        self._frames = frames
        self._scopes = scopes
        self._is_alone = is_alone
        self._num_moves = 0
        self._refusals: dict[str, Unavailable] = {}
        """By worker id."""
        self._stream: WorkerStream | None = None
        self._frame: Generate | None = None
        self.number = choice
        """Of the choice among those of its prompt."""

    @property
    def placement(self) -> Placement[WorkerLink]:
        return self._reserved.placement

    @property
    def asked(self) -> Asked[WorkerLink]:
        return self._reserved.asked

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
        return self._is_alone and self._num_moves < MAX_MOVES and stream is not None and stream.knows_if_waiting

    def send(self, sink: Sink) -> None:
        """Raises NoWorkerReady if the worker is gone."""
        self._send(sink, is_first=True)

    def send_elsewhere(self, sink: Sink, refusal: Unavailable) -> None:
        """Its worker does not take it. Raises Overloaded if no other one does and that is why, else NoWorkerReady."""
        self._refusals[self.placement.link.worker_id] = refusal
        self.choice.gone()  # where other choices of the prompt stay, it leaves them
        while True:
            try:
                self._reserved = self._placer.place_elsewhere(self._reserved, self._refusals.keys(), self._scopes)
            except (NoWorkerReady, ContextLengthExceeded):
                raise self._final_refusal() from None
            try:
                return self._send(sink, is_first=False)
            except NoWorkerReady as error:
                self._refusals[self.placement.link.worker_id] = error

    def move(self, sink: Sink, link: WorkerLink) -> None:
        """Its worker gave it back: to `link`, or elsewhere where that is gone by now. Raises as `send_elsewhere`."""
        self._num_moves += 1
        self._reserved = self._placer.move(self._reserved, link, self._scopes)
        try:
            self._send(sink, is_first=False)
        except NoWorkerReady as error:
            self.send_elsewhere(sink, error)

    def _send(self, sink: Sink, *, is_first: bool) -> None:
        stream = self.placement.link.stream
        if stream is None:
            raise NoWorkerReady("the worker was lost as it was chosen, try again")
        frame = self._frames.frame(self.placement, self.number, is_first=is_first)
        try:
            stream.generate(frame, sink)
        except Unavailable as error:
            raise NoWorkerReady(str(error)) from error
        self._stream, self._frame = stream, frame

    def _final_refusal(self) -> Unavailable:
        overloaded = [error for error in self._refusals.values() if isinstance(error, Overloaded)]
        if overloaded:
            return min(overloaded, key=lambda error: error.retry_after_s or 0)
        return NoWorkerReady("no worker takes the request now, try again in a moment")
