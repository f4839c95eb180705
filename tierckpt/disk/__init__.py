"""Local files: durable writes, locks, page cache, and I/O tuning."""
