"""What a measurement leaves behind: request records, result rows, their files and their aggregation. Imports no jax."""
