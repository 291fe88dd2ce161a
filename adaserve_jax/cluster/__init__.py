"""Several servers and draft services behind one router, started and kept running together."""
