"""Faults for tests and drills: one small function each, off unless the environment allows them."""
