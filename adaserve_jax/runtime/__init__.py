"""The device side: buckets, packed steps, programs, models, the drafter and the executor."""
