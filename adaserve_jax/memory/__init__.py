"""KV memory. Host files (page_pool, migration, prefix_cache) never import jax."""
