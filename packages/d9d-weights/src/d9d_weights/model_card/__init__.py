"""Model card of an export: ``README.md``, as the Hugging Face Hub shows it."""
