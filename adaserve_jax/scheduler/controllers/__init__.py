"""Controllers: how deep and wide to draft, how much to verify and to prefill, step by step."""
