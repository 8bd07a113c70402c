"""Contracts of d9d: plugin layer, job file, protocols, events, programs of a step, and the command line.

This file imports nothing, so that ``d9d_core.plugin`` loads without torch. The public names are in
:mod:`d9d_engine.api` (for users) and :mod:`d9d_core.plugin` (for plugin authors).
"""
