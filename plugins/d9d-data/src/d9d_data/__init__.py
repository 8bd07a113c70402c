"""Datasets of text: files, tokenised and packed to resumable streams of training samples."""
