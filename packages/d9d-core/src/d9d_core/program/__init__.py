"""Programs (the actions of each pipeline rank in a step): placement of stages, validation, text form."""
