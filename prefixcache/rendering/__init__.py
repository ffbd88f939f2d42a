"""Request body to token ids, token ids to text: one code path for every program."""
