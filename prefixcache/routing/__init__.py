"""Routing policies: pure deciders, run by the proxy and by a simulator alike."""
