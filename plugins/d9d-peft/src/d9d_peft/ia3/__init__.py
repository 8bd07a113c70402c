"""Learned scales of activations, written as a method of another package would be: it imports contracts only."""
