"""Preference tuning: the task ``dpo`` and the metric ``preference``."""
