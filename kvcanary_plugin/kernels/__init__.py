"""The arithmetic of the shadow record: per operation one stem, a torch reference and the backends beside it."""
