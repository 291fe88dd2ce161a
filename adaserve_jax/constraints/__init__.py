"""What requests demand of their logits, decided on the host: which token ids may come next, and at what price."""
