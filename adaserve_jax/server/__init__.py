"""The HTTP front end: OpenAI-compatible routes over any `EngineClient`. Never imports jax."""
