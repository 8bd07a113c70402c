"""Commands of the group ``d9d launch``."""
