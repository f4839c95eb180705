"""Reusable staging memory: huge pages where the kernel has them, bounded, shared where another process must see it."""
