"""TensorBoard: event files of a run."""
