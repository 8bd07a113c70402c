"""Model card of an export: ``README.md``, as shown by the Hugging Face Hub."""
