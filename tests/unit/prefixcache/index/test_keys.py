from __future__ import annotations

import re

import pytest

from prefixcache.errors import ConfigError
from prefixcache.index import keys, scripts
from prefixcache.index.keys import NamespaceKeys

SCRIPTS = [script for script in vars(scripts).values() if isinstance(script, scripts.Script)]
KEYS = NamespaceKeys(key_prefix="deploy", namespace="0123456789abcdef")


def test_names() -> None:
    assert KEYS.meta == "deploy:{0123456789abcdef}:meta"
    assert KEYS.live == "deploy:{0123456789abcdef}:live"
    assert KEYS.batches == "deploy:{0123456789abcdef}:seq"
    assert KEYS.claims_held == "deploy:{0123456789abcdef}:n"
    assert KEYS.buckets == "deploy:{0123456789abcdef}:b:"
    assert KEYS.long_runs == "deploy:{0123456789abcdef}:h:"
    assert KEYS.pending == "deploy:{0123456789abcdef}:p:"
    assert KEYS.loads == "deploy:{0123456789abcdef}:l:"
    assert KEYS.keeper == "deploy:{0123456789abcdef}:keeper"
    assert keys.registry_key("deploy") == "deploy:reg"
    assert keys.secret_key("deploy") == "deploy:secret"


@pytest.mark.parametrize("prefix", ["", "a{b", "a}b", "a b", "a\nb", "a\0b"])
def test_prefix_that_would_move_the_hash_tag_is_refused(prefix: str) -> None:
    with pytest.raises(ConfigError, match="key prefix"):
        keys.check_key_prefix(prefix)


@pytest.mark.parametrize("prefix", [keys.DEFAULT_KEY_PREFIX, "team-7:prod", "über"])
def test_printable_prefixes_are_taken(prefix: str) -> None:
    keys.check_key_prefix(prefix)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: str(script.name))
def test_every_script_says_what_it_takes_gives_costs_and_prevents(script: scripts.Script) -> None:
    own = script.text[script.text.index(f"-- {script.name}:") :]
    for heading in ("KEYS[1]", "ARGV[1]", "Returns", "Cost", "Race"):
        assert re.search(rf"^-- {re.escape(heading)} ", own, re.MULTILINE), heading


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: str(script.name))
def test_no_script_names_a_key_that_is_not_in_the_table(script: scripts.Script) -> None:
    described = set(re.findall(r"^    P:\{ns\}(:\w+)", keys.__doc__ or "", re.MULTILINE))
    used = {f":{name}" for name in re.findall(r"BASE \.\. ':(\w+)", script.text)}
    assert used <= described
    assert not re.search(r"redis\.call\('(KEYS|SCAN|FLUSHALL|RANDOMKEY)'", script.text)
