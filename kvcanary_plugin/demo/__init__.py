"""A demonstration on a real server: a tiny model, traffic, faults, and what the canary says about each."""
