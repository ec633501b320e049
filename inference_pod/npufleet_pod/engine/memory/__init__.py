"""Memory of the engine: pool, pages of KV, prefix cache and its tiers. Only `kv_cache` imports torch."""
