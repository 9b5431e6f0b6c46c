"""kvcanary: AddressSanitizer for the KV cache of an SGLang server.

Importing this package changes nothing. SGLang's plugin loader calls :func:`kvcanary_plugin.activate.activate`,
which reads the configuration and, unless the mode is ``off``, installs the patches declared in ``patches/``.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
