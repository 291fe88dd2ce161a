"""Constraints of requests on the target's logits, for every sampled position of a step. Host side."""
