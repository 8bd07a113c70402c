"""Fine-tuning methods with low-rank updates: ``lora`` and ``dora``."""
