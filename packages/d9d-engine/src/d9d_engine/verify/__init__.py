"""Does a layout compute what one process computes? ``d9d verify`` and what it is made of."""
