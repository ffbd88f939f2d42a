"""What fits: how much KV a model keeps of a token, and how many tokens and requests a memory holds."""
