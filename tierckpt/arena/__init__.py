"""Reusable staging memory: bounded, of huge pages if available, shared if other processes must see it."""
