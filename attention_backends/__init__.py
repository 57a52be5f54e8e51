"""Which KV the draft reads: the compact table, and native attention backends wrapped to use it."""
