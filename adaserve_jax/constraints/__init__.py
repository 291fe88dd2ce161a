"""What requests ask of the target's logits, told for every sampled position of a step. Host side: imports no jax."""
