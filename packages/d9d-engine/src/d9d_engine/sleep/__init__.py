"""Sleep: a trainer's memory on the device, released for somebody else and taken back."""
