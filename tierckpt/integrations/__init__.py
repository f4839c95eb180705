"""Thin adapters to other programs, imported only by their users."""
