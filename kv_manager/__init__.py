"""Where the draft's KV lives: the ring's spec, its manager and pool, and its place in the plan."""
