"""Draft trees on the device: noise, sampling, beam search, ancestor bits, acceptance. Knows no model and no policy."""
