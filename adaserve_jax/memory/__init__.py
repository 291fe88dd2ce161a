"""KV memory. Host files (page_pool) never import jax."""
