"""ATOM: an OpenAI-compatible server for mixture-of-experts models whose dispatch wire is chosen at launch."""

__version__ = "0.1.0"
