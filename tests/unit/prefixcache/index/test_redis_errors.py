"""What is said of a Redis names the mend."""

from __future__ import annotations

import pytest

from prefixcache.index import redis_errors

PLACE = "db:6379"


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ("OOM command not allowed when used memory > 'maxmemory'.", "raise maxmemory"),
        ("NOAUTH Authentication required.", "give it in the URL"),
        ("NOPERM this user has no permissions to run the 'eval' command", "the Redis user at db:6379 lacks"),
        (
            "ERR Error compiling script (new function): user_script:1: unexpected symbol near '#'",
            "older than 7.0",
        ),
        ("ERR something else", "failed: ERR something else"),
    ],
)
def test_a_refusal_names_place_and_mend(reply: str, said: str) -> None:
    message = str(redis_errors.refused(PLACE, reply))
    assert PLACE in message and said in message
