"""Commands ``infer``, ``evaluate`` and ``generate``."""
