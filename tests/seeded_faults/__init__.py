"""Faults that a distributed trainer may have: each breaks one thing in this process, before a job is built.

They leave a job of one process alone, which is the reference. Each takes the job, and what undoes the fault.
"""
