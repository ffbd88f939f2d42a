"""Routing rules of other systems as they were published, for comparison in the simulator."""
