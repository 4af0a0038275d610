"""Adapters: each makes one kind of engine look like routing/engine.py's Engine."""
