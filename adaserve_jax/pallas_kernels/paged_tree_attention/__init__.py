"""Attention of in-flight tokens over paged context and their own tree."""
