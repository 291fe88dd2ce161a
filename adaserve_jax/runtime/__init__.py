"""Everything that compiles or runs on a device: buckets, packed arrays, programs, the executor."""
