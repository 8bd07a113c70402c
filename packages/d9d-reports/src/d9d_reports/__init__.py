"""Lists, comparisons, sweeps and HTML reports of runs."""
