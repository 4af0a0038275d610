"""Headrace: the gateway in front of vLLM engines."""

__version__ = "0.1.0"
