"""Device kernels, a folder per operation, each with its reference."""
