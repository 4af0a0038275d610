"""Answers that need not be computed again: keys, tiers, and flights. Imports nothing of the other packages."""
