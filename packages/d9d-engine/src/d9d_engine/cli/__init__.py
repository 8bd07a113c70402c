"""Commands that need the engine."""
