"""Stands in for the package of 3FS that cannot be installed from an index."""
