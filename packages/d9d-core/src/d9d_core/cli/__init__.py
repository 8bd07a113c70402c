"""The command line ``d9d``: parses options, and calls functions of the library."""
