"""Parts of tools/release.py: versions of the members, staged copies, builds, hashes and a trial installation."""
