"""`python -m tests.support.health_watch URL`: asks until its stdin is closed, and prints how long the slowest took.

In a process of its own: a test that sends megabytes is late itself. Seconds.
"""

from __future__ import annotations

import select
import sys
import time
import urllib.request

POLL_S = 0.1


def main(url: str) -> None:
    slowest_s = 0.0
    while not select.select([sys.stdin], [], [], POLL_S)[0]:
        began = time.monotonic()
        with urllib.request.urlopen(url, timeout=30) as answer:
            assert answer.status == 200
            answer.read()
        slowest_s = max(slowest_s, time.monotonic() - began)
    print(slowest_s)


if __name__ == "__main__":
    main(sys.argv[1])
