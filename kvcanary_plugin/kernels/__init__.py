"""The arithmetic of the shadow record: one stem per operation, a torch reference that is also the CPU backend."""
