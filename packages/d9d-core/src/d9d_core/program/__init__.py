"""Programs of a step: actions, placement of stages, validation, text form."""
