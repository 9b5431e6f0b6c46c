"""From an SGLang object to the engine's terms: declared patches, byte sources of a pool, shadow records beside it."""
