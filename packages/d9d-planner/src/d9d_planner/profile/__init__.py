"""Measurement of a job's steps and the reason for their time: ``d9d profile``."""
