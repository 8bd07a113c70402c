"""Encoders of records with several fields: texts or words with labels, queries with documents."""
