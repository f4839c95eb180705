"""Local files: durable writes, locks, leases, ownership, page cache, and I/O tuning."""
