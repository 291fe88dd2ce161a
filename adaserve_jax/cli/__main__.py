"""`python -m adaserve_jax.cli` is `adaserve`."""

from adaserve_jax.cli import main

main()
