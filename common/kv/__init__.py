"""KV blocks: who holds them, how they lie in memory, the memory itself."""
