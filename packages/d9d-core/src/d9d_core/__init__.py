"""Contracts of d9d: plugin layer, job file, protocols, events, pipeline programs, and the command line.

This file imports nothing, so that ``d9d_core.plugin`` loads without torch. Public names are in the ``__all__`` of
their modules; plugin authors start at :mod:`d9d_core.plugin`.
"""
