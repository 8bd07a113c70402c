"""Communication of a job in words and numbers, for `d9d explain`: placements, and the collectives of a step."""
