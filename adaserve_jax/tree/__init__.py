"""Draft trees on the device: sampling, beam search, logit edits, verification."""
