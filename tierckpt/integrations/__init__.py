"""Thin adapters to other people's programs. Nothing here is imported unless they ask, and they are never imported here
before they do."""
