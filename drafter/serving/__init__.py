"""An OpenAI-compatible server around the engine."""
