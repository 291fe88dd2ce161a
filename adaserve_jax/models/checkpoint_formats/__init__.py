"""Formats of quantised Hugging Face checkpoints, read as they are; `api.py` is the one way in."""
