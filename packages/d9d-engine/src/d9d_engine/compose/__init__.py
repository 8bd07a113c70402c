"""Composition of a trainer from a job: components, strategies, kernels and initial weights; and the plan of a job.

A plan is made without a GPU, a process group or memory for the model.
"""
