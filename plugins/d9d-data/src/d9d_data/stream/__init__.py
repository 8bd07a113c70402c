"""Resumable streams of packs over a corpus."""
