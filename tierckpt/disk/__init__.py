"""Local files: durable writes, locks, leases, ownership, the page cache, and how the device likes to be used."""
