"""Models: the decoder, its configuration and weights, the tokenizer, and the embedded demo pair."""
