"""Commands ``train`` and ``explain``, job checks and health checks of the engine."""
