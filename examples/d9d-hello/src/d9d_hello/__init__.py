"""A plugin by a third party. Copy this directory to begin your own."""
