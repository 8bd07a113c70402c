"""Commands ``sweep``, ``runs`` and ``report``."""
