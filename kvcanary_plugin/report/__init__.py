"""Renderings of a violation and the sinks they go to."""
