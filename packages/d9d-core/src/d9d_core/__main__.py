"""``python -m d9d_core`` is the same as ``d9d``."""

from d9d_core.cli.main import main

if __name__ == "__main__":
    main()
