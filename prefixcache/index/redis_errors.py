"""What goes wrong with a Redis, in plain words: the same for every way of talking to it."""

from __future__ import annotations

from prefixcache.errors import IndexUnavailable

_NO_FLAGS = "unexpected symbol near '#'"
"""What a Lua says that does not know the first line of a script with flags."""


def no_answer(place: str, waited_s: float) -> IndexUnavailable:
    return IndexUnavailable(f"Redis at {place} gave no answer within {waited_s * 1e3:.0f} ms")


def closed(place: str) -> IndexUnavailable:
    return IndexUnavailable(f"the connection to Redis at {place} is closed")


def failed(place: str, what: object) -> IndexUnavailable:
    if _NO_FLAGS in str(what):
        return IndexUnavailable(f"Redis at {place} is older than 7.0 and cannot run our scripts ({what})")
    return IndexUnavailable(f"Redis at {place} failed: {what}")


def full(place: str) -> IndexUnavailable:
    return IndexUnavailable(f"Redis at {place} has used up its maxmemory and refuses to hold more: raise maxmemory")


def wrong_password(place: str, text: object) -> IndexUnavailable:
    return IndexUnavailable(
        f"Redis at {place} asks for a password, or for another one: "
        f"give it in the URL, redis://:PASSWORD@HOST:PORT ({text})"
    )


def no_permission(place: str, text: object) -> IndexUnavailable:
    return IndexUnavailable(f"the Redis user at {place} lacks a permission: {text}")


def refused(place: str, text: str) -> IndexUnavailable:
    """For an error reply, whose first word is its code."""
    code = text.partition(" ")[0]
    if code in ("NOAUTH", "WRONGPASS") or text.startswith("ERR AUTH "):
        return wrong_password(place, text)
    if code == "NOPERM":
        return no_permission(place, text)
    if code == "OOM":
        return full(place)
    return failed(place, text)
