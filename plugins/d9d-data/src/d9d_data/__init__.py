"""Datasets of text: files that are tokenised and packed into resumable streams of training samples."""
