"""Entry point of ``python -m d9d_core``, which runs the same command line as ``d9d``."""

from d9d_core.cli.main import main

if __name__ == "__main__":
    main()
