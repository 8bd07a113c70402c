"""Commands of the group ``torchft``."""
