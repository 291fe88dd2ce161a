"""`python -m adaserve_jax` is `adaserve`."""

from adaserve_jax.cli import main

main()
