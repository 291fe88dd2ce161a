"""Speculation from text already seen: candidate trees of what followed the same tokens before. Host only, no model."""
