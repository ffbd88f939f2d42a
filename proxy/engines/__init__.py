"""Plain engines: OpenAI-compatible servers with nothing beside them, as destinations of this proxy."""
