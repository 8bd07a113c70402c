"""Lists, comparisons and sweeps of runs, and pages about them."""
