"""Several servers and draft services as one: a router in front of them, and who starts them and keeps them running."""
