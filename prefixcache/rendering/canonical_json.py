"""JSON data as bytes that do not depend on the order in which a client wrote its keys."""

from __future__ import annotations

import json


def canonical_json(value: object) -> bytes:
    """UTF-8, keys sorted, nothing between; unpaired surrogates stay what they are.

    Raises RecursionError for data nested too deeply and ValueError for a number of thousands of digits.
    """
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return text.encode(errors="surrogatepass")
