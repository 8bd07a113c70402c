"""Backends of the ops ``rms_norm`` and ``swiglu`` by the library QuACK."""
