"""The verified HF3FS store: a page file, an index of its keys, and the SGLang backend on top of both."""
