"""Sections of the job file that need no other one."""
