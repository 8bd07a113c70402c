"""Backend of the op ``rms_norm`` by the library QuACK."""
