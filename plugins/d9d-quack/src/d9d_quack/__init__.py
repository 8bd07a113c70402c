"""Backends of the ops ``rms_norm``, ``swiglu`` and ``grouped_linear`` by the library QuACK."""
