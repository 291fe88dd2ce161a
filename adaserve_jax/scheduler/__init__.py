"""Decides what each step runs: admission, speculation, selection, commit. Never imports jax; touches no device."""
