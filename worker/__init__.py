"""Whatever holds KV: the engine, its block pool, its scheduler and its server."""
