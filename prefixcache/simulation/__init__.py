"""Replays a trace over a simulated fleet in virtual time, through the very policies that the proxy runs."""
