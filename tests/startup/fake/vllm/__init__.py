"""A stand-in for vLLM: as much of its shape as the hook touches, and quick to import."""

__version__ = "0.32.0"
