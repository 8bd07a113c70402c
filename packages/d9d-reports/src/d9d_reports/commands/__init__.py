"""Commands of d9d-reports."""
