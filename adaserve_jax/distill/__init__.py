"""Online speculative decoding: the draft learns from what is served, and from nothing else."""
