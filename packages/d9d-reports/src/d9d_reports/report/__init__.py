"""Report of runs: one self-contained HTML page."""
