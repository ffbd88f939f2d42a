"""What the edge writes for Prometheus is its text format."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from edge.metrics import EdgeMetrics


def test_every_value_has_its_name_its_kind_and_its_help() -> None:
    text = EdgeMetrics(num_known=3, num_ready=2, num_lost=1, num_reloads=7, looked_at=1_796_000_000.5).text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    values = {name: family.samples[0].value for name, family in families.items()}
    assert values == {
        "prefixcache_edge_proxies_known": 3,
        "prefixcache_edge_proxies_ready": 2,
        "prefixcache_edge_proxies_lost": 1,
        "prefixcache_edge_reloads": 7,
        "prefixcache_edge_looked_timestamp_seconds": 1_796_000_000.5,
    }
    assert families["prefixcache_edge_reloads"].type == "counter"
    assert all(family.documentation for family in families.values())
