"""What one placed prompt occupies: its generations in the ledger of its worker, its pending claims in the index.

    placed ──await commit, or post──► moved, where the answer told of a better place ──► sent
    first token of any of its choices: the claims are settled        scope ends before that: they are released
    each choice leaves the ledger when it ends; whatever is left leaves with the scope

`with` owns all of it: nothing waits at its end, so a cancellation cannot interrupt it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Literal

from prefixcache.index.base import Commit, PrefixIndex
from prefixcache.index.boundaries import Boundaries
from prefixcache.metrics import ProxyMetrics
from proxy.destination import Destination
from proxy.load_ledger import LedgerEntry
from proxy.own_claims import OwnClaims

Verb = Literal["place", "settle", "release"]
_REQUEST_NUMBERS = 1 << 32
NO_BOUNDARIES = Boundaries(depths=(), hashes=())


class ReservedChoice:
    """One choice's share of a reservation, told by its generation how far it is; each call may come twice."""

    __slots__ = ("_entry", "_reservation", "is_gone")

    def __init__(self, reservation: Reservation, entry: LedgerEntry) -> None:
        self._reservation = reservation
        self._entry = entry
        self.is_gone = False

    def started(self) -> None:
        self._entry.started()

    def first_token(self) -> None:
        self._entry.first_token()
        self._reservation.settle()

    def gone(self) -> None:
        self.is_gone = True
        self._entry.gone()


class Reservation:
    """Of one prompt with all its choices. The choices after the first have next to nothing to prefill."""

    def __init__(
        self,
        index: PrefixIndex,
        boundaries: Boundaries,
        *,
        own_claims: OwnClaims,
        number: int,
        proxy_id: str,
        num_choices: int,
        metrics: ProxyMetrics,
    ) -> None:
        """`boundaries` of the whole chain; claims are put on those that the chosen worker does not hold.

        `number`: of this process, from 1; it makes the request id.
        """
        self._index = index
        self._all_boundaries = boundaries
        self._own_claims = own_claims
        self._number = number
        self._request_id = bytes.fromhex(proxy_id) + (number % _REQUEST_NUMBERS).to_bytes(4, "big")
        self._proxy_id = proxy_id
        self._num_choices = num_choices
        self._metrics = metrics
        self._boundaries = NO_BOUNDARIES
        self._link: Destination | None = None
        self._incarnation = 0
        self._is_pending = False
        """Whether claims of it stand in the index, for all that was written."""
        self._is_known_here = False
        self.choices: Sequence[ReservedChoice] = ()

    def __enter__(self) -> Reservation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()
        self._end_claims("release")

    def take(self, link: Destination, *, prefill_s: float, claimed_blocks: int) -> None:
        """Enters the ledger of `link`, which holds `claimed_blocks` of the chain; claims are written by what follows.

        A second call moves the reservation. The blocks on which it had claims before stay among those it writes, so
        that the claims move along.
        """
        self.leave()
        entries = [link.ledger.place(prefill_s if choice == 0 else 0.0) for choice in range(self._num_choices)]
        self.choices = [ReservedChoice(self, entry) for entry in entries]
        self._link, self._incarnation = link, link.incarnation
        written = set(self._boundaries.depths) if self._is_pending else set()
        kept = [
            (depth, block)
            for depth, block in zip(self._all_boundaries.depths, self._all_boundaries.hashes, strict=True)
            if depth > claimed_blocks or depth in written
        ]
        self._boundaries = Boundaries(
            depths=tuple(depth for depth, _ in kept), hashes=tuple(block for _, block in kept)
        )
        self._own_claims.add(self._boundaries, self._incarnation, self._number)
        self._is_known_here = True

    def leave(self) -> None:
        """Ends its load and what this process knows of its claims; those in the index stand as they are."""
        for choice in self.choices:
            choice.gone()
        self._forget_here()

    def end_if_left(self) -> None:
        """Releases the claims where every choice has gone; a choice that goes on elsewhere may take it again."""
        if all(choice.is_gone for choice in self.choices):
            self.leave()
            self._end_claims("release")

    @property
    def has_claims_to_write(self) -> bool:
        return bool(self._boundaries.hashes)

    async def commit(self) -> Mapping[int, int]:
        """Writes claims and load; what others have pending there, by incarnation. Raises IndexUnavailable."""
        self._begin_claims()
        return await self._index.commit(self._own_commit("place"))

    def post(self) -> None:
        """As `commit`, without waiting for the answer.

        Where there is nothing to claim, nothing is written at all: the load, which is small then, goes with the next
        report.
        """
        if self.has_claims_to_write:
            self._begin_claims()
            self._index.post(self._own_commit("place"))

    def post_load_of(self, link: Destination) -> None:
        """Tells at once what is left on a worker that the reservation has moved away from."""
        self._index.post(self._commit("release", link, NO_BOUNDARIES))

    def settle(self) -> None:
        """The worker has computed the prompt: its own claims are on their way."""
        self._forget_here()
        self._end_claims("settle")

    def _forget_here(self) -> None:
        if self._is_known_here:
            self._is_known_here = False
            self._own_claims.remove(self._boundaries, self._incarnation, self._number)

    def _begin_claims(self) -> None:
        if not self._is_pending:
            self._is_pending = True
            self._metrics.pending_claims.labels("placed").inc()

    def _end_claims(self, verb: Literal["settle", "release"]) -> None:
        if self._is_pending:
            self._is_pending = False
            self._metrics.pending_claims.labels("settled" if verb == "settle" else "released").inc()
            self._index.post(self._own_commit(verb))

    def _own_commit(self, verb: Verb) -> Commit:
        assert self._link is not None, "a reservation is taken before it is written"
        return self._commit(verb, self._link, self._boundaries)

    def _commit(self, verb: Verb, link: Destination, boundaries: Boundaries) -> Commit:
        return Commit(
            verb=verb,
            request_id=self._request_id,
            boundaries=boundaries,
            incarnation=self._incarnation if link is self._link else link.incarnation,
            proxy_id=self._proxy_id,
            load=link.ledger.record(),
        )
