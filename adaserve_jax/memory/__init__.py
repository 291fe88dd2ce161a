"""KV memory on the host: page pool, prefix cache, residency of the draft, and the memory ledger. Imports no jax."""
