"""Aim: a tracker with a local or a remote repository."""
